"""Bags of patches: which ones a budget keeps, what is masked, and what does not belong together."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from data_prep.io import TEXT, array, write_dataset
from data_prep.schema import DataError
from pbs_jax.data.slide_examples import SlideBags, decode_bag, sample_patches

GRID = np.stack(np.meshgrid(np.arange(40), np.arange(40)), -1).reshape(-1, 2) * 512


def scores(count: int) -> np.ndarray:
    """QC scores of kept patches: 0.5 to 1."""
    return 0.5 + 0.5 * np.random.default_rng(0).random(count).astype(np.float32)


@pytest.mark.parametrize("budget", [1, 100, 1500, 1599])
def test_a_budget_is_met_exactly_and_seeded(budget: int) -> None:
    chosen = sample_patches(GRID, scores(1600), budget, 3)
    assert len(np.unique(chosen)) == budget and (np.diff(chosen) > 0).all()
    np.testing.assert_array_equal(chosen, sample_patches(GRID, scores(1600), budget, 3))
    assert budget > 1500 or not np.array_equal(chosen, sample_patches(GRID, scores(1600), budget, 4))


def test_what_fits_the_budget_is_taken_whole() -> None:
    np.testing.assert_array_equal(sample_patches(GRID[:7], scores(7), 7, 0), np.arange(7))


def test_the_sample_is_spread_over_the_slide() -> None:
    """A fifth of the patches: every block of 4 x 4 gives 2 to 5 of its 16, no column is empty (the official rule, the
    first so many in string order, keeps 10 of 411 columns)."""
    chosen = GRID[sample_patches(GRID, np.full(1600, 0.8, np.float32), 320, 1)] // 512
    blocks = np.zeros((10, 10), int)
    np.add.at(blocks, tuple((chosen // 4).T), 1)
    assert blocks.min() >= 2 and blocks.max() <= 5
    assert len(np.unique(chosen[:, 0])) == 40


def test_better_patches_are_drawn_more_often() -> None:
    qc = np.where(np.arange(1600) % 3 == 0, 1.0, 0.5).astype(np.float32)
    drawn = np.concatenate([sample_patches(GRID, qc, 300, seed) for seed in range(20)])
    times = np.bincount(drawn, minlength=1600)
    assert times[qc == 1.0].mean() / times[qc == 0.5].mean() == pytest.approx(2.0, rel=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """slide_features of a slide with two patches and one with five."""
    out = tmp_path_factory.mktemp("features")
    records = [
        {
            "slide_id": f"S{count}",
            "split": "train",
            "tokens": np.full((count, 4), count, ml_dtypes.bfloat16),
            "coords": GRID[:count].astype(np.int32),
            "qc": scores(count),
        }
        for count in (2, 5)
    ]
    features = {
        "slide_id": TEXT,
        "split": TEXT,
        "tokens": array("bfloat16", -1, 4),
        "coords": array("int32", -1, 2),
        "qc": array("float32", -1),
    }
    config = {"kind": "phase2", "backbone_sha256": "b", "phase2_sha256": "p"}
    write_dataset(
        out, "slide_features", features, records, id_feature="slide_id", config=config, inputs={},
        details={"most_patches": 5},
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("budget", "rows"), [(2048, 5), (3, 3)])
def test_bags_have_one_shape_and_a_true_mask(folder: Path, budget: int, rows: int) -> None:
    bags = SlideBags(folder, ("train",), budget)
    short, long = bags["S2"], bags["S5"]
    assert short.features.shape == long.features.shape == (rows, 4)
    assert short.mask.tolist() == [True, True] + [False] * (rows - 2)
    assert long.mask.all() and not short.features[2:].any() and (short.features[:2] == 2).all()


def test_a_bag_survives_its_encoding(folder: Path) -> None:
    bag = SlideBags(folder, ("train",), 8)["S2"]
    features, mask = decode_bag(bag.encode())
    np.testing.assert_array_equal(features, bag.features)
    np.testing.assert_array_equal(mask, bag.mask)
    assert features.dtype == ml_dtypes.bfloat16


def test_a_slide_without_features_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no features of S9"):
        SlideBags(folder, ("train",), 8)["S9"]
