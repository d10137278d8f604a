"""Progress off a terminal: silent when quick, few lines with the time left when slow, items untouched."""

from __future__ import annotations

import io
import re

import pytest

from data_prep import progress as module
from data_prep.progress import duration, progress


def test_quick_work_is_silent() -> None:
    stream = io.StringIO()
    assert list(progress([3, 1, 2], desc="cells", stream=stream)) == [3, 1, 2]
    assert stream.getvalue() == ""


def test_slow_work_tells_share_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 2))  # every look at the clock is 2 s later
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    assert list(progress(range(12), desc="cells", stream=stream)) == list(range(12))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "cells: 3/12 (25%), 2.0 s each, 18s left"
    assert lines[-1].startswith("cells: 12 done in ")
    assert len(lines) == 4, "one line per 6 s here, and the last"


def test_a_slow_first_item_does_not_spoil_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 60.0, 62.0, 64.0, 66.0, 68.0, 70.0, 72.0])  # the first item compiles for a minute
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    items = progress(range(100), desc="steps", stream=stream)
    for _ in range(6):
        next(items)
    first, second = stream.getvalue().splitlines()
    assert first == "steps: 1/100 (1%), 60.0 s each"
    assert second == "steps: 4/100 (4%), 2.0 s each, 3m12s left"


def test_unknown_total(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    list(progress(iter("ab"), desc="rows", stream=stream))
    assert re.match(r"rows: 1, 6\.0 s each\n", stream.getvalue())


def test_durations() -> None:
    assert [duration(s) for s in (0, 42.4, 185, 7620)] == ["0s", "42s", "3m05s", "2h07m"]
