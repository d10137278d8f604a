"""White and red cells of a slide: candidates by slide-wide stain statistics, outlines by `segment` in a window each.

Nothing here depends on where a tile begins: the stain is measured once per slide, every candidate is outlined in a
window centred on itself, and a cell belongs to the tile that holds the centre of its box. So cells on a seam are found
once, and another grid finds the same cells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image
from scipy import ndimage
from skimage.filters import threshold_otsu
from skimage.measure import label

from data_prep import crops, segment
from data_prep.schema import Box

HALO_UM = 36.0  # pixels around a tile: half a window beyond the candidates that may own a cell of the tile
WINDOW_UM = 20.0  # half a window: a white cell's outline with its neighbours
REACH_UM = 15.0  # a candidate this far outside a tile may be a lobe of a cell inside it
NUCLEUS_AREA_UM2 = (14.0, 450.0)  # below are platelets, above are clumps and smudges
CELL_SIDE_UM = (6.5, 40.0)
LOBE_GAP_UM = 2.5  # stained parts nearer than this are one candidate
RED_DIAMETER_UM = 7.5
FEW_PIXELS = 200  # say nothing of a slide
COLOURLESS = 6.0  # grey levels between the channels of a dark pixel; stained ones have 30 and more
CONTRAST_BOUNDS = (0.30, 0.58)  # of the threshold on nuclear contrast
UNSCANNED = (1, 254)  # grey levels up to and from which a channel is what readers put where nothing was scanned
UNSCANNED_PX = 64  # side of a square of nothing else: more than the glass between cells


@dataclasses.dataclass(frozen=True, slots=True)
class Stain:
    """What the samples of a slide say: background colour, nuclear threshold, density at which a cell begins."""

    background: tuple[float, float, float]
    nuclear: float
    cell: float


@dataclasses.dataclass(frozen=True, slots=True)
class FoundCell:
    """A white cell; `box` in level-0 pixels of the slide."""

    box: Box
    nucleus_um2: float


@dataclasses.dataclass(frozen=True, slots=True)
class Halved:
    """A picture at half its resolution, as the slide's stain reads it.

    grey: float32[h, w] mean of the channels, total: float32[h, w] optical density of all three, nuclear: bool[h, w]
    where the stain is a nucleus's.
    """

    grey: np.ndarray
    total: np.ndarray
    nuclear: np.ndarray
    stain: Stain

    def part(self, box: Box) -> Halved:
        """What lies in `box`, in pixels of the whole picture; its left and upper edge are even."""
        place = np.s_[box.top // 2 : box.bottom // 2, box.left // 2 : box.right // 2]
        # Copies: a view's mean is summed in another order than the same pixels read alone.
        return Halved(self.grey[place].copy(), self.total[place].copy(), self.nuclear[place].copy(), self.stain)


# (rgb with halo, the same halved, mpp, core) -> the white cells of core, boxes in pixels of rgb
Finder = Callable[[np.ndarray, Halved, float, Box], list[FoundCell]]


@dataclasses.dataclass(frozen=True, slots=True)
class RedCells:
    """Red cells of one tile: their centres (x, y) in pixels of the picture, median diameter in um (nan for none)."""

    centres: np.ndarray
    diameter_um: float


def halo(mpp: float) -> int:
    """Pixels to read around a tile; even, so that half-resolution pixels of all tiles fall together."""
    return 2 * round(HALO_UM / mpp / 2)


def colourless(samples: Sequence[np.ndarray]) -> bool:
    """Whether the dark pixels of pictures uint8[h, w, 3], which stain would have coloured, are grey."""
    pixels = _scanned(samples, 4)
    green = pixels[:, 1]
    if green.min() == green.max():
        return False  # blank, which is another verdict
    return float(np.median(np.ptp(pixels[green <= threshold_otsu(green)], axis=1))) < COLOURLESS


def measure_stain(samples: Sequence[np.ndarray]) -> Stain:
    """Stain statistics over pictures uint8[h, w, 3] from all over a slide (blank and unscanned ones do no harm)."""
    pixels = _scanned(samples, 2).astype(np.float32)
    green = pixels[:, 1]
    bright = green >= (threshold_otsu(green) if green.min() < green.max() else 0)
    background = np.median(pixels[bright], axis=0)
    density = np.log((background + 1) / (np.minimum(pixels, background) + 1))
    total = density.sum(1)
    stained = total > 0.2
    if stained.sum() < FEW_PIXELS:
        return Stain(_rgb(background), CONTRAST_BOUNDS[0], 0.15)
    contrast = _contrast(*density[stained].T)
    middle = float(np.median(contrast))
    spread = 1.4826 * float(np.median(np.abs(contrast - middle)))
    nuclear = float(np.clip(middle + 4 * spread + 0.05, *CONTRAST_BOUNDS))
    return Stain(_rgb(background), nuclear, float(np.clip(0.3 * np.median(total[stained]), 0.1, 0.3)))


def _scanned(samples: Sequence[np.ndarray], step: int) -> np.ndarray:
    """uint8[n, 3], every `step`-th pixel, without the white or black that stands where nothing was scanned: the white would
    pass for the glass, and the glass for stain. All pixels where nearly nothing else is there."""
    thinned = [sample[::step, ::step] for sample in samples]
    pixels = np.concatenate([sample.reshape(-1, 3) for sample in thinned])
    left = pixels[~np.concatenate([_unscanned(sample, UNSCANNED_PX // step + 1).ravel() for sample in thinned])]
    return left if len(left) >= FEW_PIXELS else pixels


def _unscanned(rgb: np.ndarray, side: int) -> np.ndarray:
    """bool[h, w]: squares of `side` pixels, an odd number, that are all white or all black."""
    low, high = UNSCANNED
    filled = np.all((rgb >= high) | (rgb <= low), axis=-1)
    if not filled.any():
        return filled
    return ndimage.maximum_filter(ndimage.minimum_filter(filled, side), side)


def _rgb(colour: np.ndarray) -> tuple[float, float, float]:
    return (round(float(colour[0]), 3), round(float(colour[1]), 3), round(float(colour[2]), 3))


def _contrast(red: np.ndarray, green: np.ndarray, blue: np.ndarray) -> np.ndarray:
    """Nuclear stain absorbs green and red, hardly blue (as in `segment`)."""
    return green + 0.5 * red - blue


def halve(rgb: np.ndarray, stain: Stain) -> Halved:
    """uint8[h, w, 3] at half resolution, means of 2 x 2 pixels rounded; density is against the slide's background."""
    h, w = rgb.shape[0] // 2 * 2, rgb.shape[1] // 2 * 2
    small = Image.fromarray(rgb[:h, :w]).reduce(2)
    planes = [np.asarray(channel) for channel in small.split()]
    levels = np.arange(256, dtype=np.float32)
    red, green, blue = (
        np.log((background + 1) / (np.minimum(levels, background) + 1)).astype(np.float32).take(plane, mode="clip")
        for plane, background in zip(planes, stain.background, strict=True)
    )
    nuclear = _contrast(red, green, blue) > stain.nuclear
    grey = (planes[0].astype(np.float32) + planes[1] + planes[2]) / np.float32(3)
    return Halved(grey, red + green + blue, nuclear, stain)


def grow(mask: np.ndarray, times: int = 1) -> np.ndarray:
    """Dilation of bool[h, w] by a cross, as scipy's binary_dilation, which takes forty times as long."""
    for _ in range(times):
        grown = mask.copy()
        grown[1:] |= mask[:-1]
        grown[:-1] |= mask[1:]
        grown[:, 1:] |= mask[:, :-1]
        grown[:, :-1] |= mask[:, 1:]
        mask = grown
    return mask


def shrink(mask: np.ndarray) -> np.ndarray:
    """Erosion of bool[h, w] by a cross, as scipy's binary_erosion: the outermost pixels go."""
    shrunk = np.zeros_like(mask)
    inner = mask[1:-1, 1:-1]
    shrunk[1:-1, 1:-1] = inner & mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
    return shrunk


def candidates_near(half: Halved, mpp: float, core: Box) -> list[tuple[float, float, float]]:
    """(x, y, nucleus um2) of stained bodies that may be nuclei of cells of `core`, in full-resolution pixels, largest
    first."""
    pixel = 2 * mpp  # um
    stained = grow(shrink(half.nuclear))
    if not stained.any():
        return []
    groups = label(grow(stained, max(1, round(LOBE_GAP_UM / pixel / 2)))) * stained
    areas = np.bincount(groups.ravel()) * pixel**2
    low, high = NUCLEUS_AREA_UM2
    reach = REACH_UM / mpp
    found = []
    for k, place in enumerate(ndimage.find_objects(groups), 1):
        if place is None or not low <= areas[k] <= high:
            continue
        rows, columns = place
        x, y = float(columns.start + columns.stop), float(rows.start + rows.stop)  # halves cancel: at full resolution
        if core.left - reach <= x < core.right + reach and core.top - reach <= y < core.bottom + reach:
            found.append((x, y, float(areas[k])))
    return sorted(found, key=lambda c: (-c[2], c[1], c[0]))


def white_cells(rgb: np.ndarray, half: Halved, mpp: float, core: Box) -> list[FoundCell]:
    """The white cells whose centre lies in `core`; boxes in pixels of `rgb`.

    Args:
        rgb: uint8[h, w, 3], the tile with its halo.
        half: the same, halved.
    """
    window = 2 * round(WINDOW_UM / mpp / 2)
    found: list[FoundCell] = []
    for x, y, area in candidates_near(half, mpp, core):
        box = _outline(rgb, round(x), round(y), window, half.stain.nuclear)
        if box is None or not CELL_SIDE_UM[0] <= max(box.width, box.height) * mpp <= CELL_SIDE_UM[1]:
            continue
        if not any(_same(box, other.box) for other in found):
            found.append(FoundCell(box, area))
    return [cell for cell in found if owns(core, cell.box)]


def _outline(rgb: np.ndarray, x: int, y: int, half: int, nuclear: float) -> Box | None:
    """Box of the cell whose nucleus, as stained as `nuclear`, covers (x, y) or lies nearest to it within a quarter of the
    window."""
    left, top = max(x - half, 0), max(y - half, 0)
    window = rgb[top : y + half, left : x + half]
    cell = segment.cell_at(window, x - left, y - top, nuclear)
    if cell is None:
        return None
    box = cell.box
    return Box(box.left + left, box.top + top, box.right + left, box.bottom + top)


def _same(a: Box, b: Box) -> bool:
    """Two outlines of one cell: more than half of the smaller lies in the other."""
    shared = Box(max(a.left, b.left), max(a.top, b.top), min(a.right, b.right), min(a.bottom, b.bottom))
    return shared.width > 0 and shared.height > 0 and shared.area > 0.5 * min(a.area, b.area)


def owns(core: Box, box: Box) -> bool:
    """Whether the centre of `box` lies in `core`, left and top edge included."""
    x, y = box.left + box.right, box.top + box.bottom
    return 2 * core.left <= x < 2 * core.right and 2 * core.top <= y < 2 * core.bottom


def red_cells(half: Halved, mpp: float) -> RedCells:
    """Red cells of a picture: blobs of their size, touching ones apart."""
    pixel = 4 * mpp  # a quarter of the resolution is enough for bodies of 7 um
    cells, nuclei = (_mostly(mask) for mask in (half.total > half.stain.cell, half.nuclear))
    holes, count = ndimage.label(~cells)
    if count:
        small = np.bincount(holes.ravel()) * pixel**2 < 0.45 * np.pi / 4 * RED_DIAMETER_UM**2  # pale centres
        small[0] = False
        cells |= small[holes]
    cells &= ~grow(nuclei, max(1, round(2.5 / pixel)))
    radius = RED_DIAMETER_UM / 2 / pixel
    scale = 0.6 * radius
    blobs = -ndimage.gaussian_laplace(cells.astype(np.float32), scale) * scale**2
    peaks = _peaks(blobs, max(1, round(0.6 * radius)), 0.2)
    depth = _depths(cells, peaks, round(RED_DIAMETER_UM / pixel))
    whole = depth > 0.35 * radius  # platelets are flatter
    if not whole.any():
        return RedCells(np.zeros((0, 2)), float("nan"))
    return RedCells(peaks[whole, ::-1] * 4.0 + 2, round(2 * float(np.median(depth[whole])) * pixel, 3))


def _peaks(height: np.ndarray, distance: int, least: float) -> np.ndarray:
    """int[n, 2] rows and columns above `least` that are the highest within `distance`, of equal ones the first; as
    skimage's peak_local_max, which takes three times as long."""
    ranked = height - 1e-9 * np.arange(height.size).reshape(height.shape)
    return np.argwhere((ranked == ndimage.maximum_filter(ranked, 2 * distance + 1, mode="nearest")) & (height > least))


def _depths(mask: np.ndarray, places: np.ndarray, most: int) -> np.ndarray:
    """Distance of places int[n, 2] from the nearest unset pixel, up to `most`; as distance_transform_edt, which takes
    several times as long for the whole mask."""
    around = np.mgrid[-most : most + 1, -most : most + 1].reshape(2, -1)
    distance = np.hypot(*around)
    order = np.argsort(distance, kind="stable")[: np.count_nonzero(distance <= most)]
    padded = np.pad(mask, most, constant_values=True)
    width = padded.shape[1]
    centres = (places[:, 0] + most) * width + places[:, 1] + most
    set_there = padded.ravel()[centres[:, None] + (around[0] * width + around[1])[order]]
    return np.where(set_there.all(1), most, distance[order][set_there.argmin(1)])


def _mostly(mask: np.ndarray) -> np.ndarray:
    """bool[h/2, w/2] where at least two of 2 x 2 pixels are set."""
    h, w = mask.shape[0] // 2 * 2, mask.shape[1] // 2 * 2
    parts = mask[:h, :w].view(np.uint8)
    return parts[::2, ::2] + parts[1::2, ::2] + parts[::2, 1::2] + parts[1::2, 1::2] >= 2


def crop(rgb: np.ndarray, box: Box) -> Image.Image:
    """The square crop of a cell, by the one geometry of the project, from the pixels around it."""
    window = crops.crop_window(box)
    left, top = max(window.left, 0), max(window.top, 0)
    part = Image.fromarray(rgb[top : window.bottom, left : window.right])
    return crops.context_crop(part, Box(box.left - left, box.top - top, box.right - left, box.bottom - top))
