"""`pbs sweep`: what a sweep file may say, that a killed sweep goes on, and that the best run is the best."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pbs_jax import cli, config
from pbs_jax.sweep import pool, report, spec

LRS = (1e-3, 3e-3, 1e-2, 3e-2)
# Stands for `pbs train`: writes a metric that is best at lr 0.01 and finishes, or does what `then` says.
TRAIN = """
import json, pathlib, sys, time
work = pathlib.Path(next(a for a in sys.argv if a.startswith("--workdir=")).partition("=")[2])
lr = float(next(a for a in sys.argv if "optimizer.lr" in a).partition("=")[2])
with (work / "starts").open("a") as starts: starts.write("x")
(work / "metrics.jsonl").write_text(json.dumps({"step": 4, "train/loss": 1.0, "val/label_accuracy": %s}) + chr(10))
%s
(work / "handover.json").write_text("{}")
"""


def fake(out: Path, then: str = "", value: str = "1 - abs(lr - 0.01)") -> pool.Command:
    real = pool.command_of("local", nano_lr(), out, ())
    return lambda run: [sys.executable, "-S", "-c", TRAIN % (value, then), *real(run)[4:]]


def nano_lr() -> spec.Sweep:
    return spec.read(["--config=sweeps/nano_lr:debug", "--config.seed=3"])


def starts(out: Path) -> list[int]:
    return [len(path.read_text()) for path in sorted(out.glob("runs/*/starts"))]


def user_file(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "mine.py"
    path.write_text(f'CONFIG, METRIC, GOAL = "phase3_cell_qa", "val/loss", "min"\ndef sweep(arg):\n    {body}\n')
    return [f"--config={path}"]


def test_a_run_is_the_config_with_its_overrides() -> None:
    sweep = nano_lr()
    loaded = [sweep.load(run) for run in sweep.runs]
    assert [one.optimizer.lr for one in loaded] == list(LRS)
    assert all((one.seed, one.debug, one.phase) == (3, True, "backbone") for one in loaded)
    assert len({pool.job_name(sweep, run) for run in sweep.runs}) == 4


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("yield {'optimizer.l': 1.0}", "no such field"),
        ("yield {'steps': 'many'}", "takes one int"),
        ("yield {'seed': 1}; yield {'seed': 1}", "seed=1 twice"),
        ("return iter(())", "yields nothing"),
    ],
)
def test_a_sweep_that_cannot_run_is_refused_before_the_first_run(body: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(config.ConfigError, match=said):
        spec.read(user_file(tmp_path, body))


def test_names_of_runs_are_folders_whatever_they_change(tmp_path: Path) -> None:
    long = "a/b " * 40
    (run,) = spec.read(user_file(tmp_path, f"yield {{'data.root': {long!r}}}")).runs
    assert "/" not in run.name and len(run.name) < 100


def test_the_best_finished_run_wins_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    sweep = nano_lr()
    for _ in range(2):
        pool.Pool(sweep, tmp_path, fake(tmp_path), 2).run(lambda run: None)
    assert starts(tmp_path) == [1, 1, 1, 1]
    _, (winner,) = report.write(sweep, tmp_path)
    assert winner.run.overrides == {"optimizer.lr": 0.01}
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["best"] == "optimizer.lr=0.01"
    assert [run["differs"] for run in content["runs"]] == [{"optimizer.lr": lr} for lr in LRS]
    assert "optimizer.lr=0.01" in (tmp_path / "report.html").read_text()


def test_a_failed_or_unfinished_run_is_never_the_best(tmp_path: Path) -> None:
    sweep = nano_lr()
    then = 'if lr == 0.01: sys.exit("pbs: train/loss not finite")'
    pool.Pool(sweep, tmp_path, fake(tmp_path, then), 1).run(lambda run: None)
    results, (winner,) = report.write(sweep, tmp_path)
    assert [item.state for item in results] == ["finished", "finished", "failed", "finished"]
    assert results[2].why == "pbs: train/loss not finite"
    assert winner.run.overrides == {"optimizer.lr": 0.003}


def test_equal_values_make_no_run_the_best(tmp_path: Path) -> None:
    sweep = nano_lr()
    pool.Pool(sweep, tmp_path, fake(tmp_path, value="0.2 if lr < 0.02 else 0.1"), 1).run(lambda run: None)
    _, winners = report.write(sweep, tmp_path)
    tied = [f"optimizer.lr={lr}" for lr in LRS[:3]]
    assert [item.run.name for item in winners] == tied
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["best"], content["tied"]) == (None, tied)
    for said in (
        report.verdict(sweep, winners),
        *((tmp_path / f"report.{kind}").read_text() for kind in ("md", "html")),
    ):
        assert "no best by val/label_accuracy (max): a tie at 0.2000 of optimizer.lr=0.001" in said


def test_a_run_that_was_stopped_is_continued_at_once(tmp_path: Path) -> None:
    then = 'if lr == 0.01 and (work / "starts").read_text() == "x": sys.exit(75)'
    pool.Pool(nano_lr(), tmp_path, fake(tmp_path, then), 1).run(lambda run: None)
    assert sorted(starts(tmp_path)) == [1, 1, 1, 2]


@pytest.mark.slow
def test_no_second_process_trains_a_run_that_outlived_its_sweep(tmp_path: Path) -> None:
    sweep = nano_lr()
    gate, first = tmp_path / "gate", pool.folder(tmp_path, sweep.runs[0])
    then = f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)"
    code = (
        "from tests import test_sweep as t; from pathlib import Path; from pbs_jax.sweep import pool\n"
        f"out = Path({str(tmp_path)!r}); pool.Pool(t.nano_lr(), out, t.fake(out, {then!r}), 1).run(print)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code])
    while not (first / "starts").exists():
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    again = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert again.stdout is not None and "another process is training it" in again.stdout.readline()
    gate.touch()
    again.communicate(timeout=60)
    assert again.returncode == 0 and starts(tmp_path) == [1, 1, 1, 1]


def test_a_folder_belongs_to_one_sweep(tmp_path: Path) -> None:
    spec.keep(nano_lr(), tmp_path)
    with pytest.raises(config.ConfigError, match="another sweep"):
        spec.keep(spec.read(["--config=sweeps/nano_lr"]), tmp_path)


def test_cluster_commands_carry_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBS", "true")  # finds nothing wrong with the config, whose data are not here
    common = ["sweep", "--config=sweeps/nano_lr", f"--out={tmp_path}", "--dry_run"]
    assert cli.main([*common, "--launcher=slurm", "--launch_args=--gpus=2"]) == 0
    lines = [shlex.split(line) for line in capfd.readouterr().out.splitlines() if line.startswith("sbatch")]
    assert [line[-2] for line in lines] == [f"--config.optimizer.lr={lr}" for lr in LRS]
    assert all("--gpus-per-node=2" in line for line in lines)


def test_machines_that_cost_money_are_not_started_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [
        "sweep",
        "--config=sweeps/nano_lr",
        f"--out={tmp_path}",
        "--launcher=tpu-vm",
        "--config.data.root=gs://b/d",
    ]
    assert cli.main([*common, "--launch_args=--zone=z --bucket=gs://b/r"]) == 1
    assert "--yes" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("root", "options", "said"),
    [
        ("/local/d", "--zone=z --bucket=gs://b/r", "data.root=/local/d is not on"),
        ("gs://b/d", "--bucket=gs://b/r", "--zone"),
    ],
)
@pytest.mark.parametrize("more", ["--yes", "--dry_run"])
def test_a_sweep_that_would_fail_on_its_machines_starts_none(
    more: str, root: str, options: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = [
        "sweep",
        "--config=sweeps/nano_lr",
        f"--out={tmp_path}",
        "--launcher=tpu-vm",
        f"--config.data.root={root}",
    ]
    assert cli.main([*common, f"--launch_args={options}", more]) > 0
    assert said in capfd.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_real_nano_runs_survive_a_kill(tmp_path: Path) -> None:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    pbs = [sys.executable, "-m", "pbs_jax.cli"]
    data = ["data", "run", "--source=synthetic", f"--out={tmp_path / 'data'}", "--n-per-class=20"]
    assert subprocess.run([*pbs, *data], env=environment).returncode in (0, 3)
    path = tmp_path / "two.py"  # two of sweeps/nano_lr's four runs: compiling them is all the time
    path.write_text(
        'CONFIG, METRIC, GOAL = "phase0_backbone", "val/label_accuracy", "max"\n'
        "def sweep(arg):\n    yield from ({'optimizer.lr': lr} for lr in (1e-3, 1e-2))\n"
    )
    sweep = [*pbs, "sweep", f"--config={path}:debug", f"--config.data.root={tmp_path / 'data'}"]
    sweep.append(f"--out={tmp_path / 'out'}")
    process = subprocess.Popen(sweep, env=environment)
    while process.poll() is None and len(list(tmp_path.glob("out/runs/*/metrics.jsonl"))) < 1:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert subprocess.run(sweep, env=environment).returncode == 0
    content = json.loads((tmp_path / "out/report.json").read_text())
    values = {run["name"]: run["value"] for run in content["runs"]}
    assert [run["state"] for run in content["runs"]] == ["finished"] * 2
    best = content["tied"] or [content["best"]]  # few steps of few cells: both may guess alike
    assert best == [name for name, value in values.items() if value == max(values.values())]
