"""Drawing of one synthetic cell: soft-edged level sets in numpy, so that shapes are anti-aliased without supersampling.

A level is float32[h, w], the distance in pixels to a shape's edge, positive inside. Colours are RGB in 0..1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy import ndimage

from data_prep.schema import Box

SIDE = 256
RED_CELL_RADIUS = 27.0
CELL_RADIUS = {"small": (36.0, 43.0), "big": (50.0, 60.0)}
NUCLEUS_SHARE = {"low": 0.70, "high": 0.90}  # nuclear radius over cell radius
CYTOPLASM = {
    "light blue": (0.88, 0.85, 0.92),
    "blue": (0.58, 0.62, 0.86),
    "purple blue": (0.60, 0.50, 0.78),
}
CHROMATIN = {"densely": (0.24, 0.14, 0.44), "loosely": (0.42, 0.28, 0.60)}
GRANULE_COLOUR = {"pink": (0.80, 0.52, 0.66), "red": (0.80, 0.40, 0.42), "purple": (0.25, 0.10, 0.42)}
# radius in px, share of the cytoplasm covered, opacity, whether they lie over the nucleus too
GRANULES = {"small": (0.9, 0.25, 0.75, False), "round": (2.6, 0.85, 0.85, False), "coarse": (3.0, 0.65, 0.9, True)}


@dataclasses.dataclass(frozen=True)
class Window:
    """A square part of the picture with coordinates x, y float32[h, w] relative to the shape's centre."""

    rows: slice
    columns: slice
    x: np.ndarray
    y: np.ndarray


def draw(attributes: Mapping[str, str], rng: np.random.Generator) -> tuple[np.ndarray, Box]:
    """uint8[SIDE, SIDE, 3] and the box of the white cell, drawn as the attributes say; stain and focus vary."""
    picture = np.empty((SIDE, SIDE, 3), np.float32)
    picture[:] = np.array((0.985, 0.91, 0.82)) + rng.normal(0, 0.012, 3)
    centre = SIDE / 2 + rng.uniform(-12, 12, 2)
    radius = rng.uniform(*CELL_RADIUS[attributes["cell_size"]])
    _red_cells(picture, centre, radius, rng)
    box = white_cell(picture, centre, radius, attributes, rng)
    return _photograph(picture, rng), box


def _window(centre: np.ndarray, half: float) -> Window:
    """Clipped to the picture; `centre` is (x, y)."""
    low = np.clip(np.floor(centre - half), 0, SIDE).astype(int)
    high = np.clip(np.ceil(centre + half), 0, SIDE).astype(int)
    x = np.arange(low[0], high[0], dtype=np.float32) - np.float32(centre[0])
    y = np.arange(low[1], high[1], dtype=np.float32) - np.float32(centre[1])
    return Window(slice(low[1], high[1]), slice(low[0], high[0]), *np.meshgrid(x, y))


def coverage(level: np.ndarray, softness: float = 1.5) -> np.ndarray:
    """Opacity of a level: 0.5 on the edge, rising over `softness` px."""
    return np.clip(level / softness + 0.5, 0.0, 1.0)


def _paint(area: np.ndarray, colour: np.ndarray | tuple[float, ...], alpha: np.ndarray) -> None:
    """`colour` over `area` [h, w, 3] in place."""
    area += alpha[..., None] * (np.asarray(colour, np.float32) - area)


def blob(x: np.ndarray, y: np.ndarray, radius: float, wobble: float, rng: np.random.Generator) -> np.ndarray:
    """A circle whose radius varies with the angle by up to about `wobble` (relative)."""
    angle = np.arctan2(y, x)
    edge = np.ones_like(x)
    for order in range(2, 6):
        edge += rng.normal(0, wobble / order) * np.cos(order * angle + np.float32(rng.uniform(0, 2 * np.pi)))
    return radius * edge - np.hypot(x, y)


def _arc(x: np.ndarray, y: np.ndarray, radius: float, span: float, width: float | np.ndarray) -> np.ndarray:
    """A bent band: all points within `width` of the circular arc of `radius` and half angle `span`."""
    angle = np.clip(np.arctan2(y, x), -span, span)
    return width - np.hypot(x - radius * np.cos(angle), y - radius * np.sin(angle))


def noise(shape: tuple[int, ...], grain: float, rng: np.random.Generator) -> np.ndarray:
    """Smooth noise of unit variance; `grain` is the sigma in pixels."""
    field = ndimage.gaussian_filter(rng.standard_normal(shape, np.float32), grain)
    return field / field.std()


def _red_cells(picture: np.ndarray, centre: np.ndarray, radius: float, rng: np.random.Generator) -> None:
    """Discs with central pallor that mostly keep clear of each other and of the white cell; a platelet or two."""
    placed: list[np.ndarray] = []
    pallor, crowding = rng.uniform(0.1, 0.9), rng.uniform(1.5, 2.1)
    for _ in range(int(rng.integers(20, 45))):
        spot = rng.uniform(-20, SIDE + 20, 2)
        size = RED_CELL_RADIUS * rng.uniform(0.85, 1.12)
        if np.hypot(*(spot - centre)) < radius + size * 1.02:
            continue
        if any(np.hypot(*(spot - other)) < crowding * RED_CELL_RADIUS for other in placed):
            continue
        placed.append(spot)
        window = _window(spot, size * 1.4)
        if window.x.size:
            stretch = rng.uniform(0.9, 1.1)
            level = blob(window.x * stretch, window.y / stretch, size, 0.06, rng)
            depth = np.clip(1 - level / size, 0, 1)  # 0 in the middle, 1 at the edge
            hollow = pallor * np.exp(-((depth / 0.42) ** 2))
            alpha = coverage(level) * (0.92 - 0.75 * hollow)
            _paint(picture[window.rows, window.columns], (0.80, 0.65, 0.63), alpha)
    for _ in range(int(rng.integers(0, 3))):
        spot = rng.uniform(0, SIDE, 2)
        if np.hypot(*(spot - centre)) > radius + 14:
            window = _window(spot, 12)
            level = blob(window.x, window.y, rng.uniform(4, 8), 0.25, rng)
            _paint(picture[window.rows, window.columns], (0.52, 0.36, 0.62), 0.85 * coverage(level, 2.5))


def _nucleus(shape: str, x: np.ndarray, y: np.ndarray, radius: float, rng: np.random.Generator) -> np.ndarray:
    """Level of a nucleus; `radius` is that of a round nucleus in the same cell, [x, y] already turned at random."""
    match shape:
        case "unsegmented-round":
            return blob(x, y, radius, 0.04, rng)
        case "irregular":
            return blob(x, y, radius * 0.95, 0.30, rng)
        case "unsegmented-indented":
            notch = np.hypot(x - radius * rng.uniform(1.0, 1.15), y) - radius * rng.uniform(0.65, 0.75)
            return np.minimum(blob(x, y, radius * 1.05, 0.05, rng), notch)
        case "unsegmented-band":
            wavy = 1 + 0.12 * np.sin(x / radius * 3 + np.float32(rng.uniform(0, 6)))
            return _arc(x + 0.25 * radius, y, radius * 0.80, rng.uniform(1.5, 2.1), radius * 0.30 * wavy)
        case "segmented-bilobed":
            spots, lobe = [(-0.66, 0.0), (0.66, 0.0)], 0.60
            bridge = radius * 0.12 - np.hypot(np.maximum(np.abs(x) - 0.66 * radius, 0), y)
        case "segmented-multilobed":
            count = int(rng.integers(3, 6))
            span = 0.55 + 0.40 * count
            spots = [(0.82 * np.cos(a), 0.82 * np.sin(a)) for a in np.linspace(-span, span, count)]
            lobe = 0.42 if count < 5 else 0.36
            bridge = _arc(x, y, 0.82 * radius, span, 0.08 * radius)
        case _:
            raise ValueError(f"nucleus shape {shape} cannot be drawn")
    for dx, dy in spots:
        size = radius * lobe * rng.uniform(0.9, 1.1)
        bridge = np.maximum(bridge, blob(x - dx * radius, y - dy * radius, size, 0.10, rng))
    return bridge


def white_cell(
    picture: np.ndarray, centre: np.ndarray, radius: float, attributes: Mapping[str, str], rng: np.random.Generator
) -> Box:
    """Paints one white cell at `centre` (x, y) over a picture float32[SIDE, SIDE, 3] in place; returns its box."""
    window = _window(centre, radius * 1.6)
    area = picture[window.rows, window.columns]
    wobble = {"round": 0.03, "irregular": 0.22}[attributes["cell_shape"]]
    cell = blob(window.x, window.y, radius, wobble, rng)
    inside = coverage(cell)
    frosted = attributes["cytoplasm_texture"] == "frosted"
    colour = np.array(CYTOPLASM[attributes["cytoplasm_colour"]], np.float32) + rng.normal(0, 0.012, 3)
    grain = 0.065 * noise(cell.shape, 1.1, rng) if frosted else 0.012 * noise(cell.shape, 3.0, rng)
    rim = 0.10 * np.exp(-np.clip(cell, 0, None) / 2.5)  # the membrane looks darker
    _paint(area, np.clip(colour + (grain - rim)[..., None], 0, 1).astype(np.float32), inside)

    turn = np.float32(rng.uniform(0, 2 * np.pi))
    shift = radius * rng.uniform(-0.06, 0.06, 2)
    x, y = window.x - np.float32(shift[0]), window.y - np.float32(shift[1])
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    share = NUCLEUS_SHARE[attributes["nuclear_cytoplasmic_ratio"]] * rng.uniform(0.95, 1.03)
    nucleus = np.minimum(_nucleus(attributes["nucleus_shape"], u, v, radius * share, rng), cell - 1.5)
    if attributes["cytoplasm_vacuole"] == "yes":
        _vacuoles(area, window, np.minimum(-nucleus, cell), radius, rng)
    _chromatin(area, nucleus, attributes["chromatin_density"], rng)
    if attributes["granularity"] == "yes":
        _granules(area, cell, nucleus, attributes, rng)
    rows, columns = np.flatnonzero((cell > 0).any(1)), np.flatnonzero((cell > 0).any(0))
    top, left = window.rows.start, window.columns.start
    return Box(*(int(n) for n in (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1)))


def _chromatin(area: np.ndarray, nucleus: np.ndarray, density: str, rng: np.random.Generator) -> None:
    clumps, lace = noise(nucleus.shape, 2.6, rng), noise(nucleus.shape, 1.2, rng)
    texture = 0.035 * clumps if density == "densely" else 0.07 * lace + 0.04 * clumps
    edge = 0.06 * np.exp(-np.clip(nucleus, 0, None) / 2.0)
    colour = np.array(CHROMATIN[density], np.float32) + rng.normal(0, 0.012, 3)
    _paint(area, np.clip(colour + (texture - edge)[..., None], 0, 1).astype(np.float32), coverage(nucleus))


def _vacuoles(area: np.ndarray, window: Window, cytoplasm: np.ndarray, radius: float, rng: np.random.Generator) -> None:
    """Four to nine pale holes where the cytoplasm is wide enough."""
    candidates = np.argwhere(cytoplasm > 3.0)
    for k in rng.integers(0, len(candidates), int(rng.integers(4, 10))) if len(candidates) else ():
        row, column = candidates[k]
        level = radius * rng.uniform(0.05, 0.08) - np.hypot(
            window.x - window.x[row, column], window.y - window.y[row, column]
        )
        _paint(area, (0.96, 0.92, 0.94), 0.9 * coverage(np.minimum(level, cytoplasm)))


def _granules(
    area: np.ndarray, cell: np.ndarray, nucleus: np.ndarray, attributes: Mapping[str, str], rng: np.random.Generator
) -> None:
    """Discs at jittered points of a brick grid: each pixel needs the distance to the point of its own square only."""
    radius, covered, opacity, over_nucleus = GRANULES[attributes["granule_type"]]
    pitch = radius * 2.3
    height, width = cell.shape
    rows, columns = int(height / pitch) + 2, int(width / pitch) + 2
    points = rng.uniform(0.28, 0.72, (rows, columns, 2)).astype(np.float32)
    sizes = np.where(rng.random((rows, columns)) < covered, rng.uniform(0.8, 1.15, (rows, columns)), 0) * radius
    r, c = np.mgrid[0:height, 0:width].astype(np.float32) / np.float32(pitch)
    i = r.astype(int)
    c += 0.5 * (i % 2)
    j = c.astype(int)
    distance = pitch * np.hypot(r - i - points[i, j, 0], c - j - points[i, j, 1])
    level = sizes[i, j] - distance
    room = cell - radius if over_nucleus else np.minimum(cell - radius, -nucleus - 0.5)
    alpha = opacity * coverage(level, 1.2) * coverage(room, 2.0) * (sizes[i, j] > 0)
    shade = rng.normal(0, 0.04, (rows, columns, 1)).astype(np.float32)[i, j]
    _paint(area, np.clip(np.array(GRANULE_COLOUR[attributes["granule_colour"]], np.float32) + shade, 0, 1), alpha)


def _photograph(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Stain, light and focus of the microscope: saturation, channel gains, a slope of light, blur and sensor noise."""
    grey = picture.mean(2, keepdims=True)
    picture = grey + (picture - grey) * np.float32(rng.uniform(0.8, 1.2))
    slope = np.linspace(-1, 1, SIDE, dtype=np.float32)
    light = 1 + rng.normal(0, 0.015) * slope[:, None] + rng.normal(0, 0.015) * slope[None, :]
    gains = (1 + rng.normal(0, 0.012, 3)) * rng.uniform(0.93, 1.02)
    picture *= light[..., None].astype(np.float32) * gains.astype(np.float32)
    blur = rng.uniform(0.3, 1.3)
    picture = ndimage.gaussian_filter(picture, (blur, blur, 0), truncate=3.0)
    picture += rng.standard_normal((SIDE, SIDE, 1), np.float32) * np.float32(rng.uniform(0.004, 0.012))
    return (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)
