"""Joins the processes of a run over several hosts (`jax.distributed`)."""

from __future__ import annotations

import multiprocessing

from data_prep.schema import DataError


def join_hosts(processes: str, process: int | None, coordinator: str | None, wait: int) -> None:
    """Does nothing for one process. Waits at most `wait` seconds for the others; raises DataError naming who is missing.

    Grain's workers import the main module again: only the process that a person or a launcher started may join.
    """
    if processes == "1" or multiprocessing.parent_process() is not None:
        return
    import jax

    known: dict[str, object] = {}
    if processes != "auto":
        if process is None or coordinator is None or not processes.isdigit():
            raise DataError(
                "--processes=N needs --process=I and --coordinator=HOST:PORT; on Cloud TPU or Slurm use --processes=auto"
            )
        known = {"coordinator_address": coordinator, "num_processes": int(processes), "process_id": process}
    print(f"waiting for {processes} processes at {coordinator or 'the coordinator'} (at most {wait} s)", flush=True)
    try:
        jax.distributed.initialize(**known, initialization_timeout=wait)
    except RuntimeError as error:
        raise DataError(
            f"not all {processes} processes came within {wait} s ({str(error).splitlines()[0][:300]}): "
            "start the same command on every host"
        ) from error
