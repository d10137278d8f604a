"""launch/slurm.sh against fake sbatch, squeue, srun and scontrol: submit once, save and requeue, nothing when finished."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.launch.conftest import Fake

TRAIN = ("--", "--config=phase3_cell_qa:size=7b")


@pytest.fixture
def slurm(fake: Fake) -> Fake:
    fake.command("sbatch", "echo 17")
    fake.command("squeue", 'cat "$FAKE_CLOUD/queue" 2>/dev/null || true')
    fake.command("srun", 'exit "$(cat "$FAKE_CLOUD/srun_exit")"')
    fake.command("scontrol", "")
    fake.command("scancel", "")
    return fake


def submit(fake: Fake, tmp_path: Path, *options: str) -> str:
    done = fake.run("slurm.sh", "submit", "--name=n", f"--workdir={tmp_path / 'w'}", *options, *TRAIN)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_has_one_process_a_gpu_and_time_to_save(slurm: Fake, tmp_path: Path) -> None:
    assert "job 17" in submit(slurm, tmp_path, "--nodes=2", "--gpus=8", "--partition=p")
    (call,) = [call for call in slurm.calls() if call.startswith("sbatch")]
    for flag in (
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--requeue",
        "--signal=TERM@180",
        "--partition=p",
    ):
        assert f"{flag} " in call
    assert call.endswith(f"job --config=phase3_cell_qa:size=7b --workdir={tmp_path / 'w'}")


def test_a_queued_or_finished_run_is_not_submitted_again(slurm: Fake, tmp_path: Path) -> None:
    (slurm.folder / "queue").write_text("17 RUNNING")
    assert "already in the queue" in submit(slurm, tmp_path)
    (tmp_path / "w/handover.json").write_text("{}")
    assert "finished" in submit(slurm, tmp_path)
    assert not any(call.startswith("sbatch") for call in slurm.calls())


def test_a_wrong_config_is_not_submitted(slurm: Fake, tmp_path: Path) -> None:
    slurm.real_pbs()
    for dry in ([], ["--dry_run"]):
        done = slurm.run("slurm.sh", "submit", "--name=n", f"--workdir={tmp_path / 'w'}", *dry, "--", "--config=nope")
        assert done.returncode == 2 and "nope is not a configuration" in done.stderr
        assert "nothing was submitted" in done.stderr and not any(call.startswith("sbatch") for call in slurm.calls())


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (1, False)])
def test_only_a_saved_run_is_queued_again(code: int, requeued: bool, slurm: Fake, tmp_path: Path, repo: Path) -> None:
    (slurm.folder / "srun_exit").write_text(str(code))
    spooled = shutil.copy(slurm.launch / "slurm.sh", tmp_path / "slurm_script")  # as sbatch does
    slurm.launch = Path(spooled).parent
    done = slurm.run("slurm_script", "job", "--config=x", PBS_ROOT=str(repo), SLURM_NTASKS="8", SLURM_JOB_ID="17")
    assert done.returncode == code
    calls = slurm.calls()
    assert calls[0] == f"srun --kill-on-bad-exit=1 {repo}/.venv/bin/pbs train --config=x --processes=auto"
    assert ("scontrol requeue 17" in calls) == requeued


def test_a_relative_workdir_is_the_callers(slurm: Fake, tmp_path: Path) -> None:
    done = slurm.run("slurm.sh", "submit", "--name=n", "--workdir=r/w", "--dry_run", *TRAIN)
    assert done.stdout.split()[-1] == f"--workdir={Path.cwd() / 'r/w'}"


def test_cancelling_asks_first(slurm: Fake) -> None:
    done = slurm.run("slurm.sh", "cancel", "--name=n")
    assert done.returncode == 2 and "--yes" in done.stderr and slurm.calls() == []
    assert slurm.run("slurm.sh", "cancel", "--name=n", "--yes").returncode == 0
    assert slurm.calls() == ["scancel --me --name=n"]
