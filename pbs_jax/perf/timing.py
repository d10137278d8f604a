"""Alternating measurements: each side in turn, so that a machine that slows down slows both; medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from data_prep.progress import progress


def alternate(
    sides: Mapping[str, Callable[[], float]], rounds: int, *, twice: bool = False
) -> dict[str, dict[str, float]]:
    """Runs every side once to warm up, then `rounds` times in turn. A side returns the number of items that it did.

    name -> {"wall": items a second, "cpu": items a CPU-second of this process (threads summed), each the median}. The second
    holds on a shared machine too; work in other processes (loader workers) is only in the first. twice: every turn runs
    two times and the second counts: workers that one side forks leave the parent's memory shared, and whoever writes to it
    next would pay for the copies.
    """
    for run in sides.values():
        run()
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in sides}
    for _ in progress(range(rounds), desc="measuring"):
        for name, run in sides.items():
            if twice:
                run()
            wall, cpu = time.perf_counter(), time.process_time()
            items = run()
            found[name]["wall"].append(items / (time.perf_counter() - wall))
            found[name]["cpu"].append(items / max(time.process_time() - cpu, 1e-9))
    return {name: {kind: statistics.median(values) for kind, values in kinds.items()} for name, kinds in found.items()}
