"""Two tiny smears with ground truth and the slide job made of them, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep import smear
from pbs_jax.cli import main


@pytest.fixture(scope="session")
def smears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two smears of two tiles with six white cells each."""
    folder = tmp_path_factory.mktemp("smears")
    assert smear.write_smears(folder, 2, seed=3, width=1024, height=512, cells=6) == 12
    return folder


@pytest.fixture(scope="session")
def slide_job(smears: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --out of `pbs data run --source slides` on them."""
    out = tmp_path_factory.mktemp("slide_job")
    assert main(slide_command(smears, out)) == 0
    return out


def slide_command(root: Path, out: Path) -> list[str]:
    """The words after `pbs` that make OUT of the slides under `root`."""
    table = str(root / "slides.csv")
    return ["data", "run", "--source", "slides", "--root", str(root), "--table", table, "--out", str(out)]
