"""Joins the processes of a run over several hosts (`jax.distributed`), and ends one that a signal or another's end stops."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from data_prep.schema import DataError

PREEMPTED = 75  # EX_TEMPFAIL: run the same command again
GONE = re.compile("gloo|connection (closed|reset|refused)|heartbeat|coordination service|unavailable|deadline", re.I)
COME = "start the same command on every host, or give --wait more seconds"
GO = "go"


def join_hosts(processes: str, process: int | None, coordinator: str | None, wait: int) -> None:
    """Does nothing for one process. Waits at most `wait` seconds for the others; raises DataError naming who is missing.

    Grain's workers import the main module again: only the process that a person or a launcher started may join.
    """
    if processes == "1" or multiprocessing.parent_process() is not None:
        return
    known: dict[str, object] = {}
    if processes != "auto":
        if process is None or coordinator is None or not processes.isdigit():
            raise DataError(
                "--processes=N needs --process=I and --coordinator=HOST:PORT; on Cloud TPU or Slurm use --processes=auto"
            )
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 <= process < int(processes):
            raise DataError(
                f"--processes={processes} --process={process} --coordinator={coordinator}: "
                f"a process is a number from 0 to {int(processes) - 1}, the coordinator HOST:PORT"
            )
        known = {"coordinator_address": coordinator, "num_processes": int(processes), "process_id": process}
    print(f"waiting for {processes} processes at {coordinator or 'the coordinator'} (at most {wait} s)", flush=True)
    # Where one does not come, jax ends all from native code, naming none: so they meet first, on the port it takes next.
    if known and process:
        come(host.strip("[]"), int(port), int(processes), process, wait)
    elif known:
        gather(int(port), int(processes), wait)
    import jax

    try:
        jax.distributed.initialize(**known, initialization_timeout=wait)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0][:300]
        raise DataError(
            f"jax could not join {processes} processes ({why}): {COME}; where auto finds none give "
            "--processes=N --process=I --coordinator=HOST:PORT"
        ) from error


@contextlib.contextmanager
def stopped_while_starting(processes: str) -> Iterator[None]:
    """A SIGTERM before the loop listens ends the process with PREEMPTED: there is nothing to save. jax has its own handler
    where several processes agree on when to stop."""

    def leave(number: int, frame: object) -> None:
        print("stopped by a signal; nothing new to save: run the same command to continue", flush=True)
        raise SystemExit(PREEMPTED)

    if processes != "1" or threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def leave_if_others_are_gone(error: Exception) -> None:
    """Ends this process with PREEMPTED when the error is that another one of the run has ended: jax's own way out would wait
    for it, then abort."""
    import jax

    if jax.process_count() > 1 and GONE.search(str(error)):
        why = str(error).splitlines()[0][:200]
        print(
            f"pbs: process {jax.process_index()} of {jax.process_count()}: another one has ended ({why}): run the same command "
            "on every host again, it goes on from the last save",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(PREEMPTED)


def gather(port: int, processes: int, wait: int) -> None:
    """Process 0: hears from each of the others, frees the port, then lets them go on or tells them who is missing.

    One that comes with the number of an earlier one takes its place, as it was started again.
    """
    deadline = time.monotonic() + wait
    came: dict[int, socket.socket] = {}
    try:
        v6 = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if v6 else socket.AF_INET
        server = socket.create_server(("", port), family=family, backlog=processes, dualstack_ipv6=v6)
    except OSError as error:
        raise DataError(
            f"port {port} cannot be opened ({error}): give --coordinator a free one of this host"
        ) from error
    with contextlib.ExitStack() as stack:
        with server:
            while len(came) < processes - 1 and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                with contextlib.suppress(OSError, ValueError):  # the time is up, or something else knocks at the port
                    connection = stack.enter_context(server.accept()[0])
                    connection.settimeout(2)
                    of, number = map(int, connection.makefile().readline(40).split())
                    if of == processes and 0 < number < processes:
                        came[number] = connection
                    else:
                        connection.sendall(f"process 0 was started with --processes={processes}\n".encode())
        missing = sorted(set(range(1, processes)) - came.keys())
        names = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        answer = f"{names} of {processes} did not come within {wait} s: {COME}" if missing else GO
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"{answer}\n".encode())
    if missing:
        raise DataError(answer)


def come(host: str, port: int, processes: int, process: int, wait: int) -> None:
    """Any other process: says its number to process 0 and waits for its word."""
    deadline = time.monotonic() + wait
    while True:
        try:
            with socket.create_connection((host, port), timeout=1) as connection:
                connection.sendall(f"{processes} {process}\n".encode())
                connection.settimeout(wait + 5)  # process 0 may have come last, and waits as long
                answer = connection.makefile().readline().strip()
        except OSError as error:
            if time.monotonic() > deadline:
                raise DataError(
                    f"process 0 did not answer at {host}:{port} within {wait} s ({error}): {COME}, and check --coordinator"
                ) from error
            time.sleep(0.2)
            continue
        if answer == GO:
            return
        if answer:
            raise DataError(f"process {process}: {answer}")
        raise DataError(f"process {process} of {processes}: process 0 at {host}:{port} has gone: see what it said")
