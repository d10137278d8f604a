"""The pool: same results as in-process, dead workers cost their unit only, exceptions come through."""

import os
from pathlib import Path

import pytest

from data_prep.executors import Quarantined, run_units
from data_prep.schema import DataError


def square(n: int) -> int:
    return n * n


def crash_on_seven(n: int) -> int:
    if n == 7:
        os._exit(13)
    return n


def crash_once(path: Path) -> str:
    if not path.exists():
        path.touch()
        os._exit(13)
    return path.name


def refuse(n: int) -> int:
    raise DataError(f"unit {n} is bad")


def threads(_: int) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


@pytest.mark.parametrize("workers", [1, 2])
def test_every_unit_once(workers: int):
    assert sorted(run_units(square, range(20), workers)) == [(n, n * n) for n in range(20)]
    assert list(run_units(square, [], workers)) == []


def test_a_unit_that_kills_its_worker_is_quarantined_alone():
    results = dict(run_units(crash_on_seven, range(9), 2))
    assert sorted(results) == list(range(9))
    assert isinstance(results.pop(7), Quarantined)
    assert all(n == result for n, result in results.items())


def test_a_unit_that_dies_once_is_retried(tmp_path: Path):
    paths = [tmp_path / f"u{n}" for n in range(3)]
    paths[1].touch()
    paths[2].touch()
    assert dict(run_units(crash_once, paths, 2)) == {n: f"u{n}" for n in range(3)}


@pytest.mark.parametrize("workers", [1, 2])
def test_exceptions_come_through(workers: int):
    with pytest.raises(DataError, match=r"unit . is bad"):
        list(run_units(refuse, range(3), workers))


def test_workers_use_one_thread_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert dict(run_units(threads, range(2), 2)) == {0: "1", 1: "1"}
