"""Two processes train as one does (DESIGN section 8), and one that waits for another in vain says so."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
def test_a_process_whose_partner_is_killed_says_so_and_may_be_started_again(repo: Path, tmp_path: Path):
    address = f"localhost:{free_port()}"
    pair = [start(repo, 1, tmp_path, 2, i, address, 60, 100_000) for i in (0, 1)]
    while not (tmp_path / "metrics.jsonl").exists():
        time.sleep(0.1)
        assert all(process.poll() is None for process in pair), pair[0].communicate()[0]
    pair[1].kill()
    said, _ = pair[0].communicate(timeout=120)
    assert pair[0].returncode == 75 and "process 0 of 2: another one has ended" in said, said


def test_a_signal_before_the_first_step_ends_restartable(repo: Path):
    code = (
        "import os, signal\nfrom pbs_jax.train.hosts import stopped_while_starting\n"
        "with stopped_while_starting('1'): os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 75 and "run the same command to continue" in done.stdout


@pytest.mark.slow
def test_a_missing_process_is_named_by_every_other(repo: Path, tmp_path: Path):
    """With the real command: exit code 1 and a sentence within the time, not jax's abort (134)."""
    address, flags = (
        f"localhost:{free_port()}",
        ["--config=phase3_cell_qa", f"--workdir={tmp_path / 'run'}", "--wait=8"],
    )
    command = [sys.executable, "-m", "pbs_jax.cli", "train", *flags, "--processes=4", f"--coordinator={address}"]
    pair = [subprocess.Popen([*command, f"--process={i}"], cwd=repo, stderr=subprocess.PIPE, text=True) for i in (0, 2)]
    for process in pair:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 1, said
        assert said.splitlines()[-1].startswith("pbs: ") and "processes 1, 3 of 4 did not come within 8 s" in said, said


def join(processes: int, process: int, port: int, wait: int = 1) -> str:
    with pytest.raises(DataError) as error:
        join_hosts(str(processes), process, f"localhost:{port}", wait)
    return str(error.value)


def test_a_coordinator_that_is_not_there_is_named():
    assert f"process 0 did not answer at localhost:{(port := free_port())} within" in join(2, 1, port)


def test_strangers_and_other_runs_do_not_count():
    """A scan of the port, a process of a run of another size, and one that is started again."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(join, 4, 0, port, 3)
        other = pool.submit(join, 3, 2, port, 3)
        for said in (b"GET / HTTP/1.1\r\n", b"4 2\n", b"4 9\n"):
            until = time.monotonic() + 2
            while time.monotonic() < until:
                with (
                    contextlib.suppress(ConnectionRefusedError),
                    socket.create_connection(("localhost", port)) as stranger,
                ):
                    stranger.sendall(said)
                    break
        again = pool.submit(join, 4, 2, port, 3)
        assert first.result().startswith("processes 1, 3 of 4 did not come within 3 s")
        assert again.result() == f"process 2: {first.result()}"
        assert other.result() == "process 2: process 0 was started with --processes=4"


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} cannot be opened" in join(2, 0, port)


@pytest.mark.parametrize(
    ("process", "coordinator", "match"),
    [
        (None, None, "--processes=N needs --process=I and --coordinator"),
        (2, "localhost:1234", "--process=2 .* a process is a number from 0 to 1"),
        (0, "localhost", "the coordinator HOST:PORT"),
    ],
)
def test_half_given_hosts_are_a_sentence(process: int | None, coordinator: str | None, match: str):
    with pytest.raises(DataError, match=match):
        join_hosts("2", process, coordinator, 5)
