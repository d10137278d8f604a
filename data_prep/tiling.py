"""The tile grid of a slide, cut into bands that one worker does, and the blocks in which a band is read.

All coordinates are level-0 pixels, half-open. Tiles that the slide's right or lower edge would cut are not made, as in
the paper; they are counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from data_prep.schema import Box, DataError
from data_prep.slides import Slide

SIDE = 512
TILES_PER_BLOCK = 4  # a side of a block: read at once with its halo, about 20 MB


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Where tiles begin: `offset` shifts the whole grid right and down. `partial`: tiles cut by the slide's edge."""

    width: int
    height: int
    offset: int = 0
    side: int = SIDE

    @property
    def columns(self) -> int:
        return max((self.width - self.offset) // self.side, 0)

    @property
    def rows(self) -> int:
        return max((self.height - self.offset) // self.side, 0)

    @property
    def tiles(self) -> int:
        return self.columns * self.rows

    @property
    def partial(self) -> int:
        across = max(-(-(self.width - self.offset) // self.side), 0)
        return across * max(-(-(self.height - self.offset) // self.side), 0) - self.tiles

    @property
    def bands(self) -> int:
        return -(-self.rows // TILES_PER_BLOCK)

    def tile(self, column: int, row: int) -> Box:
        left, top = self.offset + column * self.side, self.offset + row * self.side
        return Box(left, top, left + self.side, top + self.side)

    def blocks(self, band: int) -> Iterator[list[Box]]:
        """The tiles of a band, block by block from left to right."""
        rows = range(band * TILES_PER_BLOCK, min((band + 1) * TILES_PER_BLOCK, self.rows))
        for start in range(0, self.columns, TILES_PER_BLOCK):
            columns = range(start, min(start + TILES_PER_BLOCK, self.columns))
            yield [self.tile(column, row) for row in rows for column in columns]


@dataclasses.dataclass(frozen=True, slots=True)
class TilePixels:
    """A tile with its halo: `rgb` uint8[h, w, 3] covers `area` of the slide (cut at the slide's edge), `core` is the
    tile in pixels of `rgb`. `error` says why there are no pixels. `block`: pixels and area of the read that it is cut
    from, which its neighbours share."""

    tile: Box
    area: Box
    rgb: np.ndarray
    error: str = ""
    block: tuple[np.ndarray, Box] | None = None

    @property
    def core(self) -> Box:
        left, top = self.tile.left - self.area.left, self.tile.top - self.area.top
        return Box(left, top, left + self.tile.width, top + self.tile.height)


def around(tile: Box, halo: int, size: tuple[int, int]) -> Box:
    """The tile with `halo` px on each side, within the slide."""
    return Box(
        max(tile.left - halo, 0),
        max(tile.top - halo, 0),
        min(tile.right + halo, size[0]),
        min(tile.bottom + halo, size[1]),
    )


def read_block(slide: Slide, tiles: list[Box], halo: int) -> Iterator[TilePixels]:
    """The tiles of a block from one read. Where that fails each tile is read alone, then without its halo; a tile
    that still does not decode comes with an `error` and the others are as they would have been but for their halo."""
    whole = Box(tiles[0].left, tiles[0].top, tiles[-1].right, tiles[-1].bottom)
    try:
        block = around(whole, halo, slide.size)
        pixels = slide.read(block.left, block.top, block.width, block.height)
    except DataError:
        yield from (_read_alone(slide, tile, halo) for tile in tiles)
        return
    for tile in tiles:
        area = around(tile, halo, slide.size)
        top, left = area.top - block.top, area.left - block.left
        part = pixels[top : top + area.height, left : left + area.width]
        yield TilePixels(tile, area, part, block=(pixels, block))


def _read_alone(slide: Slide, tile: Box, halo: int) -> TilePixels:
    error = ""
    for area in (around(tile, halo, slide.size), tile):
        try:
            return TilePixels(tile, area, slide.read(area.left, area.top, area.width, area.height))
        except DataError as failure:
            error = str(failure)
    return TilePixels(tile, tile, np.full((tile.height, tile.width, 3), 255, np.uint8), error)


def sample_pictures(slide: Slide, count: int = 24, side: int = SIDE) -> list[np.ndarray]:
    """Pictures uint8[side, side, 3] spread over the slide, wherever its grid begins; those that do not decode are left
    out. Even coordinates, so that half-resolution pixels fall together."""
    width, height = slide.size
    side = min(side, width, height)
    across = min(max(1, round((count * width / max(height, 1)) ** 0.5)), max(1, width // side))
    down = min(max(1, count // across), max(1, height // side))
    pictures = []
    for row in range(down):
        for column in range(across):
            x = round((width - side) * (column + 0.5) / across) // 2 * 2
            y = round((height - side) * (row + 0.5) / down) // 2 * 2
            try:
                pictures.append(slide.read(x, y, side, side))
            except DataError:
                continue  # counted where the tile is read
    if not pictures:
        raise DataError(f"{slide.path.name}: none of {across * down} sampled places decodes; copy the file again")
    return pictures
