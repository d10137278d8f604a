"""Phase 3 with three seeds on one order of the examples: how far apart two runs are that differ in nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CONFIG = "phase3_cell_qa"
METRIC, GOAL = "val/loss", "min"


def sweep(arg: str | None = None) -> Iterator[dict[str, Any]]:
    for seed in (0, 1, 2):
        yield {"seed": seed}
