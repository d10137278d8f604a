"""Progress with the time left, for anything over a few seconds: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0


def progress[T](
    iterable: Iterable[T], total: int | None = None, desc: str = "", *, stream: TextIO | None = None
) -> Iterator[T]:
    """Yields `iterable`'s items while telling how far it is on `stream` (stderr).

    `total` is taken from len() where it is not given. Off a terminal, a line comes at most every 5 s, and none for
    what ends sooner.
    """
    stream = stream or sys.stderr
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if stream.isatty():
        return iter(tqdm(iterable, total=total, desc=desc, file=stream, dynamic_ncols=True, leave=True))
    return _lines(iterable, total, desc, stream)


def _lines[T](iterable: Iterable[T], total: int | None, desc: str, stream: TextIO) -> Iterator[T]:
    start = last = time.monotonic()
    count = said = 0
    for count, item in enumerate(iterable, 1):
        yield item
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES and count != total:
            # The rate since the last line: a first item that compiles does not spoil the estimate for long.
            print(_line(desc, count, total, (count - said) / (now - last)), file=stream, flush=True)
            last, said = now, count
    if last != start:
        print(f"{desc}: {count} done in {duration(time.monotonic() - start)}", file=stream, flush=True)


def _line(desc: str, count: int, total: int | None, rate: float) -> str:
    speed = f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
    if not total:
        return f"{desc}: {count}, {speed}"
    left = "" if count == 1 else f", {duration((total - count) / rate)} left"
    return f"{desc}: {count}/{total} ({100 * count // total}%), {speed}{left}"


def duration(seconds: float) -> str:
    """ "42s", "3m05s", "2h07m"."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
