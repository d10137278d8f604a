"""Quality of a tile: a score from 0 to 1 whose weakest part is the reason of a rejection (paper 9.1 keeps above 0.5).

A tile is good when it is in focus, lit, holds red cells, shows background between them and is not full of nuclei. The
bounds were set on real fields (BCCD, Chula), on the same blurred, and on tissue slides; each part is a ramp between a
value that is surely bad and one that is surely good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from data_prep.slide_cells import Halved, grow, shrink

THRESHOLD = 0.5
BACKGROUND_DENSITY = 0.1
CROWDED = 0.2  # share of background below which uncounted red cells are too many, not too few
TILE_UM2 = (512 * 0.25) ** 2  # the area to which the red-cell bounds refer
PARTS: Mapping[str, tuple[float, float]] = {  # measured value: (score 0, score 1)
    "light": (35.0, 75.0),  # mean grey
    "focus": (0.22, 0.46),  # see `focus`
    "red cells": (8.0, 48.0),  # in a tile of 512 px at 0.25 um/px
    "background": (0.01, 0.11),  # share of the tile without stain: crowded smears and tissue have none
    "nuclear stain": (0.36, 0.16),  # share of the tile
}
REASONS = {
    "focus": "out of focus",
    "light": "dark",
    "red cells": "too few red cells",
    "background": "crowded",
    "nuclear stain": "too much nuclear stain",
}
BLANK = "blank"
THIRDS = 3 * 255 + 1  # values of a mean of three channels


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """`score` in 0..1; `reason` names the weakest part; `parts`: what was measured."""

    score: float
    reason: str
    parts: Mapping[str, float]


def classical(half: Halved, red_cells: int, mpp: float) -> Quality:
    """Quality of one tile.

    Args:
        half: the tile without its halo.
        red_cells: how many red cells lie in the tile.
    """
    area = half.grey.size * (2 * mpp) ** 2
    measured = {
        "focus": focus(half),
        "light": float(half.grey.mean()),
        "red cells": red_cells * TILE_UM2 / area,
        "background": float((half.total < BACKGROUND_DENSITY).mean()),
        "nuclear stain": float(half.nuclear.mean()),
    }
    scores = {name: float(np.clip((measured[name] - bad) / (good - bad), 0, 1)) for name, (bad, good) in PARTS.items()}
    # Darkness hides the other parts; and where nothing has an edge, the focus is unknown and another part says why.
    ranked = scores if measured["focus"] else scores | {"focus": 1.0}
    worst = "light" if scores["light"] < THRESHOLD else min(("focus", *PARTS), key=lambda name: ranked[name])
    if worst == "red cells" and measured["background"] < CROWDED:
        worst = "background"  # red cells on top of each other cannot be told apart
    blank = measured["background"] > 0.97 and measured["nuclear stain"] < 0.01
    return Quality(
        0.0 if blank else round(min(scores.values()), 4),
        BLANK if blank else REASONS[worst],
        {name: round(value, 4) for name, value in measured.items()},
    )


def decided_by(name: str, score: float | None, classical: Quality) -> Quality:
    """The verdict of another method, with the classical score among its parts. None: that method knows nothing of the tile."""
    parts = {**classical.parts, "classical": classical.score}
    if score is None:
        return Quality(0.0, f"no {name} score", parts)
    return Quality(score, f"poor by {name}", {**parts, name: score})


def focus(half: Halved) -> float:
    """Steepness of the red cells' edges per step from background to cell, at half resolution; 0 without edges.

    Independent of how many cells there are and of their stain: sharp fields have 0.43-0.63, the same blurred by 2.5 px
    0.26-0.41, by 4 px 0.20-0.31.
    """
    grey = half.grey
    cells = half.total > half.stain.cell
    nuclei = grow(half.nuclear, 4)
    edge = (grow(cells) ^ shrink(cells)) & ~nuclei
    edge[[0, -1]] = edge[:, [0, -1]] = False
    # Grey is a third of a whole number, so that one histogram has both medians.
    thirds = np.rint(3 * grey).astype(np.intp) + THIRDS * cells + 2 * THIRDS * nuclei
    plain, red, *_ = np.bincount(thirds.ravel(), minlength=4 * THIRDS).reshape(4, THIRDS)
    places = np.flatnonzero(edge)
    if min(places.size, plain.sum(), red.sum()) < 100:
        return 0.0
    flat, width = grey.ravel(), grey.shape[1]
    down, across = flat[places + width] - flat[places - width], flat[places + 1] - flat[places - 1]
    steep = np.percentile(np.hypot(down, across), 75) / 2
    return float(steep / max(_median(plain) - _median(red), 6.0))


def _median(counts: np.ndarray) -> float:
    """Median grey of a histogram over thirds."""
    ends = counts.cumsum()
    middle = np.searchsorted(ends, [(ends[-1] - 1) // 2, ends[-1] // 2], side="right")
    return float(middle.sum() / 6)
