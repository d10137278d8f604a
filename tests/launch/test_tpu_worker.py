"""launch/tpu_worker.sh: what it copies when, and that a run whose machine went away ends with the same weights elsewhere."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Fake
from tests.train.test_loop import assert_identical

REMOTE = "gs://b/runs/a/run"


def stand_in(fake: Fake, body: str) -> dict[str, str]:
    """Environment in which `pbs` is a script; $W is its workdir."""
    fake.command("pbs", f'for a in "$@"; do case $a in --workdir=*) W=${{a#*=}} ;; esac; done\n{body}')
    return {"PBS": str(fake.folder / "bin/pbs"), "PBS_RUN_DIR": str(fake.folder / "vm"), "PBS_WORKER": "t-w-0"}


def remote(fake: Fake) -> Path:
    return fake.folder / "buckets/b/runs/a/run"


def test_the_exit_code_comes_after_everything_else(fake: Fake) -> None:
    extra = stand_in(
        fake, "echo log; mkdir -p $W/checkpoints/2; touch $W/config.json $W/checkpoints/2/commit_success.txt; exit 75"
    )
    done = fake.run("tpu_worker.sh", "run", REMOTE, "-", "--config=x", **extra)
    assert done.returncode == 75, done.stderr
    assert (remote(fake) / "exit_code").read_text().strip() == "75"
    assert (remote(fake) / "train.log").read_text() == "log\n"
    assert (remote(fake) / "checkpoints/2/commit_success.txt").exists()
    assert fake.calls()[-1].startswith("storage cp") and fake.calls()[-1].endswith("exit_code")
    first = next(call for call in fake.calls() if "storage rsync" in call)
    assert "commit_success" in first  # excluded in the first pass, so that it arrives last


def test_a_bucket_that_cannot_be_read_is_no_new_run(fake: Fake) -> None:
    (remote(fake) / "checkpoints").mkdir(parents=True)
    (fake.folder / "storage_down").touch()
    done = fake.run("tpu_worker.sh", "run", REMOTE, "-", "--config=x", **stand_in(fake, "exit 0"))
    assert done.returncode == 1 and "cannot be read" in done.stderr
    assert not any(call.startswith("pbs train") for call in fake.calls())


def test_data_and_finished_phases_come_from_the_bucket(fake: Fake) -> None:
    phase, data = fake.folder / "buckets/b/runs/0a/run", fake.folder / "buckets/b/data"
    for folder, name in ((phase, "handover.json"), (data, "tokenizer.json")):
        folder.mkdir(parents=True)
        (folder / name).write_text("{}")
    fake.run(
        "tpu_worker.sh",
        "run",
        REMOTE,
        "-",
        "--config.init_from.backbone=gs://b/runs/0a/run",
        "--config.data.root=gs://b/data",
        "--config.seed=3",
        **stand_in(fake, "exit 0"),
    )
    (call,) = [call for call in fake.calls() if call.startswith("pbs train")]
    given = dict(word.split("=") for word in call.split() if word.startswith("--config."))
    assert (Path(given["--config.init_from.backbone"]) / "handover.json").exists()
    assert (Path(given["--config.data.root"]) / "tokenizer.json").exists()
    assert given["--config.seed"] == "3"
    assert len({Path(folder).parent for field, folder in given.items() if "seed" not in field}) == 1


def test_other_workers_copy_nothing(fake: Fake) -> None:
    extra = stand_in(fake, "exit 0") | {"PBS_WORKER": "t-w-1"}
    assert fake.run("tpu_worker.sh", "run", REMOTE, str(fake.folder / "mount"), "--config=x", **extra).returncode == 0
    assert [call for call in fake.calls() if call.startswith("storage")] == []


@pytest.mark.slow
def test_a_run_whose_machine_goes_away_ends_with_the_same_weights(fake: Fake, tmp_path: Path, repo: Path) -> None:
    # The engine as it is, on a phase of one matrix, slowed so that it can be caught in the middle.
    train = f'exec {sys.executable} -m tests.train.tiny_run "$W"'
    quiet = tmp_path / "quiet"
    subprocess.run([sys.executable, "-m", "tests.train.tiny_run", str(quiet)], check=True, cwd=repo)

    def start() -> subprocess.Popen[bytes]:
        extra = stand_in(fake, f"cd {repo}\n{train}") | {"PBS_SYNC_SECONDS": "0.2"}
        command = ["bash", str(fake.launch / "tpu_worker.sh"), "run", REMOTE, "-", "--config=x"]
        return subprocess.Popen(command, env=fake.environment | extra, start_new_session=True)

    process = start()
    while process.poll() is None and not list(remote(fake).glob("checkpoints/2/commit_success.txt")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(fake.folder / "vm")  # the machine is gone
    assert start().wait() == 0
    log = (remote(fake) / "train.log").read_text()
    assert "resumed at step" in log or (remote(fake) / "exit_code").read_text().strip() == "0"
    assert_identical(quiet, remote(fake))
