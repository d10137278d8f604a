"""Which host reads which rows of a global batch: each a contiguous part, so that batches do not depend on the hosts; and with
how many threads."""

from __future__ import annotations

import os
from typing import Any

import grain

MOST_THREADS = 4


def reading_threads(asked: int = 0) -> int:
    """Threads that read examples: as asked for, else one a core up to MOST_THREADS. More than there are cores take a third
    longer, for they wait for the interpreter's lock."""
    return asked or min(os.cpu_count() or 1, MOST_THREADS)


class HostOrder(grain.MapDataset):
    """A stream reordered within each global batch, for a reader that deals its rows out to the hosts in turn.

    Host i of n then gets rows i * B/n ... of the batch, which is where they lie on the mesh: row k of a batch, with its
    dropout and its negatives, is the same example whatever n is.
    """

    def __init__(self, stream: grain.MapDataset, batch: int, hosts: int) -> None:
        super().__init__(stream)
        self._batch, self._hosts = batch, hosts

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        start, row = divmod(index, self._batch)
        turn, host = divmod(row, self._hosts)
        return self._parent[start * self._batch + host * (self._batch // self._hosts) + turn]
