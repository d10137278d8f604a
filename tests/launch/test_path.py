"""The whole path of launch/README.md, its lines run as a reader would type them, each training a few steps long."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.slide_qa_bank import DOMINANT, WORDINGS

NEEDS = {("compile",): "libtpu", ("weights", "export"): "torch"}


def path_commands(repo: Path, title: str = "The whole path") -> list[list[str]]:
    """The commands of the section's block, without the leading `pbs`."""
    section = (repo / "launch/README.md").read_text().split(f"## {title}", 1)[1]
    block = section.split("```bash\n", 1)[1].split("```", 1)[0]
    return [shlex.split(line)[1:] for line in block.splitlines() if not line.startswith("#")]


def test_the_path_goes_from_data_to_an_answer(repo: Path) -> None:
    commands = path_commands(repo)
    assert commands[0][:2] == ["data", "run"] and commands[-1][0] == "ask"
    trained = " ".join(argument for command in commands for argument in command if argument.startswith("--config="))
    assert all(f"phase{k}" in trained for k in range(5))
    assert commands[-1][2] in WORDINGS[DOMINANT].blanks  # a wording that slides' questions are trained on


@pytest.mark.slow
def test_every_line_of_the_path_runs(repo: Path, tmp_path: Path) -> None:
    for command in path_commands(repo):
        needed = next((name for head, name in NEEDS.items() if tuple(command[: len(head)]) == head), None)
        if needed and importlib.util.find_spec(needed) is None:
            continue
        argv = [re.sub(r"^(--config=\w+)$", r"\1:debug", argument) for argument in command]
        done = subprocess.run(
            [sys.executable, "-m", "pbs_jax.cli", *argv],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(repo), "JAX_NUM_CPU_DEVICES": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 3), f"pbs {shlex.join(argv)}\n{done.stderr[-3000:]}"
    assert "smear-0-0000" in (tmp_path / "page.html").read_text()
    assert {"report.html", "report.md"} <= {path.name for path in (tmp_path / "bench/report").iterdir()}
