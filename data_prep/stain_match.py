"""Makes the cells of one laboratory look stained like those a classifier learnt from, without knowing what they are.

Mean and spread of the optical density are matched channel by channel, as Reinhard et al. (2001) did with a colour space:
densities add where stains mix, so that more of a stain is a larger spread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

ENOUGH = 20  # pictures; fewer say more about their cells than about their stain


@dataclasses.dataclass(frozen=True)
class Density:
    """Of all pixels of some pictures: mean and standard deviation of the optical density against white, R, G, B."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def density_of(pictures: Iterable[np.ndarray]) -> Density | None:
    """Of pictures uint8[H, W, 3] of one size; None for fewer than ENOUGH, or where a channel is all alike."""
    sums = []
    for picture in pictures:
        density = _density(picture).reshape(-1, 3)
        sums.append([density.mean(0), (density**2).mean(0)])
    if len(sums) < ENOUGH:
        return None
    mean, square = np.mean(sums, axis=0)
    std = np.sqrt(np.maximum(square - mean**2, 0))
    return Density(tuple(mean.tolist()), tuple(std.tolist())) if std.min() > 1e-3 else None


def matched(picture: np.ndarray, own: Density, learnt: Density) -> np.ndarray:
    """uint8[H, W, 3] of a picture among those of `own` as it would be among those of `learnt`."""
    gain = np.divide(learnt.std, own.std)
    density = (_density(picture) - own.mean) * gain + learnt.mean
    return np.clip(np.round(256 * np.exp(-density) - 1), 0, 255).astype(np.uint8)


def _density(picture: np.ndarray) -> np.ndarray:
    return -np.log((picture + 1.0) / 256.0)
