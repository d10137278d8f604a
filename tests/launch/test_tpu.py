"""launch/tpu.sh against a fake gcloud: create, preempt, resume, fail, fetch, delete; what it asks and never does unasked."""

from __future__ import annotations

import re
import shlex
import tarfile
from pathlib import Path

import pytest

from tests.launch.conftest import Fake

WHERE = ("--name=a", "--zone=z", "--bucket=gs://b/runs", "--poll=0")
TRAIN = ("--", "--config=phase0_backbone", "--config.data.root=gs://b/it's here")


def verbs(fake: Fake) -> list[str]:
    """What was done, without what was only asked."""
    found = []
    for call in fake.calls():
        words = call.split()
        if "start" in words or "tpu_worker.sh start" in call:
            found.append("start")
        elif words[0] == "compute" and words[3] in ("create", "delete"):
            found.append(words[3])
        elif words[:2] == ["storage", "rsync"]:
            found.append("fetch")
        elif "tpu_worker.sh install" in call:
            found.append("install")
    return found


@pytest.fixture(autouse=True)
def quick_tar(fake: Fake) -> None:
    fake.command("tar", 'for a in "$@"; do case $a in *.tar.gz) touch "$a" ;; esac; done')


def train(fake: Fake, tmp_path: Path, *options: str, script: str) -> tuple[int, str]:
    (fake.folder / "script").write_text(script)
    done = fake.run("tpu.sh", "train", *WHERE, f"--fetch={tmp_path / 'got'}", *options, *TRAIN)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("options", "kind"), [((), "tpu-vm"), (("--queued", "--spot"), "queued-resources")])
def test_a_preempted_run_goes_on_on_a_new_machine_and_is_fetched(
    options: tuple[str, ...], kind: str, fake: Fake, tmp_path: Path
) -> None:
    code, said = train(fake, tmp_path, "--yes", *options, script="preempt 75 0")
    assert code == 0, said
    # 75: the run was stopped and had saved, on a machine that is still there
    new = ["create", "install", "start"]
    assert verbs(fake) == [*new, "delete", *new, "install", "start", "fetch", "delete"]
    assert (tmp_path / "got" / "exit_code").read_text() == "0"
    created = next(call for call in fake.calls() if " create " in call)
    assert created.startswith(f"compute tpus {kind} create a ") and "v2-alpha-tpuv5-lite" in created
    assert ("--spot" in created) == ("--spot" in options)
    start = next(call for call in fake.calls() if "tpu_worker.sh start" in call)
    (inner,) = [word for word in shlex.split(start) if word.startswith("--command=")]
    assert "--worker=all" in start
    assert shlex.split(inner)[-2:] == list(TRAIN[1:])  # unharmed by both shells


def test_a_failed_training_shows_its_log_and_is_not_started_again(fake: Fake, tmp_path: Path) -> None:
    code, said = train(fake, tmp_path, "--yes", script="1 0")
    assert code == 1
    assert "the loss is not finite" in said and "exit code 1" in said and "costs money" in said
    assert verbs(fake) == ["create", "install", "start"]


def test_restarts_are_limited(fake: Fake, tmp_path: Path) -> None:
    code, said = train(fake, tmp_path, "--yes", "--restarts=1", script="preempt preempt 0")
    assert code == 1 and "all 1 restarts are used up" in said
    assert verbs(fake).count("start") == 2


def test_a_silent_machine_is_started_again(fake: Fake, tmp_path: Path) -> None:
    (fake.folder / "script").write_text("0")
    (fake.folder / "tpu-vm-a").write_text("READY")
    done = fake.run("tpu.sh", "watch", *WHERE, "--stale=-1", *TRAIN)
    assert done.returncode == 0 and "no sign of life" in done.stdout
    assert verbs(fake) == ["install", "start"]


def test_the_archive_holds_what_an_install_needs(fake: Fake) -> None:
    (fake.folder / "bin/tar").unlink()
    (fake.folder / "tpu-vm-a").write_text("READY")
    assert fake.run("tpu.sh", "install", *WHERE).returncode == 0
    with tarfile.open(fake.folder / "buckets/b/runs/a/pbs_jax.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"pyproject.toml", "launch/setup.sh", "launch/constraints.txt", "pbs_jax/cli.py"} <= names
    assert not any("__pycache__" in name for name in names)


def test_several_hosts_need_a_folder_that_all_see(fake: Fake, tmp_path: Path) -> None:
    (fake.folder / "hosts").write_text("4")
    (fake.folder / "tpu-vm-a").write_text("READY")
    done = fake.run("tpu.sh", "run", *WHERE, *TRAIN)
    assert done.returncode == 1 and "4 hosts" in done.stderr and verbs(fake) == []
    (fake.folder / "script").write_text("0")
    done = fake.run("tpu.sh", "run", *WHERE, "--before=mount it", "--shared_dir=/mnt/s", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert any("--command=mount it && bash" in call and " /mnt/s " in call for call in fake.calls())


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_several_hosts_are_known_before_the_machine_is_made(dry: list[str], fake: Fake) -> None:
    where = [flag for flag in WHERE if not flag.startswith("--type=")]
    done = fake.run("tpu.sh", "train", *where, "--type=v5litepod-16", "--yes", *dry, *TRAIN)
    assert done.returncode == 2 and "v5litepod-16 has several hosts" in done.stderr and verbs(fake) == []


def test_a_finished_run_costs_nothing_again(fake: Fake, tmp_path: Path) -> None:
    train(fake, tmp_path, "--yes", script="0")
    (fake.folder / "calls").unlink()
    code, said = train(fake, tmp_path, "--yes", script="0")
    assert code == 0, said
    assert verbs(fake) == ["fetch"]


@pytest.mark.parametrize("action", ["train", "create", "delete"])
def test_nothing_that_costs_or_deletes_happens_unasked(action: str, fake: Fake) -> None:
    done = fake.run("tpu.sh", action, *WHERE, *TRAIN)
    assert done.returncode == 2 and "--yes" in done.stderr
    assert verbs(fake) == []


def test_dry_run_prints_exact_commands_and_calls_nothing(fake: Fake) -> None:
    done = fake.run("tpu.sh", "train", *WHERE, "--queued", "--dry_run", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert fake.calls() == []
    printed = [line for line in done.stdout.splitlines() if re.match("gcloud compute tpus queued-resources", line)]
    assert [line.split()[4] for line in printed] == ["create", "describe", "delete"]


@pytest.mark.parametrize(
    ("options", "training", "said"),
    [
        ((), ("--config=phase9_x",), "phase9_x"),
        ((), ("--config={file}", "--config.data.root=gs://b/d"), "put it into configs/"),
        ((), ("--config=phase0_backbone", "--config.steps=many", "--config.data.root=gs://b/d"), "takes one int"),
        ((), ("--config=phase0_backbone",), "data.root is empty"),
        ((), ("--config=phase0_backbone", "--config.data.root=/local/d"), "config.data.root=/local/d is not on"),
        ((), ("--config=phase4_slide_qa", "--config.data.root=gs://b/d"), "init_from.language_model is empty"),
        (
            ("--before=mount it",),
            ("--config=phase4_slide_qa", "--config.data.root=/mnt/d", "--config.init_from.language_model=runs/lm"),
            "config.init_from.language_model=runs/lm is not on",
        ),
        ((), ("--config", "phase0_backbone"), "write it as one word"),
        ((), ("--config=phase0_backbone", "--config.data.root=gs://b/d", "--steps=3"), "unrecognized arguments"),
    ],
)
def test_what_would_fail_on_the_machine_fails_before_it_is_made(
    options: tuple[str, ...], training: tuple[str, ...], said: str, fake: Fake, tmp_path: Path
) -> None:
    fake.real_pbs()
    own = tmp_path / "own.py"
    own.write_text("from configs.phase0_backbone import get_config as get_config\n")
    words = [word.format(file=own) for word in training]
    for more in ("--yes", "--dry_run"):
        done = fake.run("tpu.sh", "train", *WHERE, more, *options, "--", *words)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert fake.calls() == []


@pytest.mark.parametrize("action", ["create", "run", "watch"])
def test_every_action_that_is_told_the_training_checks_it(action: str, fake: Fake) -> None:
    fake.command("pbs", "exit 1")
    assert fake.run("tpu.sh", action, *WHERE, "--yes", *TRAIN).returncode == 2
    (call,) = fake.calls()
    assert call.startswith("pbs train --config=phase0_backbone ") and call.endswith(" --check_only=gs")


def test_mounted_folders_are_within_reach(fake: Fake) -> None:
    fake.real_pbs()
    training = ("--", "--config=phase0_backbone", "--config.data.root=/mnt/share/d")
    done = fake.run("tpu.sh", "train", *WHERE, "--before=mount it", "--dry_run", *training)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--name=A_b", "--zone=z", "--bucket=gs://b"), "--name"),
        (("train", "--name=a", "--bucket=gs://b"), "--zone"),
        (("train", "--name=a", "--zone=z", "--bucket=b"), "gs://"),
        (("train", "--name=a", "--zone=z", "--bucket=gs://b"), "nothing to train"),
        (("create", "--name=a", "--zone=z", "--bucket=gs://b", "--type=x9"), "--version"),
        (("status", "--nme=a"), "--nme=a"),
    ],
)
def test_usage_errors_are_a_sentence(arguments: tuple[str, ...], said: str, fake: Fake) -> None:
    done = fake.run("tpu.sh", *arguments)
    assert done.returncode == 2 and said in done.stderr
    assert fake.calls() == []
