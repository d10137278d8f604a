"""The rows of a global batch, put together from the hosts' parts, are those that one host reads."""

from __future__ import annotations

import grain
import numpy as np
import pytest
from grain.experimental import ElasticIterator
from grain.sharding import ShardOptions

from pbs_jax.data.order import HostOrder

BATCH = 8


def batches(hosts: int, count: int = 6) -> np.ndarray:
    stream = grain.MapDataset.range(20).seed(0).shuffle().repeat()
    parts = [
        iter(ElasticIterator(HostOrder(stream, BATCH, hosts), BATCH, ShardOptions(i, hosts))) for i in range(hosts)
    ]
    return np.stack([np.concatenate([next(part) for part in parts]) for _ in range(count)])


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_read_contiguous_parts(hosts: int):
    np.testing.assert_array_equal(batches(hosts), batches(1))
