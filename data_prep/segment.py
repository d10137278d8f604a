"""Classical white-cell finder: stained nuclei by optical density, then one smooth outline per cell around them.

White cells are what absorbs red and green but hardly blue light; red cells absorb blue too, in a colour that each image
supplies itself (its pixels away from nuclei). The outline is star-shaped around the nucleus and is the best closed path
in polar coordinates: inside should be nucleus or cytoplasm, outside background or red cell. No weights, no network;
scale-free between about 30 and 400 px cell diameter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from PIL import Image
from scipy import ndimage
from skimage.filters import threshold_otsu
from skimage.measure import label

from data_prep.schema import Box

WORK_SIDE = 256  # longer side of the picture the finder works on
ANGLES, RADII = 72, 96  # polar grid of the outline search
SMALLEST_NUCLEUS = 60  # px at work size, about 9 px across: below are stain specks
NUCLEUS_DENSITY = (0.30, 0.75)  # bounds of the Otsu threshold on green minus blue density
LOBE_GAP = 0.25  # lobes nearer than this share of the largest one's diameter are one nucleus
STRANGE = (1.4, 0.8)  # Mahalanobis distance from the red cells' colour where the score is 0, and what makes it 1
DENSE = (0.12, 0.05)  # total density where the score is 0 (fainter is background), and what makes it 1
RED_CELL_DENSITY = 0.2
BEND = 0.4  # cost of one radius step between neighbouring angles, in units of score


@dataclasses.dataclass(frozen=True, slots=True)
class WhiteCell:
    """A found cell; boxes, areas and the outline (float[ANGLES, 2] rows and columns) in pixels of the given image."""

    box: Box
    nucleus_box: Box
    area: float
    nucleus_area: float
    on_border: bool
    outline: np.ndarray = dataclasses.field(compare=False, repr=False)


def optical_density(rgb: np.ndarray) -> np.ndarray:
    """float32[H,W,3] -log(I / background), >= 0. The background is the median of each channel's pixels brighter (in
    green) than Otsu's threshold."""
    pixels = rgb.astype(np.float32)
    green = rgb[..., 1]
    bright = green >= (threshold_otsu(green) if green.min() < green.max() else 0)
    background = np.median(pixels[bright], axis=0)
    return np.log((background + 1) / (np.minimum(pixels, background) + 1))


def _nuclei(density: np.ndarray, least: float) -> list[np.ndarray]:
    """Boolean masks of the nuclei (lobes grouped), largest first."""
    contrast = density[..., 1] + 0.5 * density[..., 0] - density[..., 2]
    threshold = float(np.clip(threshold_otsu(contrast), least, NUCLEUS_DENSITY[1]))
    stained = ndimage.binary_opening(contrast > threshold, iterations=1)
    lobes = label(stained)
    sizes = np.bincount(lobes.ravel())[1:]
    if not sizes.size or sizes.max() < SMALLEST_NUCLEUS:
        return []
    gap = LOBE_GAP * 2 * np.sqrt(sizes.max() / np.pi)
    groups = label(ndimage.distance_transform_edt(~stained) <= gap / 2)
    masks = [stained & (groups == k) for k in range(1, groups.max() + 1)]
    masks = [mask for mask in masks if mask.sum() >= SMALLEST_NUCLEUS]
    return sorted(masks, key=lambda mask: -int(mask.sum()))


def _cell_score(density: np.ndarray, nuclei: list[np.ndarray]) -> np.ndarray:
    """float64[H,W] in [-1, 1]: 1 where a pixel looks like nucleus or cytoplasm, -1 for background or red cell."""
    total = density.sum(-1)
    stained = np.any(nuclei, axis=0)
    score = np.clip((total - DENSE[0]) / DENSE[1], -1, 1)
    away = ndimage.distance_transform_edt(~stained) > 1.2 * np.sqrt(nuclei[0].sum() / np.pi) + 6
    red = away & (total > RED_CELL_DENSITY)
    if red.sum() > 200:
        colour = density[..., :2] / (total[..., None] + 0.1)
        offset = colour - np.median(colour[red], axis=0)
        spread = np.cov(offset[red].T) + 2e-4 * np.eye(2)
        distance = np.sqrt(np.einsum("hwi,ij,hwj->hw", offset, np.linalg.inv(spread), offset))
        score = np.minimum(score, np.clip((distance - STRANGE[0]) / STRANGE[1], -1, 1))
    return np.where(stained, 1.0, score)


def _closed_path(gain: np.ndarray, steps: int = 3) -> np.ndarray:
    """int[A]: for each angle the radius index of the best closed path. `gain`: float[A, R], what ending at that radius
    is worth. Dynamic programming, run twice round; the middle turn closes on itself."""
    angles, radii = gain.shape
    penalty = BEND * np.abs(np.arange(-steps, steps + 1))[:, None]
    column = np.arange(radii)
    neighbours = column + np.arange(2 * steps + 1)[:, None]
    padded = np.full(radii + 2 * steps, -np.inf)
    padded[steps:-steps] = gain[0]
    came = np.zeros((2 * angles, radii), int)
    for turn in range(1, 2 * angles):
        options = padded[neighbours] - penalty
        choice = options.argmax(0)
        came[turn] = column + choice - steps
        padded[steps:-steps] = options[choice, column] + gain[turn % angles]
    path = [int(padded[steps:-steps].argmax())]
    for turn in range(2 * angles - 1, 0, -1):
        path.append(int(came[turn, path[-1]]))
    half = angles // 2
    return np.roll(path[::-1][half : half + angles], half)


def _outline(score: np.ndarray, nucleus: np.ndarray) -> np.ndarray:
    """float[ANGLES, 2] (row, column) of the best closed star-shaped outline around a nucleus."""
    rows, columns = np.nonzero(nucleus)
    centre = np.array([(rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2])
    reach = np.hypot(rows - centre[0], columns - centre[1]).max()
    radii = np.linspace(0, 2.2 * reach + 12, RADII)
    angles = np.arange(ANGLES) * 2 * np.pi / ANGLES
    directions = np.stack([np.sin(angles), np.cos(angles)], -1)
    points = centre + radii[None, :, None] * directions[:, None, :]
    sampled = ndimage.map_coordinates(score, points.reshape(-1, 2).T, order=1, mode="constant", cval=-0.2)
    chosen = _closed_path(np.cumsum(sampled.reshape(ANGLES, RADII), axis=1))
    return centre + radii[chosen][:, None] * directions


def find_white_cells(rgb: np.ndarray, smallest_share: float = 0.12) -> list[WhiteCell]:
    """White cells of a smear picture, largest nucleus first.

    Args:
        rgb: uint8[H, W, 3].
        smallest_share: drops stained bodies (platelets) with less than this share of the largest nucleus's area.

    Returns:
        Cells whose box spans the whole cell, cytoplasm included, clipped to the image; empty if none is found.
    """
    work = _prepare(rgb)
    if not work.nuclei:
        return []
    largest = work.nuclei[0].sum()
    return [work.cell(nucleus) for nucleus in work.nuclei if nucleus.sum() >= smallest_share * largest]


def _prepare(rgb: np.ndarray, least: float = NUCLEUS_DENSITY[0]) -> _Work:
    height, width = rgb.shape[:2]
    scale = min(1.0, WORK_SIDE / max(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    small = np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BOX))
    density = ndimage.gaussian_filter(optical_density(small), (1.2, 1.2, 0))
    nuclei = _nuclei(density, least)
    if not nuclei:
        return _Work(scale, [], np.zeros(0), np.zeros(0))
    return _Work(scale, nuclei, _cell_score(density, nuclei), np.any(nuclei, axis=0))


@dataclasses.dataclass(frozen=True, slots=True)
class _Work:
    """A picture at work size: its nuclei, largest first, the score of each pixel, and where any nucleus is."""

    scale: float
    nuclei: list[np.ndarray]
    score: np.ndarray
    stained: np.ndarray

    def cell(self, nucleus: np.ndarray) -> WhiteCell:
        own = np.where(self.stained & ~nucleus, -1, self.score)  # a neighbour's nucleus is never inside
        return _measure(_outline(own, nucleus), nucleus, self.scale)


def _measure(outline: np.ndarray, nucleus: np.ndarray, scale: float) -> WhiteCell:
    rows, columns = np.nonzero(nucleus)
    nucleus_low, nucleus_high = np.array([rows.min(), columns.min()]), np.array([rows.max(), columns.max()]) + 1
    shape = np.array(nucleus.shape)
    low = np.clip(np.minimum(outline.min(0), nucleus_low), 0, shape)
    high = np.clip(np.maximum(outline.max(0), nucleus_high), 0, shape)
    y, x = outline.T
    area = 0.5 * abs(float(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1))))
    return WhiteCell(
        box=_box(low, high, scale),
        nucleus_box=_box(nucleus_low, nucleus_high, scale),
        area=area / scale**2,
        nucleus_area=float(nucleus.sum()) / scale**2,
        on_border=bool((low <= 0.5).any() or (high >= shape - 0.5).any()),
        outline=outline / scale,
    )


def _box(low: np.ndarray, high: np.ndarray, scale: float) -> Box:
    top, left = np.floor(low / scale).astype(int)
    bottom, right = np.ceil(high / scale).astype(int)
    return Box(int(left), int(top), int(right), int(bottom))


def central_cell(rgb: np.ndarray) -> WhiteCell | None:
    """The cell a single-cell picture shows: the largest one over the picture's centre, else the one nearest to it
    within a quarter of the shorter side; None if there is none. Platelets count (they may be what is shown)."""
    height, width = rgb.shape[:2]

    def distance(cell: WhiteCell) -> float:
        right = max(cell.box.left - width / 2, width / 2 - cell.box.right, 0)
        down = max(cell.box.top - height / 2, height / 2 - cell.box.bottom, 0)
        return float(np.hypot(right, down))

    cells = sorted(find_white_cells(rgb, smallest_share=0), key=lambda cell: (distance(cell), -cell.area))
    return cells[0] if cells and distance(cells[0]) <= min(height, width) / 4 else None


def cell_at(rgb: np.ndarray, x: float, y: float, nuclear: float = 0.0) -> WhiteCell | None:
    """The cell whose nucleus's box covers (x, y) or lies nearest to it, within an eighth of the shorter side; else
    None. Nothing is too small: the caller knows the scale. nuclear: what the picture's whole slide says is a nucleus's
    stain at least; among deeply stained red cells one window cannot tell."""
    work = _prepare(rgb, max(nuclear, NUCLEUS_DENSITY[0]))
    best, nearest = None, min(rgb.shape[:2]) / 8 * work.scale
    for nucleus in work.nuclei:
        rows, columns = np.flatnonzero(nucleus.any(1)), np.flatnonzero(nucleus.any(0))
        right = max(columns[0] - x * work.scale, x * work.scale - columns[-1] - 1, 0)
        down = max(rows[0] - y * work.scale, y * work.scale - rows[-1] - 1, 0)
        if (distance := float(np.hypot(right, down))) < nearest or (best is None and distance == nearest):
            best, nearest = nucleus, distance
    return None if best is None else work.cell(best)
