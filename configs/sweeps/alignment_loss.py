"""Phase 2 with the paper's loss or the released code's, and with the cells' projection fixed or trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CONFIG = "phase2_cell_patch_alignment"
METRIC, GOAL = "val/slide_r1", "max"  # a cell finds its patch among those of its own slide


def sweep(arg: str | None = None) -> Iterator[dict[str, Any]]:
    for alignment in ("paper", "official"):
        for target in ("fixed", "trained"):
            yield {"alignment": alignment, "target": target}
