"""Two processes train as one does (DESIGN section 8), and one that waits for another in vain says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.schema import DataError
from pbs_jax.train.hosts import join_hosts
from tests.train.tiny_run import STEPS


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def start(repo: Path, devices: int, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.train.tiny_run", *map(str, arguments)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return subprocess.Popen(
        command, env=environment, cwd=repo, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def logged(workdir: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.slow
def test_two_processes_agree_with_one(repo: Path, tmp_path: Path):
    together, alone = tmp_path / "two", tmp_path / "one"
    address = f"localhost:{free_port()}"
    pair = [start(repo, 1, together, 2, i, address) for i in (0, 1)]
    for process in pair:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
    said, _ = (single := start(repo, 2, alone)).communicate(timeout=600)
    assert single.returncode == 0, said
    assert len(logged(alone, "train/loss")) == STEPS
    assert logged(together, "train/indices") == logged(alone, "train/indices"), "other examples, or another order"
    np.testing.assert_allclose(logged(together, "train/loss"), logged(alone, "train/loss"), rtol=1e-5)
    assert (together / "handover.json").exists() and (together / "run_report.html").exists()


@pytest.mark.slow
def test_a_missing_process_is_told_within_the_time_out(repo: Path, tmp_path: Path):
    process = start(repo, 1, tmp_path / "run", 2, 1, f"localhost:{free_port()}", 5)
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "2 processes" in said and ("within 5 s" in said or "DEADLINE_EXCEEDED" in said), said


def test_half_given_hosts_are_a_sentence():
    with pytest.raises(DataError, match=r"--processes=N needs --process=I and --coordinator"):
        join_hosts("2", None, None, 5)
