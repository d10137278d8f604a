"""The pool: same results as in-process, dead workers cost their unit only, exceptions come through."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.executors import Quarantined, run_units, take_shard
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


def name_and_sleep(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(60)


def test_workers_of_a_killed_parent_end(tmp_path: Path):
    """SIGKILL leaves the pool no time to stop its workers."""
    units = [tmp_path / "a", tmp_path / "b"]
    text = (
        "from pathlib import Path\nfrom data_prep.executors import run_units\n"
        "from tests.data_prep.test_executors import name_and_sleep\n"
        f"if __name__ == '__main__': list(run_units(name_and_sleep, [Path(p) for p in {list(map(str, units))}], 2))"
    )
    script = tmp_path / "parent.py"
    script.write_text(text)
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, script], cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    wait_until(lambda: all(path.is_file() and path.read_text() for path in units))
    parent.kill()
    parent.wait()
    for path in units:
        wait_until(lambda path=path: not is_running(int(path.read_text())))


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_shards_are_all_units_each_once():
    parts = [take_shard(range(10), f"{k}/3") for k in range(3)]
    assert sorted(n for part in parts for n in part) == list(range(10)) == list(take_shard(range(10), ""))
    for bad in ("3/3", "1", "a/2", "-1/2", "0/0", "1/2/3"):
        with pytest.raises(DataError, match="not i/n"):
            take_shard(range(4), bad)


def touch(path: Path) -> int:
    path.touch()
    return 1


def test_beam_does_the_units_first(tmp_path: Path):
    pytest.importorskip("apache_beam")
    from data_prep.beam import run_on_beam

    run_on_beam(touch, [tmp_path / f"{n}" for n in range(5)], "local")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3", "4"]
    with pytest.raises(DataError, match="names no runner"):
        run_on_beam(touch, [], "--project=p")


@pytest.mark.skipif(importlib.util.find_spec("apache_beam") is not None, reason="Beam is installed")
def test_without_beam_the_extra_is_named():
    with pytest.raises(DataError, match=r"pbs-jax\[beam\]"):
        list(run_units(square, [1], beam="local"))
