"""Runs one pure function over many units, here or in spawned processes, with the same results.

A unit is idempotent, so a dead worker (native crash, out of memory) costs no more than doing its units again: each is
retried alone once, then quarantined, and the others go on (data_prep.md B).
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

UNITS_PER_CHILD = 64  # a worker is replaced after so many, which bounds what native code may leak


@dataclasses.dataclass(frozen=True, slots=True)
class Quarantined:
    """Stands for the result of a unit that killed its worker, with others and alone."""

    reason: str


def _one_thread() -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before numpy loads: workers share the cores already


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _one_thread, max_tasks_per_child=UNITS_PER_CHILD
    )


def run_units[U, R](
    function: Callable[[U], R], units: Sequence[U], workers: int = 1
) -> Iterator[tuple[int, R | Quarantined]]:
    """Yields (index, result) as units finish, at most two per worker in flight.

    `function` must be importable by name, units and results picklable. With one worker it runs in this process, where
    nothing can be quarantined. An exception of the function is raised here.
    """
    if workers == 1:
        yield from ((index, function(unit)) for index, unit in enumerate(units))
        return
    waiting = collections.deque(range(len(units)))
    suspects: list[int] = []
    while waiting:
        flying: dict[Future[R], int] = {}
        with _pool(workers) as pool:
            try:
                while waiting or flying:
                    while waiting and len(flying) < 2 * workers:
                        future = pool.submit(function, units[waiting[0]])
                        flying[future] = waiting.popleft()
                    for future in wait(flying, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        yield flying.pop(future), result
            except BrokenProcessPool:
                suspects += flying.values()  # whichever of them it was: the pool does not say
    for index in sorted(suspects):
        with _pool(1) as pool:
            try:
                result = pool.submit(function, units[index]).result()
            except BrokenProcessPool:
                yield (
                    index,
                    Quarantined("its worker process died, also with this unit alone (native crash or out of memory)"),
                )
            else:
                yield index, result
