"""One number of a table: value, spread by question, clustered interval, and what small samples need besides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from data_prep import stats
from pbs_jax.bench.metrics import Metric, mean

FEW_CLUSTERS = 30  # below it, the percentile interval is too narrow
WITH_DOUBT = ("accuracy", "accuracy_strict", "balanced_accuracy", "exact_match", "partial_match", "invalid", "yes_rate")
SIGNED = ("mcc", "similarity")  # metrics that can be below 0
Columns = dict[str, np.ndarray]  # by name; [questions], nan where there is no answer


def number(metric: Metric, seeds: Sequence[tuple[Columns, Columns, Columns]], clusters: int) -> dict[str, Any]:
    """value, low, high, sd, design_effect, seeds, and t_low, t_high with few clusters; averaged over seeds draw by draw.

    `seeds`: per seed the answers' columns [questions], their sums over resampled clusters, over resampled questions.
    """
    per_seed, spreads = [], []
    with np.errstate(invalid="ignore", divide="ignore"):
        for block, _, by_question in seeds:
            answered = block["n"] > 0
            if metric.is_mean:
                values = block[metric.columns[0]][answered]
                per_seed.append(mean(values.tolist()))
                spreads.append(stats.question_sd(values))
            else:
                sums = {name: part[answered].sum(keepdims=True) for name, part in block.items()}
                per_seed.append(float(metric.value(sums)[0]))
                spreads.append(_spread(metric.value(by_question)))
        draws = np.mean([metric.value(samples) for _, samples, _ in seeds], axis=0)
    low, high = stats.percentile_interval(draws)
    value, sd = float(np.mean(per_seed)), float(np.mean(spreads))
    if metric.name in WITH_DOUBT and value in (0.0, 1.0):  # a bootstrap of a constant knows no doubt
        n, true = int(seeds[0][0]["n"].sum()), int(np.nansum(seeds[0][0].get("gold_true", np.zeros(1))))
        parts = [true, n - true] if metric.name == "balanced_accuracy" else [n]
        low, high = np.mean([stats.wilson(round(value * part), part) for part in parts], axis=0).tolist()
    spread = _spread(draws)
    effect = (spread / sd) ** 2 if sd > 0 else math.nan
    t_low, t_high = _student(value, spread, clusters)
    if metric.name not in SIGNED:
        t_low, t_high = max(t_low, 0.0), min(t_high, 1.0)
    return {
        "t_low": _known(t_low),
        "t_high": _known(t_high),
        "value": _known(value),
        "low": _known(low),
        "high": _known(high),
        "sd": _known(sd),
        "design_effect": _known(effect),
        "seeds": tuple(per_seed),
    }


def _spread(samples: np.ndarray) -> float:
    """Standard deviation of the defined samples; nan when none is."""
    return float(np.nanstd(samples)) if np.isfinite(samples).any() else math.nan


def _student(value: float, spread: float, clusters: int) -> tuple[float, float]:
    """value -+ t(C - 1) times the clustered standard error `spread`, unbiased by C / (C - 1); nan unless clusters are few."""
    if not 1 < clusters < FEW_CLUSTERS or not spread > 0:
        return math.nan, math.nan
    half = float(stdtrit(clusters - 1, 0.975)) * spread * math.sqrt(clusters / (clusters - 1))
    return value - half, value + half


def _known(value: float) -> float | None:
    """JSON has no nan: not available is null."""
    return value if math.isfinite(value) else None
