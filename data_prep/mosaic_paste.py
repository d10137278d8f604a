"""White cells cut out of single-cell pictures and laid into a red-cell background, in optical density.

A cell is divided by its own picture's background and rendered on the slide's, so plasma around it matches plasma there;
places with few red cells are looked for, and a red cell that would lie mostly under a white one is taken away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from data_prep.mosaic_fields import Stain, erase, render, to_density
from data_prep.schema import Box, DataError

MARGIN = 4  # px around a cell's box in its cut-out
WIDEN = 1.0  # px by which the outline is moved out, so that the rim keeps its own soft edge
GAP = 14  # px between the boxes of two white cells
TRIALS = 300  # places looked at per cell
COARSE = 4  # px per step of the map of red cells that places are chosen by
RED_CELL_DENSITY = 1.2  # sum over channels, in units of the red cells' density, from which a pixel is stained
REACH = 48  # px around a white cell within which red cells are looked at
COVERED = 0.3  # share of a red cell under a white one from which it is taken away


@dataclasses.dataclass(frozen=True, slots=True)
class Cutout:
    """`density` float32[h,w,3] in absolute units, `alpha` float32[h,w] in [0, 1]."""

    density: np.ndarray
    alpha: np.ndarray


def cut_out(rgb: np.ndarray, outline: np.ndarray, background: np.ndarray, scale: float, turn: int) -> Cutout:
    """A cell at `scale`, in one of eight orientations.

    Args:
        rgb: uint8[H,W,3] its picture.
        outline: float[n,2] rows and columns of its edge.
        background: float[3] the picture's plasma, 0..255.
        turn: 0..7, quarter turns and mirroring.
    """
    size = (round(rgb.shape[1] * scale), round(rgb.shape[0] * scale))
    small = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS), np.float32)
    fine = 4
    points = [(float(x) * scale * fine, float(y) * scale * fine) for y, x in outline]
    drawn = Image.new("L", (size[0] * fine, size[1] * fine))
    ImageDraw.Draw(drawn).polygon(points, fill=255)
    inside = np.asarray(drawn.resize(size, Image.Resampling.BOX), np.float32) / 255
    alpha = np.clip(2 * ndimage.gaussian_filter(inside, WIDEN), 0, 1) * (ndimage.gaussian_filter(inside, 0.5) > 0)
    rows, columns = np.nonzero(alpha > 0.02)
    part = (
        slice(max(rows.min() - MARGIN, 0), rows.max() + 1 + MARGIN),
        slice(max(columns.min() - MARGIN, 0), columns.max() + 1 + MARGIN),
    )
    return Cutout(_turned(to_density(small[part], background), turn), _turned(alpha[part], turn))


def _turned(pixels: np.ndarray, turn: int) -> np.ndarray:
    pixels = np.rot90(pixels, turn % 4)
    return pixels[:, ::-1] if turn >= 4 else pixels


def places(
    picture: np.ndarray, stain: Stain, sizes: Sequence[tuple[int, int]], rng: np.random.Generator
) -> list[tuple[int, int]]:
    """(left, top) for cut-outs of the given (width, height), clear of each other, where red cells are fewest.

    Args:
        picture: uint8[S,S,3] the background, in the given stain.

    Raises:
        DataError: no room is left.
    """
    side = len(picture)
    stained = _stained(to_density(picture[::COARSE, ::COARSE], stain.background), stain).astype(np.float32)
    cover = ndimage.uniform_filter(stained, max(map(max, sizes), default=0) // COARSE)
    taken: list[tuple[float, float, float]] = []
    found = []
    for number, (width, height) in enumerate(sizes):
        left = rng.integers(GAP, side - width - GAP, TRIALS)
        top = rng.integers(GAP, side - height - GAP, TRIALS)
        x, y, reach = left + width / 2, top + height / 2, max(width, height) / 2
        free = np.ones(TRIALS, bool)
        for other_x, other_y, other_reach in taken:
            free &= np.maximum(np.abs(x - other_x), np.abs(y - other_y)) > reach + other_reach + GAP
        if not free.any():
            raise DataError(
                f"no room for white cell {number + 1} of {len(sizes)}: ask for fewer cells or larger slides"
            )
        rank = np.where(free, cover[(y / COARSE).astype(int), (x / COARSE).astype(int)], np.inf)
        best = int(rank.argmin())
        taken.append((float(x[best]), float(y[best]), reach))
        found.append((int(left[best]), int(top[best])))
    return found


def _stained(density: np.ndarray, stain: Stain) -> np.ndarray:
    return (density / stain.red).sum(-1) > RED_CELL_DENSITY


def paste(picture: np.ndarray, stain: Stain, cutout: Cutout, left: int, top: int) -> Box:
    """Lays a cut-out into `picture` (uint8[S,S,3] in the given stain, changed in place); returns the cell's box."""
    height, width = cutout.alpha.shape
    y0, x0 = max(top - REACH, 0), max(left - REACH, 0)
    pixels = picture[y0 : top + height + REACH, x0 : left + width + REACH]
    window = to_density(pixels, stain.background)
    alpha = np.zeros(window.shape[:2], np.float32)
    alpha[top - y0 : top - y0 + height, left - x0 : left - x0 + width] = cutout.alpha
    labels, count = ndimage.label(_stained(window, stain))
    areas = np.bincount(labels.ravel(), minlength=count + 1)
    covered = np.bincount(labels.ravel(), weights=(alpha > 0.5).ravel(), minlength=count + 1)
    gone = covered > COVERED * areas
    gone[0] = False
    window = erase(window, ndimage.binary_dilation(gone[labels], iterations=4))
    inside = window[top - y0 : top - y0 + height, left - x0 : left - x0 + width]
    inside[:] = inside * (1 - cutout.alpha[..., None]) + cutout.density * cutout.alpha[..., None]
    pixels[:] = render(window, stain.background)
    rows, columns = np.nonzero(cutout.alpha > 0.5)
    return Box(
        int(left + columns.min()), int(top + rows.min()), int(left + columns.max() + 1), int(top + rows.max() + 1)
    )
