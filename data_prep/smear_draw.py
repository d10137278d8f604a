"""Drawing of a synthetic smear: red cells of one stain, white cells of `synthetic_draw`, platelets, dirt and the regions
in which a real smear cannot be read. Pictures with right answers for tests and the demo, not a model of blood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from data_prep.schema import Box
from data_prep.synthetic import sample_attributes
from data_prep.synthetic_draw import CELL_RADIUS, RED_CELL_RADIUS, SIDE, blob, coverage, white_cell

SCALE = 0.78  # of synthetic_draw's pixels: the median white cell comes out about 70 px wide
RED_RADIUS = RED_CELL_RADIUS * SCALE
MPP = 0.18  # nominal: a red cell of 7.5 um
SPRITES = 48  # different red cells in a smear
KINDS = ("crowded", "empty", "out of focus", "feathered edge")


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Where a smear cannot be read, and why (one of KINDS)."""

    kind: str
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedCell:
    """A white cell in the smear; box in its pixels."""

    label: str
    attributes: dict[str, str]
    box: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Sprite:
    """Premultiplied colour float32[h, w, 3] and opacity float32[h, w]."""

    colour: np.ndarray
    alpha: np.ndarray

    def turned(self, k: int) -> Sprite:
        """One of eight: rotated by quarter turns, mirrored from 4 on."""
        parts = [np.rot90(part, k % 4) for part in (self.colour, self.alpha)]
        parts = [part[:, ::-1] for part in parts] if k >= 4 else parts
        return Sprite(parts[0], parts[1])


def stamp(canvas: np.ndarray, sprite: Sprite, x: float, y: float) -> tuple[int, int]:
    """Lays a sprite centred at (x, y) over float32[H, W, 3] in place, cut at the edges; returns its left and top."""
    height, width = sprite.alpha.shape
    left, top = round(x - width / 2), round(y - height / 2)
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + width, canvas.shape[1]), min(top + height, canvas.shape[0])
    if x1 > x0 and y1 > y0:
        part = np.s_[y0 - top : y1 - top, x0 - left : x1 - left]
        area = canvas[y0:y1, x0:x1]
        area *= 1 - sprite.alpha[part][..., None]
        area += sprite.colour[part]
    return left, top


def red_sprites(rng: np.random.Generator) -> list[Sprite]:
    """The red cells of one smear: one stain, one range of pallor, varying size and outline."""
    half = round(RED_RADIUS * 1.45)
    y, x = np.mgrid[-half : half + 1, -half : half + 1].astype(np.float32)
    tint = np.array((0.80, 0.62, 0.62), np.float32) + rng.normal(0, 0.02, 3).astype(np.float32)
    pallor = rng.uniform(0.2, 0.8)
    sprites = []
    for _ in range(SPRITES):
        size = RED_RADIUS * rng.uniform(0.86, 1.12)
        stretch = rng.uniform(0.92, 1.09)
        level = blob(x * stretch, y / stretch, size, 0.05, rng)
        depth = np.clip(1 - level / size, 0, 1)  # 0 in the middle, 1 at the edge
        alpha = coverage(level) * (0.92 - 0.7 * pallor * rng.uniform(0.7, 1.2) * np.exp(-((depth / 0.42) ** 2)))
        sprites.append(Sprite((alpha[..., None] * tint).astype(np.float32), alpha.astype(np.float32)))
    return sprites


def white_sprite(label: str, rng: np.random.Generator) -> tuple[Sprite, Box, dict[str, str]]:
    """A white cell at smear scale with its box within the sprite. Painted on black and on white: the difference is its
    opacity."""
    attributes = sample_attributes(label, rng)
    radius = rng.uniform(*CELL_RADIUS[attributes["cell_size"]])
    seed = int(rng.integers(2**63))
    pictures = []
    for ground in (0.0, 1.0):
        picture = np.full((SIDE, SIDE, 3), ground, np.float32)
        box = white_cell(picture, np.full(2, SIDE / 2), radius, attributes, np.random.default_rng(seed))
        pictures.append(picture)
    alpha = np.clip(1 - (pictures[1] - pictures[0]).mean(-1), 0, 1)
    side = round(SIDE * SCALE)
    layers = [pictures[0][..., k] for k in range(3)] + [alpha]
    small = [np.asarray(Image.fromarray(layer).resize((side, side), Image.Resampling.BOX)) for layer in layers]
    scale = side / SIDE
    scaled = Box(*(round(edge * scale) for edge in (box.left, box.top, box.right, box.bottom)))
    return Sprite(np.stack(small[:3], -1), small[3]), scaled, attributes


def regions(width: int, height: int, rng: np.random.Generator) -> list[Region]:
    """One of each kind in a smear of at least 3 x 2 tiles of 512 px: a crowded head, a feathered tail, and two of the
    tiles between them empty and out of focus. Smaller smears have none."""
    columns, rows = width // 512, height // 512
    if columns < 4 or rows < 2:
        return []
    inner = [(c, r) for c in range(1, columns - 1) for r in range(rows)]
    empty, blurred = (inner[int(k)] for k in rng.choice(len(inner), 2, replace=False))
    return [
        Region("crowded", Box(0, 0, 512, height)),
        Region("feathered edge", Box((columns - 1) * 512, 0, width, height)),
        Region("empty", _tile(*empty)),
        Region("out of focus", _tile(*blurred)),
    ]


def _tile(column: int, row: int) -> Box:
    return Box(column * 512, row * 512, (column + 1) * 512, (row + 1) * 512)


def _inside(x: np.ndarray | float, y: np.ndarray | float, box: Box, margin: float = 0.0) -> Any:
    across = (x >= box.left - margin) & (x < box.right + margin)
    return across & (y >= box.top - margin) & (y < box.bottom + margin)


def _red_places(width: int, height: int, found: Sequence[Region], rng: np.random.Generator) -> np.ndarray:
    """float[n, 2] centres (x, y) of red cells: a shaken hexagonal grid, thinned or doubled by region."""
    pitch = RED_RADIUS * rng.uniform(2.15, 2.5)
    rows = np.arange(-pitch, height + pitch, pitch * 0.87)
    grid = [(x + (k % 2) * pitch / 2, y) for k, y in enumerate(rows) for x in np.arange(-pitch, width + pitch, pitch)]
    places = np.array(grid) + rng.normal(0, 0.22 * RED_RADIUS, (len(grid), 2))
    chance = np.full(len(places), rng.uniform(0.6, 0.85))
    patchy = ndimage.gaussian_filter(rng.standard_normal((height // 64 + 2, width // 64 + 2)), 2.0)
    cell = np.clip(places / 64, 0, [patchy.shape[1] - 1, patchy.shape[0] - 1]).astype(int)
    chance += 0.25 * (patchy / patchy.std())[cell[:, 1], cell[:, 0]] * 0.5
    extra = np.zeros((0, 2))
    for region in found:
        box, inside = region.box, _inside(places[:, 0], places[:, 1], region.box)
        match region.kind:
            case "empty":
                chance[inside] = 0
            case "feathered edge":
                along = (places[:, 0] - box.left) / max(box.width, 1)
                chance[inside] *= np.clip(0.35 - 0.5 * along[inside], 0, 1)
            case "crowded":
                chance[inside] = 1.0
                count = round(2.2 * box.area / pitch**2)
                extra = rng.uniform((box.left, box.top), (box.right, box.bottom), (count, 2))
    return np.concatenate([places[rng.random(len(places)) < chance], extra])


def _white_places(
    width: int, height: int, count: int, found: Sequence[Region], rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Up to `count` centres in the readable part, apart from each other, from the regions and from the slide's edge."""
    places: list[tuple[float, float]] = []
    apart, margin = 125.0, 70.0
    for _ in range(60 * count):
        x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
        if len(places) == count:
            break
        if any(_inside(x, y, region.box, 45.0) for region in found):
            continue
        if all(np.hypot(x - a, y - b) >= apart for a, b in places):
            places.append((x, y))
    return places


def draw_smear(
    width: int, height: int, labels: Sequence[str], rng: np.random.Generator
) -> tuple[np.ndarray, list[PlacedCell], list[Region]]:
    """uint8[height, width, 3], the white cells in it (as many of `labels` as find room) and its unreadable regions."""
    found = regions(width, height, rng)
    canvas = np.empty((height, width, 3), np.float32)
    canvas[:] = np.array((0.985, 0.93, 0.87)) + rng.normal(0, 0.012, 3)
    white = _white_places(width, height, len(labels), found, rng)
    sprites = red_sprites(rng)
    red = _red_places(width, height, found, rng)
    if white:
        gaps = np.min([np.hypot(red[:, 0] - x, red[:, 1] - y) for x, y in white], axis=0)
        red = red[gaps > RED_RADIUS + 38 + rng.uniform(-8, 8, len(red))]
    for x, y in red:
        stamp(canvas, sprites[int(rng.integers(SPRITES))].turned(int(rng.integers(8))), x, y)
    _dirt(canvas, white, rng)
    cells = []
    for label, (x, y) in zip(labels, white, strict=False):
        sprite, box, attributes = white_sprite(label, rng)
        left, top = stamp(canvas, sprite, x, y)
        moved = Box(box.left + left, box.top + top, box.right + left, box.bottom + top)
        cells.append(PlacedCell(label, attributes, moved))
    return _photograph(canvas, found, rng), cells, found


def _dirt(canvas: np.ndarray, white: Sequence[tuple[float, float]], rng: np.random.Generator) -> None:
    """Platelets, single and in small clumps, and a few dark specks, none near a white cell."""
    height, width = canvas.shape[:2]
    y, x = np.mgrid[-9:10, -9:10].astype(np.float32)
    for _ in range(round(width * height / 40_000)):
        spot = rng.uniform((0, 0), (width, height))
        if any(np.hypot(spot[0] - a, spot[1] - b) < 75 for a, b in white):
            continue
        speck = rng.random() < 0.08
        colour = np.array((0.25, 0.20, 0.22) if speck else (0.52, 0.36, 0.62), np.float32)
        for _ in range(1 if rng.random() < 0.8 else int(rng.integers(2, 5))):
            level = blob(x, y, rng.uniform(2, 4) if speck else rng.uniform(3, 6), 0.25, rng)
            alpha = (0.85 * coverage(level, 2.0)).astype(np.float32)
            stamp(canvas, Sprite(alpha[..., None] * colour, alpha), *(spot + rng.normal(0, 6, 2)))


def _photograph(canvas: np.ndarray, found: Sequence[Region], rng: np.random.Generator) -> np.ndarray:
    """Stain, light and focus: saturation and gains of the slide, slow light, blur (strong in one region), noise."""
    height, width = canvas.shape[:2]
    grey = canvas.mean(2, keepdims=True)
    picture = grey + (canvas - grey) * np.float32(rng.uniform(0.85, 1.2))
    slow = ndimage.zoom(rng.normal(1, 0.012, (4, 5)), (height / 4, width / 5), order=1)[:height, :width]
    gains = (1 + rng.normal(0, 0.012, 3)) * rng.uniform(0.94, 1.0)
    picture *= slow.astype(np.float32)[..., None] * gains.astype(np.float32)
    blur = rng.uniform(0.4, 0.8)
    picture = ndimage.gaussian_filter(picture, (blur, blur, 0), truncate=3.0)
    for region in found:
        if region.kind == "out of focus":
            box = region.box
            area = picture[box.top : box.bottom, box.left : box.right]
            area[:] = ndimage.gaussian_filter(area, (4.5, 4.5, 0), truncate=3.0)
    picture += rng.standard_normal((height, width, 1), np.float32) * np.float32(rng.uniform(0.004, 0.009))
    return (np.clip(picture, 0, 1) * 255 + 0.5).astype(np.uint8)
