"""`pbs perf` against PyTorch: every side does its work and stands in the table. At small shapes: ratios mean nothing here."""

from __future__ import annotations

from pathlib import Path

import pytest

from pbs_jax.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.mark.parametrize(
    ("args", "sides", "unit"),
    [
        (["step", "--phase", "1", "--size", "nano", "--cells", "3"], 3, "wall"),
        (["step", "--phase", "3", "--size", "nano"], 3, "wall"),
        (["step", "--phase", "4", "--size", "nano", "--patches", "16"], 3, "wall"),
        (["input", "--count", "320", "--growth"], 7, "cells/s"),
    ],
    ids=["phase 1", "phase 3", "phase 4", "input"],
)
def test_every_side_is_measured(
    args: list[str],
    sides: int,
    unit: str,
    shared: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)  # torch.compile takes a minute a program
    place = ["--shared", str(shared)] if args[0] == "step" else ["--cells", str(shared / "data/cells/pbc_barcelona")]
    assert main(["perf", *args, "--rounds", "1", *place]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if f" {unit} " in line]
    assert len(lines) == sides
    assert all(float(line.split(unit)[0].split()[-1].replace(",", "")) > 0 for line in lines)
