"""Early stopping: which evaluation was the best, and whether too many since were not better.

Everything follows from the evaluations in metrics.jsonl, so that a resumed run stops where an undisturbed one does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from data_prep.schema import DataError


class EarlyStopping:
    """Of `config.early_stopping`: metric, as "auc", or "-loss" for one that shall fall ("" = off), and patience."""

    def __init__(self, config: Any) -> None:
        self.metric, self.patience = config.metric, config.patience
        self._name, self._sign = "val/" + self.metric.removeprefix("-"), -1.0 if self.metric.startswith("-") else 1.0
        self._values: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self.metric)

    def check(self, values: Mapping[str, float]) -> None:
        """Raises DataError for a metric that an evaluation does not have."""
        if self and self._name not in values:
            known = ", ".join(name.removeprefix("val/") for name in values)
            raise DataError(f'config.early_stopping.metric "{self.metric}" is not measured here: use one of {known}')

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the evaluation of a step, in ascending order; a metric that is not finite, and so not written, is worse than
        all others."""
        if self:
            value = self._sign * values.get(self._name, math.nan)
            self._values[step] = value if math.isfinite(value) else -math.inf

    @property
    def best(self) -> int | None:
        """Step of the best evaluation, the first of equal ones; None before any and where nothing stops early."""
        return max(self._values, key=lambda step: self._values[step], default=None)

    @property
    def over(self) -> bool:
        """Have `patience` evaluations followed the best one?"""
        best = self.best
        return best is not None and sum(step > best for step in self._values) >= self.patience

    def tell(self) -> str:
        """One sentence about the step that is kept."""
        assert self.best is not None
        value = self._sign * self._values[self.best]
        return f"{self._name} was best at step {self.best}: {value:.4f}; that step is handed over"
