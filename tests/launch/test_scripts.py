"""What all launch scripts promise: --help of each, and --dry_run of each action that prints commands and calls none."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch.conftest import Fake

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SOURCED = "setup.sh"
COMMANDS = sorted(path.name for path in LAUNCH.glob("*.sh") if path.name != SOURCED)
NEEDS_ARGUMENTS = ("pbc.sh", "mosaics.sh", "tpu_table.sh", "tpu_worker.sh", "tpu.sh", "slurm.sh")
OPTIONS = {
    "tpu.sh": ("--name=a", "--zone=z", "--bucket=gs://b/r", "--fetch=got"),
    "slurm.sh": ("--name=a", "--workdir=w"),
    "dataflow.sh": ("--project=p", "--region=r", "--bucket=gs://b/d", "--image=i"),
}
TRAIN = ("--", "--config=phase0_backbone", "--config.data.root=gs://b/d")
PREPARE = ("--", "--source", "slides", "--root", "share/in", "--out", "share/out")


def actions(script: str) -> list[str]:
    """As the script's own list has them."""
    found = re.search(r"^  (\w+(?: \| \w+)+)\) shift ;;$", (LAUNCH / script).read_text(), re.M)
    assert found
    return found[1].split(" | ")


DRY = [(script, action) for script in ("tpu.sh", "slurm.sh") for action in actions(script)] + [("dataflow.sh", "")]


def run(fake: Fake, tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In an empty folder, with no environment at hand and nothing that could make one."""
    for name in ("python3", "pip", "scancel", "squeue", "sbatch"):
        fake.command(name, "")
    (tmp_path / "here").mkdir(exist_ok=True)
    return subprocess.run(
        [LAUNCH / script, *arguments],
        cwd=tmp_path / "here",
        env=fake.environment | {"PBS_VENV": str(tmp_path / "here/venv")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("asked", ["--help", "-h"])
@pytest.mark.parametrize("script", COMMANDS)
def test_help_is_the_head_of_the_script_and_does_nothing(script: str, asked: str, fake: Fake, tmp_path: Path) -> None:
    done = run(fake, tmp_path, script, asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert script in done.stdout and "set -euo" not in done.stdout
    assert done.stdout.splitlines()[0] in (LAUNCH / script).read_text()
    assert fake.calls() == [] and not list((tmp_path / "here").iterdir())


@pytest.mark.parametrize("script", NEEDS_ARGUMENTS)
@pytest.mark.parametrize("arguments", [(), ("--out=x",)])
def test_missing_arguments_are_answered_with_the_usage(
    script: str, arguments: tuple[str, ...], fake: Fake, tmp_path: Path
) -> None:
    done = run(fake, tmp_path, script, *arguments)
    assert done.returncode == 2 and script in done.stderr and "unbound" not in done.stderr
    assert fake.calls() == [] and not list((tmp_path / "here").iterdir())


def test_only_commands_are_executable() -> None:
    assert {path.name for path in LAUNCH.glob("*.sh") if os.access(path, os.X_OK)} == set(COMMANDS)


@pytest.mark.parametrize(("script", "action"), DRY)
def test_a_dry_run_prints_commands_and_calls_none(script: str, action: str, fake: Fake, tmp_path: Path) -> None:
    done = run(
        fake,
        tmp_path,
        script,
        *filter(None, (action,)),
        *OPTIONS[script],
        "--dry_run",
        *(PREPARE if script == "dataflow.sh" else TRAIN),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(gcloud|sbatch|squeue|scancel|tail|\S*/pbs) ", done.stdout, re.M)
    assert fake.calls() == [] and not list((tmp_path / "here").iterdir())
