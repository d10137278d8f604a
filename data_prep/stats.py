"""Statistics of every score: Wilson intervals, bootstrap by question and by cluster, paired tests, Holm.

Free of jax, and of anything but numpy. Questions about one image (slide, patient) stand or fall together, so whole
clusters are resampled; sizes differ, hence every estimate is a ratio of sums. Results depend on the values, the
cluster names and the seed alone: not on row order, call order or process. Means over nothing are nan, never 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 10_000
_CHUNK = 100  # draws held at a time: their counts stay in the CPU cache
_TAILS = (2.5, 97.5)

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A ratio of sums with its 95 % percentile interval over resampled clusters."""

    value: float
    low: float
    high: float
    n: int
    clusters: int

    def __str__(self) -> str:
        return _shown(self.value, self.low, self.high, ".3f")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Paired difference a - b: 95 % interval over resampled clusters, two-sided sign-flip p-value."""

    value: float
    low: float
    high: float
    p: float
    n: int
    clusters: int

    def __str__(self) -> str:
        return _shown(self.value, self.low, self.high, "+.3f")


def _shown(value: float, low: float, high: float, form: str) -> str:
    """For tables: "-" for what is not defined, no interval where there is none."""
    if math.isnan(value):
        return "-"
    return f"{value:{form}}" if math.isnan(low) else f"{value:{form}} [{low:{form}}, {high:{form}}]"


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """95 % score interval of a proportion; (nan, nan) when n is 0."""
    if n == 0:
        return math.nan, math.nan
    share, spread = successes / n, z * z / n
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def question_sd(values: ArrayLike) -> float:
    """Standard error by resampling questions one by one, in the limit of many draws: sd / sqrt(n).

    The paper's figures in parentheses (Tables 2 and 3): for a proportion, sqrt(p (1 - p) / n). nan below two
    questions, where a bootstrap would print a meaningless 0.000.
    """
    array = np.asarray(values, np.float64)
    return float(array.std() / math.sqrt(array.size)) if array.size > 1 else math.nan


def resampled_sums(
    columns: ArrayLike,
    clusters: Sequence[str],
    *,
    strata: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Floats:
    """Column sums over `draws` samples of whole clusters with replacement.

    Args:
      columns: [rows, k] float; every statistic that is a function of sums comes from one call.
      clusters: [rows] cluster name.
      strata: [rows] stratum name; clusters are drawn within their stratum, each of which keeps its number of clusters.
    Returns: [draws, k] float64.
    """
    sums, bounds = _cluster_sums(np.asarray(columns, np.float64), clusters, strata)
    rng = np.random.default_rng(seed)
    out = np.empty((draws, sums.shape[1]))
    for start in range(0, draws, _CHUNK):
        stop = min(start + _CHUNK, draws)
        out[start:stop] = _cluster_counts(rng, stop - start, bounds) @ sums
    return out


def clustered_ci(
    values: ArrayLike,
    clusters: Sequence[str],
    *,
    strata: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Mean of `values` [rows] with its clustered 95 % percentile interval; nan bounds for a single cluster."""
    array = np.asarray(values, np.float64)
    sums = resampled_sums(
        np.column_stack([array, np.ones_like(array)]), clusters, strata=strata, draws=draws, seed=seed
    )
    low, high = percentile_interval(sums[:, 0] / sums[:, 1])
    count = len(set(clusters))
    if count < 2:
        low = high = math.nan
    return Interval(float(array.mean()) if array.size else math.nan, low, high, array.size, count)


def paired_difference(
    a: ArrayLike,
    b: ArrayLike,
    clusters: Sequence[str],
    *,
    strata: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Difference:
    """Difference of means of two scorings [rows] of the same questions.

    The p-value flips the sign of whole clusters' summed differences (`draws` random flips, the observed one counted
    in).
    """
    gap = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    base = clustered_ci(gap, clusters, strata=strata, draws=draws, seed=seed)
    sums, _ = _cluster_sums(gap[:, None], clusters, None)
    rng = np.random.default_rng([seed, 1])
    observed = abs(sums.sum()) - 1e-9  # sums of halves and thirds: equal flips must count as equal
    extreme = 0
    for start in range(0, draws, _CHUNK):
        signs = rng.integers(0, 2, (min(_CHUNK, draws - start), len(sums)), dtype=np.int8) * 2 - 1
        extreme += int((np.abs(signs.astype(np.float64) @ sums[:, 0]) >= observed).sum())
    p = (1 + extreme) / (1 + draws) if gap.size else math.nan
    return Difference(base.value, base.low, base.high, p, base.n, base.clusters)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given; nan stays nan and does not count as a test."""
    order = sorted((k for k, p in enumerate(p_values) if not math.isnan(p)), key=lambda k: p_values[k])
    adjusted = [math.nan] * len(p_values)
    floor = 0.0
    for rank, k in enumerate(order):
        floor = max(floor, min(1.0, p_values[k] * (len(order) - rank)))
        adjusted[k] = floor
    return adjusted


def percentile_interval(samples: Floats) -> tuple[float, float]:
    """2.5 and 97.5 percentiles, ignoring undefined samples; (nan, nan) when none is defined."""
    defined = samples[np.isfinite(samples)]
    if not defined.size:
        return math.nan, math.nan
    low, high = np.percentile(defined, _TAILS)
    return float(low), float(high)


def _cluster_sums(columns: Floats, clusters: Sequence[str], strata: Sequence[str] | None) -> tuple[Floats, list[int]]:
    """Sums [clusters, k], clusters ordered by (stratum, name), and the strata's bounds within them."""
    keys = [(stratum, name) for stratum, name in zip(strata or [""] * len(clusters), clusters, strict=True)]
    names = sorted(set(keys))
    index = {name: k for k, name in enumerate(names)}
    codes = np.fromiter((index[key] for key in keys), np.int64, len(keys))
    order = np.lexsort((*columns.T, codes))  # float sums depend on their order: fix it by value
    sums = np.zeros((len(names), columns.shape[1]))
    np.add.at(sums, codes[order], columns[order])
    starts = [k for k, name in enumerate(names) if k == 0 or name[0] != names[k - 1][0]]
    return sums, [*starts, len(names)]


def _cluster_counts(rng: np.random.Generator, draws: int, bounds: Sequence[int]) -> Floats:
    """[draws, clusters] how often each cluster is drawn."""
    parts = []
    for start, stop in itertools.pairwise(bounds):
        size = stop - start
        picks = rng.integers(0, size, (draws, size))
        picks += np.arange(draws)[:, None] * size
        parts.append(np.bincount(picks.ravel(), minlength=draws * size).reshape(draws, size))
    return np.concatenate(parts, axis=1).astype(np.float64) if parts else np.zeros((draws, 0))
