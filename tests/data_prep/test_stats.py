"""Statistics against closed forms, known tables and the paper's own standard deviations."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, false_discovery_control, permutation_test

from data_prep import stats


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, list[str]]:
    """600 answers about 200 images; answers about one image agree more often than by chance."""
    rng = np.random.default_rng(3)
    easy = np.repeat(rng.random(200), 3)
    return (rng.random(600) < 0.3 + 0.6 * easy).astype(float), [f"image{k // 3}" for k in range(600)]


@pytest.mark.parametrize(("k", "n"), [(7, 7), (0, 22), (1, 1), (496, 505), (3, 10)])
def test_wilson_is_scipys(k: int, n: int) -> None:
    expected = binomtest(k, n).proportion_ci(method="wilson")
    assert stats.wilson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_has_no_interval() -> None:
    assert all(math.isnan(value) for value in stats.wilson(0, 0))
    assert math.isnan(stats.question_sd([1.0]))
    alone = stats.clustered_ci([1.0, 0.0], ["a", "a"])
    assert alone.value == 0.5 and math.isnan(alone.low) and alone.clusters == 1


def test_question_sd_is_the_bootstraps_limit(sample: tuple[np.ndarray, list[str]]) -> None:
    values, _ = sample
    sums = stats.resampled_sums(np.column_stack([values, np.ones(600)]), [f"{k:03}" for k in range(600)], draws=20_000)
    assert stats.question_sd(values) == pytest.approx((sums[:, 0] / sums[:, 1]).std(), rel=0.02)


def test_the_papers_standard_deviations_are_by_question(shared: Path) -> None:
    """Printed sd / sqrt(p (1 - p) / n) averages 1 over the accuracies of Tables 2 and 3 whose n is known."""
    text = (shared / "reference/paper.txt").read_text()
    rows = [line.split("\t")[1:] for line in text.splitlines() if line.count("(0.") == 14]
    entries = [(row[k], n) for row in rows for k, n in ((7, 727), (8, 1493))]
    slides = [line for line in text.splitlines() if line.startswith(("T/F\tAccuracy\t", "MC\tAccuracy\t"))]
    entries += [(cell, 35 if line.startswith("T/F") else 55) for line in slides[:2] for cell in line.split("\t")[2:]]
    ratios = []
    for cell, n in entries:
        p, sd = (float(value) for value in re.fullmatch(r"(-?[\d.]+)\(([\d.]+)\)", cell).groups())
        if 0 < p < 1 and sd > 0.008:
            ratios.append(sd / math.sqrt(p * (1 - p) / n))
    assert len(ratios) > 30
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)


def test_clusters_widen_the_interval_as_they_should(sample: tuple[np.ndarray, list[str]]) -> None:
    values, clusters = sample
    found = stats.clustered_ci(values, clusters)
    by_image = values.reshape(200, 3).mean(1)
    se = by_image.std() / math.sqrt(200)  # equal cluster sizes: the mean of cluster means
    assert (found.low, found.high) == pytest.approx((values.mean() - 1.96 * se, values.mean() + 1.96 * se), abs=0.004)
    assert found.high - found.low > 1.1 * 2 * 1.96 * stats.question_sd(values)


def test_intervals_do_not_depend_on_row_order(sample: tuple[np.ndarray, list[str]]) -> None:
    values, clusters = sample
    rough = values + np.linspace(0, 0.1, 600)  # sums of such floats depend on their order
    order = np.random.default_rng(0).permutation(600)
    shuffled = [clusters[k] for k in order]
    strata = [str(int(name[5:]) % 2) for name in clusters]
    mixed = [strata[k] for k in order]
    a = stats.clustered_ci(rough, clusters, strata=strata, draws=500)
    b = stats.clustered_ci(rough[order], shuffled, strata=mixed, draws=500)
    assert (a.low, a.high) == (b.low, b.high)
    assert a != stats.clustered_ci(rough, clusters, strata=strata, draws=500, seed=1)


def test_strata_keep_their_number_of_clusters() -> None:
    values = np.array([0.0] * 50 + [1.0] * 150)
    names, strata = [f"c{k}" for k in range(200)], ["x"] * 50 + ["y"] * 150
    found = stats.clustered_ci(values, names, strata=strata, draws=200)
    assert (found.low, found.high) == (0.75, 0.75)  # all spread is between strata
    free = stats.clustered_ci(values, names, draws=200)
    assert free.low < 0.72 < 0.78 < free.high


def test_paired_difference_finds_a_gap_and_no_gap(sample: tuple[np.ndarray, list[str]]) -> None:
    values, clusters = sample
    worse = values * (np.arange(600) % 10 > 0)
    found = stats.paired_difference(values, worse, clusters)
    assert found.low > 0 and found.p < 0.001 and found.value == pytest.approx((values - worse).mean())
    same = stats.paired_difference(values, values, clusters, draws=500)
    assert (same.value, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_sign_flip_p_is_the_permutation_tests() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(0.25, 1, 40), rng.normal(0, 1, 40)
    expected = permutation_test(
        (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=20_000, rng=rng
    ).pvalue
    found = stats.paired_difference(a, b, [str(k) for k in range(40)], draws=20_000)
    assert found.p == pytest.approx(expected, abs=0.015)


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    with_gap = stats.holm([0.02, math.nan, 0.04])
    assert with_gap[0] == 0.04 and math.isnan(with_gap[1]) and with_gap[2] == 0.04
    p = [0.001, 0.2, 0.03, 0.03]
    assert all(h >= b - 1e-12 for h, b in zip(stats.holm(p), false_discovery_control(p), strict=True))


def test_a_figure_shows_no_interval_where_there_is_none():
    nan = math.nan
    assert str(stats.Interval(0.5, 0.25, 0.75, 4, 2)) == "0.500 [0.250, 0.750]"
    assert str(stats.Difference(0.1, -0.1, 0.3, 0.5, 4, 2)) == "+0.100 [-0.100, +0.300]"
    assert str(stats.clustered_ci([1.0, 0.0], ["a", "a"])) == "0.500"
    assert str(stats.Difference(nan, nan, nan, nan, 0, 0)) == "-"
