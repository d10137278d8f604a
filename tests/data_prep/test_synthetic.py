"""Synthetic cells: what is recorded is what is drawn, checked on the pixels; reproducible."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data_prep.schema import ATTRIBUTES, WHITE_CELL_CLASSES, Box, DataError
from data_prep.synthetic import PROFILES, SyntheticCell, cells, split_of
from data_prep.synthetic_draw import CELL_RADIUS, draw

BASE = {
    "cell_size": "big", "cell_shape": "round", "nucleus_shape": "unsegmented-round", "nuclear_cytoplasmic_ratio": "low",
    "chromatin_density": "densely", "cytoplasm_vacuole": "no", "cytoplasm_texture": "clear", "cytoplasm_colour": "blue",
    "granule_type": "nil", "granule_colour": "nil", "granularity": "no",
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> list[SyntheticCell]:
    return list(cells(10, seed=3))


def _crop(image: np.ndarray, box: Box) -> np.ndarray:
    return image[box.top : box.bottom, box.left : box.right].astype(float)


def _mean(measure, **changed: str) -> float:
    """Mean of a measure of the cell's crop over eight drawings that differ in stain and focus."""
    drawn = [draw(BASE | changed, np.random.default_rng(seed)) for seed in range(8)]
    return float(np.mean([measure(_crop(*pair)) for pair in drawn]))


def _dark(crop: np.ndarray) -> np.ndarray:
    return crop.mean(2) < 0.5 * np.percentile(crop.mean(2), 98)


def _dark_share(crop: np.ndarray) -> float:
    return float(_dark(crop).mean())


def _grain(crop: np.ndarray) -> float:
    """Spread between neighbouring pixels of the cytoplasm: outside the nucleus, inside the inscribed circle."""
    grey = crop.mean(2)
    rows, columns = np.indices(grey.shape)
    centre, radius = (np.array(grey.shape) - 1) / 2, min(grey.shape) / 2
    inside = np.hypot(rows - centre[0], columns - centre[1]) < 0.85 * radius
    cytoplasm = inside & ~_dark(crop)
    return float(np.abs(np.diff(grey, axis=0))[cytoplasm[1:] & cytoplasm[:-1]].mean())


def test_one_of_each_class_takes_turns_with_valid_attributes_and_boxes(made: list[SyntheticCell]) -> None:
    assert [cell.label for cell in made[:5]] == list(WHITE_CELL_CLASSES)
    assert len({cell.id for cell in made}) == len(made) == 50
    for cell in made:
        assert all(cell.attributes[name] in values for name, values in ATTRIBUTES.items())
        assert cell.image.dtype == np.uint8 and cell.image.ndim == 3
        side = cell.image.shape[0]
        assert 0 <= cell.box.left < cell.box.right <= side and 0 <= cell.box.top < cell.box.bottom <= side


def test_same_seed_same_pixels_and_more_cells_do_not_change_them(made: list[SyntheticCell]) -> None:
    again = {cell.id: cell for cell in cells(11, seed=3)}
    assert all(np.array_equal(cell.image, again[cell.id].image) for cell in made)
    assert not np.array_equal(made[0].image, next(cells(10, seed=4)).image)


def test_profiles_are_distributions_over_schema_values() -> None:
    assert tuple(PROFILES) == WHITE_CELL_CLASSES
    for profile in PROFILES.values():
        assert set(profile) == set(ATTRIBUTES)
        for name, shares in profile.items():
            assert set(shares) <= set(ATTRIBUTES[name]) and sum(shares.values()) == pytest.approx(1)


def test_splits_are_60_10_30_of_each_class() -> None:
    assert Counter(split_of(k, 50) for k in range(50)) == {"train": 30, "val": 5, "test": 15}
    assert Counter(split_of(k, 10) for k in range(10)) == {"train": 6, "val": 1, "test": 3}
    with pytest.raises(DataError, match="n_per_class is 9"):
        next(cells(9))


def test_box_is_tight_around_the_drawn_cell() -> None:
    for size, (low, high) in CELL_RADIUS.items():
        for seed in range(5):
            _, box = draw(BASE | {"cell_size": size}, np.random.default_rng(seed))
            for side in (box.width, box.height):
                assert 1.75 * low < side < 2.25 * high, (size, side)


def test_nucleus_is_larger_at_a_high_ratio_and_has_a_gap_when_segmented() -> None:
    low, high = _mean(_dark_share), _mean(_dark_share, nuclear_cytoplasmic_ratio="high")
    assert high > 1.3 * low
    assert _mean(_dark_share, nucleus_shape="segmented-multilobed") < 0.8 * low


def test_chromatin_is_lighter_when_loose() -> None:
    def darkness(crop: np.ndarray) -> float:
        return float(crop[_dark(crop)].mean())

    assert _mean(darkness, chromatin_density="loosely") > 1.15 * _mean(darkness)


def test_frosted_cytoplasm_and_granules_are_grainier_than_clear() -> None:
    clear = _mean(_grain)
    assert _mean(_grain, cytoplasm_texture="frosted") > 1.3 * clear
    red = {"granularity": "yes", "granule_type": "round", "granule_colour": "red", "cytoplasm_colour": "light blue"}
    assert _mean(_grain, **red) > 1.3 * _mean(_grain, cytoplasm_colour="light blue")


def test_granule_and_cytoplasm_colours_differ() -> None:
    def redness(crop: np.ndarray) -> float:
        cytoplasm = crop[~_dark(crop)]
        return float(cytoplasm[:, 0].mean() - cytoplasm[:, 2].mean())

    red = {"granularity": "yes", "granule_type": "round", "granule_colour": "red", "cytoplasm_colour": "light blue"}
    assert _mean(redness, **red) > _mean(redness, cytoplasm_colour="light blue") + 8
    assert _mean(redness) < _mean(redness, cytoplasm_colour="light blue") - 8


def test_irregular_cells_fill_less_of_their_box() -> None:
    def elongation(attributes: dict[str, str]) -> float:
        boxes = [draw(attributes, np.random.default_rng(seed))[1] for seed in range(12)]
        return float(np.mean([max(b.width, b.height) / min(b.width, b.height) for b in boxes]))

    assert elongation(BASE | {"cell_shape": "irregular"}) > elongation(BASE) + 0.05


def test_vacuoles_are_pale_holes_in_the_cytoplasm() -> None:
    def brightest(crop: np.ndarray) -> float:
        grey = crop.mean(2)
        half = grey.shape[0] // 2
        rows, columns = np.indices(grey.shape)
        inside = np.hypot(rows - half, columns - half) < 0.8 * half
        return float(np.percentile(grey[inside], 99.5))

    assert _mean(brightest, cytoplasm_vacuole="yes") > _mean(brightest) + 15
