"""SIGKILL at random steps, for every phase: the next start continues, and the final weights are those of a quiet run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pbs_jax.train import handover
from tests.train.test_loop import assert_identical

STEPS = 12
KILLS = 5  # a phase; twenty over the four
PHASES = ("phase0_backbone", "phase0_language_model", "phase1_cell_representation", "phase3_cell_qa")


def command(name: str, drawn: Path, phases: dict[str, Path], workdir: Path) -> list[str]:
    flags = {"steps": STEPS, "batch_size": 8, "log_every": 1, "save_every": 3, "eval_every": 0}
    flags |= {"data.root": drawn, "optimizer.name": "adamw"}
    if name == "phase3_cell_qa":
        flags |= {f"init_from.{key}": path for key, path in phases.items()}
    config = [f"--config={name}", *(f"--config.{key}={value}" for key, value in flags.items())]
    return [sys.executable, "-m", "pbs_jax.cli", "train", *config, f"--workdir={workdir}"]


def lines(workdir: Path) -> int:
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PHASES)
def test_a_phase_killed_at_random_steps_ends_with_the_same_weights(name, drawn, phases, tmp_path):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    subprocess.run(command(name, drawn, phases, quiet), check=True, env=environment)
    draw = random.Random(name)
    for _ in range(KILLS):
        until = lines(killed) + draw.randint(1, 4)
        process = subprocess.Popen(command(name, drawn, phases, killed), env=environment)
        while lines(killed) < until and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(name, drawn, phases, killed), check=True, env=environment)
    assert (killed / handover.FILE).exists()
    assert_identical(quiet, killed)
