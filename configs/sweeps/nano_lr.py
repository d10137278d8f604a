"""Learning rate of the nano backbone, four runs a factor of about three apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CONFIG = "phase0_backbone"
METRIC, GOAL = "val/label_accuracy", "max"


def sweep(arg: str | None = None) -> Iterator[dict[str, Any]]:
    for lr in (1e-3, 3e-3, 1e-2, 3e-2):
        yield {"optimizer.lr": lr}
