"""Red-cell fields for mosaics: photographs brought to one scale and one stain, without white cells, quilted to a slide.

Everything is optical density (Beer-Lambert: densities add, light multiplies): a field divided by its own background and
by its own red cells' density can be rendered in any other picture's background and red-cell colour.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image
from scipy import ndimage
from skimage.filters import threshold_otsu

from data_prep.schema import DataError
from data_prep.segment import optical_density

RED_CELL = 42  # px, diameter of a red cell in a mosaic: 0.6 of the median white cell's 70
BOTTOM = 0.12  # share of a field's height that is cut off: scale bars are burnt in there
SCALES = (0.3, 1.6)  # fields that would be enlarged more are too soft, reduced more too small
FEWEST = 15  # red cells, else a field says too little about its scale
GRAIN = 0.3  # standard deviation of the plasma, in the red cells' density: beyond it noise would be amplified
BLUER = 0.7  # red density minus green density, in the red cells' units, from which a body is no red cell
DARKER, DARKEST = 2.6, 2.2  # green density in the same units: of what is removed, and of what may stay
OVERLAP = 120  # px that neighbouring pieces share; the seam runs through it where they agree best
SEAM_STEP = 4  # px between the points of a seam
DRAWN = 12  # pixels of pure bright colour (arrows, bars) that make a field unusable


@dataclasses.dataclass(frozen=True, slots=True)
class Stain:
    """Background float[3] (0..255) and the red cells' median optical density float[3] of a picture."""

    background: np.ndarray
    red: np.ndarray


def red_cells(density: np.ndarray) -> np.ndarray:
    """bool[H,W]: red cells with their pale centres filled (and whatever else is stained)."""
    total = ndimage.gaussian_filter(density.sum(-1), 1)
    return ndimage.binary_opening(ndimage.binary_fill_holes(total > threshold_otsu(total)), iterations=2)


def stain_of(rgb: np.ndarray) -> Stain | None:
    """The stain of a single-cell picture uint8[H,W,3]; `red` is all 0 when it shows too few red cells to tell, None
    stands for a picture without plasma."""
    rgb = np.asarray(Image.fromarray(rgb).reduce(2))
    density = optical_density(rgb)
    total = density.sum(-1)
    nuclei = density[..., 1] + 0.5 * density[..., 0] - density[..., 2] > 0.5  # as the finder; red cells reach 0.3
    away = ~ndimage.binary_dilation(ndimage.binary_opening(nuclei), iterations=8)
    red, plasma = (total > 0.15) & away, (total < 0.05) & away
    if plasma.mean() < 0.01:
        return None
    bright = rgb[plasma]
    background = np.median(bright[bright[:, 1] >= np.median(bright[:, 1])], axis=0).astype(np.float32)
    enough = red.mean() > 0.05
    return Stain(background, np.median(density[red], axis=0) if enough else np.zeros(3, np.float32))


def prepare_field(rgb: np.ndarray) -> np.ndarray | str:
    """A field as float32[h,w,3] density in units of its own red cells' density, at RED_CELL scale, white cells removed;
    or the reason why it cannot serve."""
    rgb = rgb[: round(len(rgb) * (1 - BOTTOM))]
    spread = rgb.max(-1).astype(int) - rgb.min(-1)
    if ((rgb.max(-1) > 180) & (spread > 150)).sum() >= DRAWN:
        return "arrows or bars are drawn into it"
    half = np.asarray(Image.fromarray(rgb).reduce(2))  # enough to find the scale by
    areas = 4 * _single_cells(red_cells(_flat_density(half)))
    if len(areas) < FEWEST:
        return f"{len(areas)} single red cells, fewer than {FEWEST}"
    scale = RED_CELL / float(2 * np.sqrt(np.median(areas) / np.pi))
    if not SCALES[0] <= scale <= SCALES[1]:
        return f"its red cells would have to be scaled by {scale:.2f}"
    size = (round(rgb.shape[1] * scale), round(rgb.shape[0] * scale))
    rgb = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS))
    density = _flat_density(rgb)
    mask = red_cells(density)
    if _largest(mask) > 25 * np.pi * RED_CELL**2 / 4:
        return "its red cells lie in one clump"
    red = np.median(density[mask], axis=0)
    grain = float(density[~ndimage.binary_dilation(mask, iterations=6)].std(axis=0).max() / max(red.min(), 1e-3))
    if red.min() < 0.25 * red.max() or grain > GRAIN:
        return f"its red cells are too pale: grain {grain:.2f} of their density"
    units = density / red
    return np.minimum(erase(units, _foreign(units)), DARKEST)


def _flat_density(rgb: np.ndarray) -> np.ndarray:
    """float32[H,W,3] -log(I / background); the background is a quadratic surface through the plasma, per channel."""
    pixels = rgb.astype(np.float32) + 1
    green = ndimage.gaussian_filter(pixels[..., 1], 2)
    for _ in range(2):  # shading can hide plasma from the first threshold
        bright = ndimage.binary_erosion(green > threshold_otsu(green), iterations=3)
        rows, columns = np.nonzero(bright)
        every = slice(None, None, max(1, len(rows) // 4000))
        terms = _surface(rows[every] / len(rgb), columns[every] / rgb.shape[1])
        fit = np.linalg.lstsq(terms, pixels[rows[every], columns[every]], rcond=None)[0]
        grid = np.mgrid[: len(rgb), : rgb.shape[1]] / np.array([len(rgb), rgb.shape[1]]).reshape(2, 1, 1)
        background = np.maximum(_surface(*grid) @ fit, 1).astype(np.float32)
        green = ndimage.gaussian_filter((pixels / background)[..., 1], 2)
    return np.log(background / pixels)


def _surface(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(y), y, x, y * y, y * x, x * x], -1)


def _single_cells(mask: np.ndarray) -> np.ndarray:
    """Areas of the convex-looking bodies of middle size: single red cells, most of them."""
    labels, count = ndimage.label(mask)
    areas = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    boxes = [box[0].stop - box[0].start + box[1].stop - box[1].start for box in ndimage.find_objects(labels)]
    compact = areas / (np.array(boxes, float).reshape(-1) / 2) ** 2 > 0.65  # a disc fills 0.785 of its box
    large = areas > 40
    return areas[compact & large]


def _largest(mask: np.ndarray) -> int:
    return int(np.bincount(ndimage.label(mask)[0].ravel())[1:].max(initial=0))


def _foreign(units: np.ndarray) -> np.ndarray:
    """bool[H,W]: white cells, platelets and dirt of a field in units of its red cells' density: what takes more red
    light than green, measured by the red cells, or is far darker than they are. Large bodies grow by their cytoplasm."""
    smooth = ndimage.gaussian_filter(units, (1.5, 1.5, 0))
    stained = (smooth[..., 0] - smooth[..., 1] > BLUER) | (smooth[..., 1] > DARKER)
    labels, count = ndimage.label(ndimage.binary_dilation(stained, iterations=3))
    large = np.bincount(labels.ravel(), minlength=count + 1) > 0.7 * np.pi * RED_CELL**2 / 4
    large[0] = False
    return (labels > 0) | ndimage.binary_dilation(large[labels], iterations=RED_CELL // 3)


def erase(density: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Plasma (density 0, with the grain of real plasma beside it) where the mask is set, with soft edges."""
    if not mask.any():
        return density
    grain = density - ndimage.gaussian_filter(density, (3, 3, 0))
    plasma = np.abs(ndimage.gaussian_filter(density.sum(-1), 2)) < 0.06
    plasma &= ~ndimage.binary_dilation(mask, iterations=3)
    donor = grain[plasma]
    filled = np.zeros_like(density)
    if len(donor):
        filled[mask] = donor[np.arange(int(mask.sum())) % len(donor)]
    alpha = ndimage.gaussian_filter(mask.astype(np.float32), 1.5)[..., None]
    return density * (1 - alpha) + filled * alpha


def quilt(fields: Sequence[np.ndarray], side: int, rng: np.random.Generator) -> np.ndarray:
    """uint8[side,side,3]: pieces of the fields (uint8[h,w,3], one stain), turned and mirrored, joined along their least
    visible seams.

    Raises DataError without fields.
    """
    if not fields:
        raise DataError("no red-cell field is left to make a background of: give --fields other pictures")
    height = min(min(field.shape[:2]) for field in fields)
    rows = []
    for _ in range(-(-(side - OVERLAP) // (height - OVERLAP))):
        row = _piece(fields[int(rng.integers(len(fields)))], height, rng)
        while row.shape[1] < side:
            row = _join(row, _piece(fields[int(rng.integers(len(fields)))], height, rng))
        rows.append(row[:, :side])
    whole = rows[0].transpose(1, 0, 2)
    for row in rows[1:]:
        whole = _join(whole, row.transpose(1, 0, 2))
    return np.ascontiguousarray(whole.transpose(1, 0, 2)[:side])


def _piece(field: np.ndarray, height: int, rng: np.random.Generator) -> np.ndarray:
    """The field in one of its eight orientations, cut to the height at a random place."""
    if rng.integers(2):
        field = field.transpose(1, 0, 2)
    field = field[:: int(rng.choice([-1, 1])), :: int(rng.choice([-1, 1]))]
    top = int(rng.integers(len(field) - height + 1))
    return field[top : top + height]


def _join(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Both pictures side by side, OVERLAP px on each other, cut along the path where they differ least."""
    a, b = left[:, -OVERLAP:].astype(np.float32), right[:, :OVERLAP].astype(np.float32)
    coarse_a, coarse_b = (part[::SEAM_STEP, ::SEAM_STEP].sum(-1) for part in (a, b))
    dark = 2 * max(coarse_a.max(), coarse_b.max()) - coarse_a - coarse_b
    total = np.abs(coarse_a - coarse_b) + dark  # through plasma, not through red cells
    padded = np.full(total.shape[1] + 2, np.inf, np.float32)
    for y in range(1, len(total)):
        padded[1:-1] = total[y - 1]
        total[y] += np.minimum(np.minimum(padded[:-2], padded[1:-1]), padded[2:])
    path = np.empty(len(total), int)
    path[-1] = total[-1].argmin()
    for y in range(len(total) - 2, -1, -1):
        low = max(path[y + 1] - 1, 0)
        path[y] = low + total[y, low : path[y + 1] + 2].argmin()
    seam = np.interp(np.arange(len(a)), np.arange(len(path)) * SEAM_STEP, (path + 0.5) * SEAM_STEP)
    alpha = np.clip((np.arange(OVERLAP) - seam[:, None]) / 4 + 0.5, 0, 1)[..., None].astype(np.float32)
    blended = (a * (1 - alpha) + b * alpha + 0.5).astype(np.uint8)
    return np.concatenate([left[:, :-OVERLAP], blended, right[:, OVERLAP:]], axis=1)


def to_density(rgb: np.ndarray, background: np.ndarray) -> np.ndarray:
    """float32[H,W,3] optical density of a picture (uint8 or float, 0..255) over a background float[3]."""
    return np.log((background + 1) / (rgb.astype(np.float32) + 1), dtype=np.float32)


def render(density: np.ndarray, background: np.ndarray) -> np.ndarray:
    """uint8[H,W,3], the inverse of `to_density`."""
    return np.clip((background + 1) * np.exp(-density) - 0.5, 0, 255).astype(np.uint8)
