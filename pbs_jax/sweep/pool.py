"""Runs of a sweep as processes: here with `pbs train`, or through launch/tpu.sh and launch/slurm.sh.

A run is finished when its folder has handover.json; everything else can be started again. Each process holds a lock on
its run's folder and keeps it when the sweep itself is killed, so that no second process trains the same run.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from data_prep.io import atomic_write
from data_prep.schema import DataError
from pbs_jax.sweep.spec import Run, Sweep
from pbs_jax.train.check import FILE as HANDOVER

LOG, EXIT_CODE, LOCK = "train.log", "exit_code", ".lock"
STOPPED = 75  # what `pbs train` returns after saving on a SIGTERM
MOST_RESTARTS = 5  # of one run that something else keeps stopping
SCRIPTS = {"tpu-vm": "tpu.sh", "slurm": "slurm.sh"}
Command = Callable[[Run], list[str]]


def folder(out: Path, run: Run) -> Path:
    return out / "runs" / run.name


def is_finished(out: Path, run: Run) -> bool:
    return (folder(out, run) / HANDOVER).is_file()


def command_of(launcher: str, sweep: Sweep, out: Path, options: Sequence[str]) -> Command:
    """What starts a run. options: more arguments of the launch script. Raises DataError where the script is not at hand."""
    if launcher == "local":
        train = [sys.executable, "-m", "pbs_jax.cli", "train"]
        return lambda run: [*train, *sweep.train_flags(run), f"--workdir={folder(out, run)}"]
    script = Path(__file__).resolve().parents[2] / "launch" / SCRIPTS[launcher]
    if not script.is_file():
        raise DataError(f"{script} is missing: the launch scripts are in the repository, not in the wheel; clone it")
    where = ("train", "--yes", "--fetch") if launcher == "tpu-vm" else ("submit", "--workdir")
    return lambda run: [
        "bash",
        str(script),
        *where,
        str(folder(out, run)),
        f"--name={job_name(sweep, run)}",
        *options,
        "--",
        *sweep.train_flags(run),
    ]


def job_name(sweep: Sweep, run: Run) -> str:
    """Name of a run's machine or job: lower case, digits and hyphens, other for every sweep, data and run."""
    text = "\n".join([sweep.config, *sweep.common, run.name])
    return f"pbs-{re.sub('[^a-z0-9]+', '-', sweep.name.lower())[:30]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclasses.dataclass
class Pool:
    """Starts runs, at most `jobs` at a time; SIGTERM is handed on to them, and nothing new starts after it."""

    sweep: Sweep
    out: Path
    command: Command
    jobs: int
    children: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)
    stopped: bool = False

    def run(self, say: Callable[[Run], None]) -> None:
        """Runs all that is not finished; calls `say` after each."""
        previous = signal.signal(signal.SIGTERM, self._stop)
        threads = ThreadPoolExecutor(self.jobs)
        try:
            for future in as_completed([threads.submit(self._one, run) for run in self.sweep.runs]):
                say(future.result())
        finally:
            threads.shutdown(cancel_futures=True)
            signal.signal(signal.SIGTERM, previous)

    def _one(self, run: Run) -> Run:
        place = folder(self.out, run)
        place.mkdir(parents=True, exist_ok=True)
        with (place / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{run.name}: another process is training it; waiting for its end", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            for _ in range(MOST_RESTARTS):
                if self.stopped or is_finished(self.out, run):
                    break
                (place / EXIT_CODE).unlink(missing_ok=True)
                code = self._start(self.command(run), place, lock.fileno())
                atomic_write(place / EXIT_CODE, f"{code}\n")
                if code != STOPPED:
                    break
        return run

    def _start(self, command: list[str], place: Path, lock: int) -> int:
        with (place / LOG).open("ab") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=(lock,)
            )
            self.children.append(child)
            if self.stopped:  # the signal came while it started
                child.terminate()
            return child.wait()

    def _stop(self, number: int, frame: Any) -> None:
        self.stopped = True
        for child in self.children:
            if child.poll() is None:
                child.terminate()
