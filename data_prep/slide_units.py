"""The units of work of the slide job: look at a slide once, then one band of its tiles -> patches, cells, tile scores.

A band's files are named by a key over its inputs and the configuration; finished, undamaged ones are used again, which
gives resume, retries and independence of the executor. Only pixels of kept tiles are written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep import crops, io, qc, qc_haemorasis, slide_cellpose, slide_cells
from data_prep.datasets import CELL_FEATURES, cell_record
from data_prep.files import atomic_write, canonical_json, sha256_file
from data_prep.schema import Box, Cell, DataError
from data_prep.slide_cells import Halved, Stain
from data_prep.slide_datasets import PATCH_FEATURES, Patch, patch_id, patch_record
from data_prep.slide_table import SlideRow
from data_prep.slides import Scale, Slide, open_slide, resolve_scale, slide_facts
from data_prep.sources import Reject
from data_prep.tiling import Grid, TilePixels, read_block, sample_pictures

NATIVE_SCALE = (0.14, 0.36)  # um/px of what scanners call 40x and more; the tiles are native pixels, never resampled
UNDECODABLE = "does not decode"
NOT_SEGMENTED = "was not segmented"


@dataclasses.dataclass(frozen=True, slots=True)
class LookUnit:
    """Open one slide: `root` is the folder its row's path refers to."""

    root: Path
    row: SlideRow
    qc_source: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What a slide is: size, scale, stain; `facts` for its record."""

    row: SlideRow
    size: tuple[int, int]
    scale: Scale
    stain: Stain
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class BandUnit:
    """Some rows of tiles of one slide; writes `stem`.patches, `stem`.cells and, last, `stem`.json."""

    root: Path
    look: Look
    grid: Grid
    band: int
    stem: Path
    threshold: float
    qc_source: Path | None = None  # of `qc_haemorasis`; None = the classical score decides
    cellpose_weights: Path | None = None  # None = the classical finder


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """The fate of one tile: its score, the reason when it was not kept, what was measured, how many cells it owns."""

    x: int
    y: int
    score: float
    reason: str
    parts: dict[str, float]
    red_cells: int = 0
    red_um: float = 0.0
    white_cells: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class BandReport:
    """`patches` and `cells`: the files of what was kept. `failures`: (x, y) and why a tile did not decode. `cut`: white
    cells left out because the slide's edge cuts them."""

    patches: io.Unit
    cells: io.Unit
    tiles: tuple[Tile, ...]
    failures: tuple[tuple[int, int, str], ...]
    cut: int


def look(unit: LookUnit) -> Look | Reject:
    """Opens a slide, finds its scale and measures its stain; a slide that cannot be used becomes a reject."""
    row = unit.row
    if unit.qc_source:
        try:
            qc_haemorasis.scorer(unit.qc_source, row.slide_id)
        except DataError as error:
            return Reject(row.slide_id, "no QC scores", str(error))
    try:
        with open_slide(unit.root / row.path) as slide:
            facts = slide_facts(slide)
            scale = resolve_scale(slide.pixels.properties, row.mpp, row.mpp_source, row.path)
            if not NATIVE_SCALE[0] <= scale.mpp <= NATIVE_SCALE[1]:
                detail = (
                    f"{row.path}: {scale.mpp:g} um/px ({scale.source}) is no 40x scan "
                    f"({NATIVE_SCALE[0]}-{NATIVE_SCALE[1]} um/px): scan at 40x, or correct the table's mpp"
                )
                return Reject(row.slide_id, "not a 40x scan", detail)
            samples = sample_pictures(slide)
            if slide_cells.colourless(samples):
                return Reject(
                    row.slide_id, "no colour", f"{row.path} has no colour: a stained smear is scanned in colour"
                )
            stain = slide_cells.measure_stain(samples)
            return Look(row, slide.size, scale, stain, facts)
    except DataError as error:
        reason = "no pixel size" if "pixel size" in str(error) else "does not open"
        return Reject(row.slide_id, reason, str(error))


def band(unit: BandUnit) -> BandReport:
    """Tiles, scores and cells of one band, or what an earlier run left."""
    done = _finished(unit.stem)
    if done is not None:
        return done
    tiles: list[Tile] = []
    failures: list[tuple[int, int, str]] = []
    patches: list[Patch] = []
    cells: list[Cell] = []
    cut = 0
    score = qc_haemorasis.scorer(unit.qc_source, unit.look.row.slide_id) if unit.qc_source else None
    find = slide_cellpose.CellposeFinder(unit.cellpose_weights) if unit.cellpose_weights else slide_cells.white_cells
    with open_slide(unit.root / unit.look.row.path) as slide:
        for pixels, half in _tiles(slide, unit):
            if pixels.error:
                failures.append((pixels.tile.left, pixels.tile.top, pixels.error))
                continue
            try:
                tile, patch, found, cut_here = do_tile(pixels, half, unit.look, unit.threshold, score, find)
            except slide_cellpose.NotSegmentedError as error:
                failures.append((pixels.tile.left, pixels.tile.top, str(error)))
                continue
            tiles.append(tile)
            patches += [patch] if patch else []
            cells += found
            cut += cut_here
    report = BandReport(
        io.write_unit(_file(unit.stem, "patches"), PATCH_FEATURES, map(patch_record, patches), "patch_id"),
        io.write_unit(_file(unit.stem, "cells"), CELL_FEATURES, map(cell_record, cells), "cell_id"),
        tuple(tiles),
        tuple(failures),
        cut,
    )
    atomic_write(_file(unit.stem, "json"), canonical_json(_to_json(report)))
    return report


def _tiles(slide: Slide, unit: BandUnit) -> Iterator[tuple[TilePixels, Halved]]:
    for tiles in unit.grid.blocks(unit.band):
        yield from block_tiles(slide, tiles, unit.look)


def block_tiles(slide: Slide, tiles: list[Box], look: Look) -> Iterator[tuple[TilePixels, Halved]]:
    """The tiles of a block, and the same halved: all at once, for their halos are most of what tiles see."""
    shared: Halved | None = None
    for pixels in read_block(slide, tiles, slide_cells.halo(look.scale.mpp)):
        if pixels.block is None:
            yield pixels, slide_cells.halve(pixels.rgb, look.stain)
            continue
        rgb, area = pixels.block
        shared = shared or slide_cells.halve(rgb, look.stain)
        yield pixels, shared.part(_moved(pixels.area, -area.left, -area.top))


def why_failed(error: str) -> str:
    """The reason, in a word or two, of one of a band's `failures`."""
    return NOT_SEGMENTED if error == slide_cellpose.FAILED else UNDECODABLE


def do_tile(
    pixels: TilePixels,
    half: Halved,
    look: Look,
    threshold: float,
    score: qc_haemorasis.Score | None = None,
    find: slide_cells.Finder = slide_cells.white_cells,
) -> tuple[Tile, Patch | None, list[Cell], int]:
    """Scores one tile and, if it is kept, finds its cells: (fate, patch, cells, cells cut by the slide's edge).

    half: the pixels halved. `score` decides in place of the classical score, which is kept beside it; blank tiles are
    not shown to it.
    """
    tile, core, mpp = pixels.tile, pixels.core, look.scale.mpp
    inner = half.part(core)
    red = slide_cells.red_cells(inner, mpp)
    quality = qc.classical(inner, len(red.centres), mpp)
    picture = pixels.rgb[core.top : core.bottom, core.left : core.right]
    if score and quality.reason != qc.BLANK:
        quality = qc.decided_by(qc_haemorasis.NAME, score(tile, picture), quality)
    fate = Tile(
        tile.left,
        tile.top,
        quality.score,
        quality.reason,
        dict(quality.parts),
        len(red.centres),
        red.diameter_um if len(red.centres) else 0.0,
    )
    if quality.score < threshold:
        return fate, None, [], 0
    id = patch_id(look.row.slide_id, tile.left, tile.top)
    cells: list[Cell] = []
    cut = 0
    for found in find(pixels.rgb, half, mpp, core):
        box = _moved(found.box, pixels.area.left, pixels.area.top)
        if is_cut(box, look.size):
            cut += 1
            continue
        image = crops.encode_jpeg(slide_cells.crop(pixels.rgb, found.box))
        cells.append(
            Cell(
                cell_id=f"{id}:{len(cells)}",
                split=look.row.split,
                label="",
                label_source="heuristic",
                image=image,
                patch_id=id,
                slide_id=look.row.slide_id,
                patient_id=look.row.patient_id,
                bbox=box,
                confidence=0.0,
                geometry=crops.geometry_name("reflect"),
            )
        )
    patch = Patch(
        patch_id=id,
        slide_id=look.row.slide_id,
        split=look.row.split,
        x=tile.left,
        y=tile.top,
        qc_score=quality.score,
        image=crops.encode_jpeg(Image.fromarray(picture)),
        cell_ids=tuple(cell.cell_id for cell in cells),
        mpp=mpp,
        side=tile.width,
    )
    return dataclasses.replace(fate, reason="", white_cells=len(cells)), patch, cells, cut


def _moved(box: Box, x: int, y: int) -> Box:
    return Box(box.left + x, box.top + y, box.right + x, box.bottom + y)


def is_cut(box: Box, size: tuple[int, int]) -> bool:
    """Whether the edge of a picture (width, height) cuts a box."""
    return box.left <= 0 or box.top <= 0 or box.right >= size[0] or box.bottom >= size[1]


def is_done(unit: BandUnit) -> bool:
    """Whether an earlier run has left the band's files."""
    return _file(unit.stem, "json").is_file()


def _file(stem: Path, ending: str) -> Path:
    return stem.with_name(f"{stem.name}.{ending}")


def _to_json(report: BandReport) -> dict[str, Any]:
    return {
        "patches": {"keys": report.patches.keys, "sha256": sha256_file(report.patches.path)},
        "cells": {"keys": report.cells.keys, "sha256": sha256_file(report.cells.path)},
        "tiles": [dataclasses.asdict(tile) for tile in report.tiles],
        "failures": report.failures,
        "cut": report.cut,
    }


def _finished(stem: Path) -> BandReport | None:
    """The report of an earlier run if its files are whole."""
    side = _file(stem, "json")
    if not side.is_file():
        return None
    saved = json.loads(side.read_bytes())
    units = {}
    for name in ("patches", "cells"):
        path = _file(stem, name)
        if not path.is_file() or sha256_file(path) != saved[name]["sha256"]:
            return None
        units[name] = io.Unit(path, tuple((split, id) for split, id in saved[name]["keys"]))
    return BandReport(
        units["patches"],
        units["cells"],
        tuple(Tile(**tile) for tile in saved["tiles"]),
        _failures(saved["failures"]),
        saved["cut"],
    )


def _failures(saved: Sequence[Sequence[Any]]) -> tuple[tuple[int, int, str], ...]:
    return tuple((int(x), int(y), str(error)) for x, y, error in saved)
