"""Differences between JAX and PyTorch, stage by stage, as `pbs weights verify` measures and prints them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from data_prep.schema import DataError

TOLERANCE = 1e-4  # of JAX's largest value


class Difference:
    """Running max and mean absolute difference of one stage, and max|JAX|."""

    def __init__(self) -> None:
        self.largest = self.total = self.scale = 0.0
        self.count = 0

    def add(self, torch_value: Any, jax_value: Any) -> None:
        ours, theirs = np.asarray(torch_value, np.float64), np.asarray(jax_value, np.float64)
        if ours.shape != theirs.shape:
            raise DataError(f"PyTorch gives shape {ours.shape} where JAX gives {theirs.shape}")
        error = np.abs(ours - theirs)
        # np.maximum keeps a NaN, which then is within no tolerance; max() would lose it.
        self.largest, self.scale = np.maximum(self.largest, error.max()), np.maximum(self.scale, np.abs(theirs).max())
        self.total, self.count = self.total + error.sum(), self.count + error.size

    @property
    def relative(self) -> float:
        return float(self.largest / self.scale)

    def figures(self) -> dict[str, float]:
        mean = float(self.total / self.count)
        return {"max_abs": float(self.largest), "mean_abs": mean, "relative": self.relative}


def table(found: Mapping[str, Any], names: Iterable[str], unlimited: tuple[str, ...] = ()) -> list[str]:
    """Lines for a terminal of the named stages in what `flat` gives; those in `unlimited` carry no limit."""
    lines = [f"  {'stage':<26}{'max abs':>12}{'mean abs':>12}{'relative':>12}   limit"]
    for name in names:
        limit = "none" if name in unlimited else f"{TOLERANCE:.0e}"
        figures = "".join(f"{found[f'{name}_{what}']:>12.2e}" for what in ("max_abs", "mean_abs", "relative"))
        lines.append(f"  {name.replace('_', ' '):<26}{figures}   {limit}")
    return lines


def flat(stages: Mapping[str, Difference]) -> dict[str, float]:
    """{stage}_{figure} -> value, for a JSON file."""
    return {f"{name}_{what}": value for name, stage in stages.items() for what, value in stage.figures().items()}
