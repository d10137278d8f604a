"""Runs one pure function over many units, here or in spawned processes, with the same results.

A unit is idempotent, so a dead worker (native crash, out of memory) costs no more than doing its units again: each is
retried alone once, then quarantined, and the others go on (data_prep.md B). Units that leave their results in files can
also be done elsewhere beforehand: by `shard i/n` on n machines, or by Apache Beam.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for

from data_prep.schema import DataError

UNITS_PER_CHILD = 64  # a worker is replaced after so many, which bounds what native code may leak


@dataclasses.dataclass(frozen=True, slots=True)
class Quarantined:
    """Stands for the result of a unit that killed its worker, with others and alone."""

    reason: str


def parse_shard(text: str) -> tuple[int, int]:
    """ "2/8" -> (2, 8): the third of eight parts. Raises DataError for anything else."""
    first, slash, count = text.partition("/")
    if not (slash and first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise DataError(f'--shard "{text}" is not i/n with 0 <= i < n, e.g. 0/4 of 0/4, 1/4, 2/4, 3/4')
    return int(first), int(count)


def take_shard[U](units: Sequence[U], shard: str) -> Sequence[U]:
    """Every n-th unit from the i-th on; all of them for "". The n shards together are all units, each once."""
    if not shard:
        return units
    first, count = parse_shard(shard)
    return units[first::count]


def _start_worker() -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # before numpy loads: workers share the cores already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent would leave its workers behind: they finish what is queued, then wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for([parent.sentinel])
        os._exit(1)


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start_worker, max_tasks_per_child=UNITS_PER_CHILD
    )


def run_units[U, R](
    function: Callable[[U], R], units: Sequence[U], workers: int = 1, beam: str = ""
) -> Iterator[tuple[int, R | Quarantined]]:
    """Yields (index, result) as units finish, at most two per worker in flight.

    `function` must be importable by name, units and results picklable. With one worker it runs in this process, where
    nothing can be quarantined. An exception of the function is raised here. `beam`: options of the Beam runner that does
    the units first; `function` then finds their files here.
    """
    if beam:
        from data_prep.beam import run_on_beam

        run_on_beam(function, units, beam)
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
