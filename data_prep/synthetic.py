"""Synthetic white cells among red cells with recorded attributes, for the demo and for tests without real data.

Five classes; each attribute value is drawn as it is recorded (`synthetic_draw`). The frequencies follow WBCAtt loosely
and are more mixed within a class, so that a demo can show more than the cell type. Pictures, not a model of blood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from data_prep.schema import ATTRIBUTES, WHITE_CELL_CLASSES, Box, DataError, stable_hash
from data_prep.synthetic_draw import draw

Profile = dict[str, dict[str, float]]

_GRANULOCYTE: Profile = {
    "nuclear_cytoplasmic_ratio": {"low": 1.0},
    "chromatin_density": {"densely": 0.9, "loosely": 0.1},
    "cytoplasm_vacuole": {"no": 0.9, "yes": 0.1},
    "cytoplasm_texture": {"clear": 1.0},
    "cytoplasm_colour": {"light blue": 1.0},
    "granularity": {"yes": 1.0},
}
_AGRANULOCYTE: Profile = {
    "granule_type": {"nil": 1.0},
    "granule_colour": {"nil": 1.0},
    "granularity": {"no": 1.0},
}
PROFILES: dict[str, Profile] = {
    "Neutrophil": _GRANULOCYTE
    | {
        "cell_size": {"big": 0.6, "small": 0.4},
        "cell_shape": {"round": 0.7, "irregular": 0.3},
        "nucleus_shape": {"unsegmented-band": 0.4, "segmented-multilobed": 0.4, "segmented-bilobed": 0.2},
        "granule_type": {"small": 1.0},
        "granule_colour": {"pink": 1.0},
    },
    "Lymphocyte": _AGRANULOCYTE
    | {
        "cell_size": {"small": 0.85, "big": 0.15},
        "cell_shape": {"round": 0.65, "irregular": 0.35},
        "nucleus_shape": {"unsegmented-round": 0.7, "unsegmented-indented": 0.3},
        "nuclear_cytoplasmic_ratio": {"high": 0.85, "low": 0.15},
        "chromatin_density": {"densely": 0.85, "loosely": 0.15},
        "cytoplasm_vacuole": {"no": 1.0},
        "cytoplasm_texture": {"frosted": 0.5, "clear": 0.5},
        "cytoplasm_colour": {"blue": 0.6, "purple blue": 0.3, "light blue": 0.1},
    },
    "Monocyte": _AGRANULOCYTE
    | {
        "cell_size": {"big": 0.8, "small": 0.2},
        "cell_shape": {"irregular": 0.55, "round": 0.45},
        "nucleus_shape": {"unsegmented-indented": 0.7, "irregular": 0.3},
        "nuclear_cytoplasmic_ratio": {"low": 0.85, "high": 0.15},
        "chromatin_density": {"loosely": 0.7, "densely": 0.3},
        "cytoplasm_vacuole": {"yes": 0.45, "no": 0.55},
        "cytoplasm_texture": {"frosted": 0.8, "clear": 0.2},
        "cytoplasm_colour": {"purple blue": 0.5, "blue": 0.4, "light blue": 0.1},
    },
    "Eosinophil": _GRANULOCYTE
    | {
        "cell_size": {"big": 0.65, "small": 0.35},
        "cell_shape": {"round": 0.8, "irregular": 0.2},
        "nucleus_shape": {"segmented-bilobed": 0.7, "segmented-multilobed": 0.15, "unsegmented-band": 0.15},
        "granule_type": {"round": 1.0},
        "granule_colour": {"red": 1.0},
    },
    "Basophil": _GRANULOCYTE
    | {
        "cell_size": {"small": 0.65, "big": 0.35},
        "cell_shape": {"round": 0.75, "irregular": 0.25},
        "nucleus_shape": {"irregular": 0.5, "segmented-bilobed": 0.3, "segmented-multilobed": 0.2},
        "granule_type": {"coarse": 1.0},
        "granule_colour": {"purple": 1.0},
    },
}
SPLIT_SHARES = {"train": 0.6, "val": 0.1, "test": 0.3}  # as WBCAtt


@dataclasses.dataclass(frozen=True, slots=True)
class SyntheticCell:
    """`image` uint8[side, side, 3]; `box` is that of the white cell in it."""

    id: str
    image: np.ndarray
    label: str
    attributes: dict[str, str]
    box: Box
    split: str


def cells(n_per_class: int, seed: int = 0) -> Iterator[SyntheticCell]:
    """`n_per_class` cells of each class, classes taking turns; a cell depends on (seed, class, number) alone.

    Raises DataError when n_per_class is below 10, where a split would stay empty.
    """
    if n_per_class < 10:
        raise DataError(
            f"n_per_class is {n_per_class}; give at least 10, so that every split gets cells of every class"
        )
    for number in range(n_per_class):
        for label in WHITE_CELL_CLASSES:
            rng = np.random.default_rng(stable_hash("synthetic", seed, label, number))
            attributes = sample_attributes(label, rng)
            image, box = draw(attributes, rng)
            id = f"synthetic:{seed}:{label}:{number:05d}"
            yield SyntheticCell(id, image, label, attributes, box, split_of(number, n_per_class))


def sample_attributes(label: str, rng: np.random.Generator) -> dict[str, str]:
    """The eleven attributes, each drawn from the class's profile."""
    profile = PROFILES[label]
    return {name: str(rng.choice(list(profile[name]), p=list(profile[name].values()))) for name in ATTRIBUTES}


def split_of(number: int, n_per_class: int) -> str:
    """The first 60 % of a class train, the next 10 % val, the rest test (whole cells, at least one each from 10 on)."""
    share = (number + 0.5) / n_per_class
    if share < SPLIT_SHARES["train"]:
        return "train"
    return "val" if share < SPLIT_SHARES["train"] + SPLIT_SHARES["val"] else "test"
