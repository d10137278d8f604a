"""The grid covers each pixel once, and one bad tile costs no other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile

from data_prep.pyramid import write_pyramid
from data_prep.slides import open_slide
from data_prep.tiling import Grid, read_block, sample_pictures


@pytest.mark.parametrize("size, offset", [((2048, 1536), 0), ((1000, 1100), 0), ((3333, 2500), 256), ((500, 900), 0)])
def test_tiles_cover_the_slide_once_and_partial_ones_are_counted(size: tuple[int, int], offset: int) -> None:
    grid = Grid(*size, offset)
    tiles = [tile for band in range(grid.bands) for block in grid.blocks(band) for tile in block]
    assert len({(tile.left, tile.top) for tile in tiles}) == len(tiles) == grid.tiles
    covered = np.zeros((size[1], size[0]), np.uint8)
    for tile in tiles:
        assert min(tile.left, tile.top) >= offset and tile.right <= size[0] and tile.bottom <= size[1]
        covered[tile.top : tile.bottom, tile.left : tile.right] += 1
    inside = covered[offset : offset + grid.rows * 512, offset : offset + grid.columns * 512]
    assert inside.min(initial=1) == 1 and covered.sum() == inside.size
    across, down = -(-(size[0] - offset) // 512), -(-(size[1] - offset) // 512)
    assert grid.tiles + grid.partial == across * down


def test_a_tile_that_does_not_decode_is_named_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    write_pyramid(path, 1024, 1024, lambda x, y, w, h: pixels[y : y + h, x : x + w], mpp=0.25)
    grid = Grid(1024, 1024)
    with open_slide(path) as slide:
        whole = {(t.tile.left, t.tile.top): t for t in read_block(slide, next(grid.blocks(0)), 64)}
    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        offset, length = page.dataoffsets[0], page.databytecounts[0]
    content = bytearray(path.read_bytes())
    content[offset : offset + length] = bytes(length)
    path.write_bytes(content)
    with open_slide(path) as slide:
        read = {(t.tile.left, t.tile.top): t for t in read_block(slide, next(grid.blocks(0)), 64)}
        assert len(sample_pictures(slide, side=256)) < 16
    assert [place for place, tile in read.items() if tile.error] == [(0, 0)]
    assert "do not decode" in read[0, 0].error and "a.tiff" in read[0, 0].error
    for place in ((512, 0), (0, 512), (512, 512)):
        core, good = read[place].core, whole[place].core
        mine = read[place].rgb[core.top : core.bottom, core.left : core.right]
        assert np.array_equal(mine, whole[place].rgb[good.top : good.bottom, good.left : good.right])
