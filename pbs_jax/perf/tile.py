"""`pbs perf tile`: tiles/s of our slide pass against the released way, on the same tiles of the same slide.

The peer reads each tile and writes it as PNG, all of them, without quality control; JPEG and reading alone stand beside.
Ours reads blocks, scores every tile and writes only what is kept; the slide job also finds and crops white cells in it, for
which the released way has a step of its own.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import openslide

from data_prep import io
from data_prep.qc import THRESHOLD
from data_prep.schema import DataError
from data_prep.slide_datasets import PATCH_FEATURES, patch_record
from data_prep.slide_table import SlideRow
from data_prep.slide_units import BandUnit, Look, LookUnit, band, block_tiles, do_tile, look
from data_prep.slides import open_slide
from data_prep.sources import Reject
from data_prep.tiling import Grid
from pbs_jax.perf.timing import alternate

PEER = "released way: read, PNG"


def report(slide: Path, count: int, rounds: int, mpp: float = 0.0) -> str:
    """Bands of `slide` from its middle that hold at least `count` tiles, or all. mpp: um/px where the file says none.

    Raises DataError for a slide that cannot be used or is smaller than a tile.
    """
    row = SlideRow(slide.name, slide.stem, mpp=mpp, mpp_source="--mpp" if mpp else "")
    seen = look(LookUnit(slide.parent, row))
    if isinstance(seen, Reject):
        raise DataError(seen.detail)
    grid = Grid(*seen.size)
    if not grid.tiles:
        raise DataError(f"{slide} has no whole tile of {grid.side} px")
    middle = sorted(range(grid.bands), key=lambda number: abs(2 * number - grid.bands + 1))
    bands: list[int] = []
    while middle and sum(_tiles_of(grid, number) for number in bands) < count:
        bands.append(middle.pop(0))
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            PEER: _released(slide, grid, bands, Path(folder), "png"),
            "read, JPEG quality 95": _released(slide, grid, bands, Path(folder), "jpeg"),
            "read alone": _released(slide, grid, bands, Path(folder), ""),
            "ours: read, score, write": _without_cells(slide, seen, grid, bands, Path(folder)),
            "ours: read, score, find cells, write": _ours(slide.parent, seen, grid, bands, Path(folder)),
        }
        found = alternate(sides, rounds)
    tiles = sum(_tiles_of(grid, number) for number in bands)
    lines = [f"{tiles} tiles of {slide.name}, one process, {rounds} alternating rounds, medians:"]
    for name, rate in found.items():
        lines.append(f"  {name:<38}{rate['wall']:>7.1f} tiles/s ({rate['wall'] / found[PEER]['wall']:.1f}x)")
    return "\n".join(lines)


def _tiles_of(grid: Grid, number: int) -> int:
    return sum(map(len, grid.blocks(number)))


def _released(slide: Path, grid: Grid, bands: list[int], out: Path, form: str) -> Callable[[], float]:
    """Tile after tile, as the released code reads, with OpenSlide, and writes them. Raises DataError where that cannot."""
    tiles = [tile for number in bands for block in grid.blocks(number) for tile in block]
    if openslide.OpenSlide.detect_format(slide) is None:
        raise DataError(f"{slide} is no format of OpenSlide's, with which the released way reads: take another")

    def run() -> float:
        with openslide.OpenSlide(slide) as opened:
            for tile in tiles:
                picture = opened.read_region((tile.left, tile.top), 0, (tile.width, tile.height)).convert("RGB")
                if form:
                    picture.save(out / f"{tile.left}_{tile.top}.{form}", quality=95)
        return float(len(tiles))

    return run


def _without_cells(slide: Path, seen: Look, grid: Grid, bands: list[int], out: Path) -> Callable[[], float]:
    """The slide job's pass with a finder that finds nothing."""

    def run() -> float:
        patches, count = [], 0
        with open_slide(slide) as opened:
            for tiles in itertools.chain.from_iterable(map(grid.blocks, bands)):
                for pixels, half in block_tiles(opened, tiles, seen):
                    patches.append(do_tile(pixels, half, seen, THRESHOLD, find=lambda *_: [])[1])
                    count += 1
        kept = (patch_record(patch) for patch in patches if patch)
        io.write_unit(out / "patches", PATCH_FEATURES, kept, "patch_id")
        return float(count)

    return run


def _ours(root: Path, seen: Look, grid: Grid, bands: list[int], out: Path) -> Callable[[], float]:
    """The slide job's own unit of work, each time into a new place: finished bands would be used again."""
    rounds = itertools.count()

    def run() -> float:
        place = out / f"round{next(rounds)}"
        place.mkdir()
        done = [band(BandUnit(root, seen, grid, number, place / str(number), THRESHOLD)) for number in bands]
        return float(sum(len(report.tiles) for report in done))

    return run
