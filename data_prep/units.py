"""The unit of work of the cell job: some source cells -> one file of cropped cells and what was rejected.

A unit's file is named by a key over its inputs and the configuration; a finished, undamaged one is used again, which
gives resume, retries and independence of the executor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import crops, io, segment
from data_prep.datasets import CELL_FEATURES, cell_record
from data_prep.files import atomic_write, canonical_json, sha256_file
from data_prep.schema import Box, Cell, DataError
from data_prep.sources import Reject, SourceCell
from data_prep.split import Item, difference_hash

CELLS_PER_UNIT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class CropUnit:
    """`root`: the source's folder; `path`: the file to write, beside which a .json with the rest appears last."""

    cells: tuple[SourceCell, ...]
    root: Path
    path: Path
    fill: str
    color_enhance: float


@dataclasses.dataclass(frozen=True, slots=True)
class UnitReport:
    """What a unit made: the file of its cells (with the given split), what the split needs, rejects, clipped boxes."""

    unit: io.Unit
    items: tuple[Item, ...]
    rejects: tuple[Reject, ...]
    clipped: int


def crop_unit(work: CropUnit) -> UnitReport:
    """Crops the cells of a unit, or reads what an earlier run left. Bad pictures and boxes become rejects."""
    done = _finished(work.path)
    if done is not None:
        return done
    cells, items, rejects, clipped = [], [], [], 0
    for source in work.cells:
        try:
            cell, was_clipped = crop_cell(source, work.root, work.fill, work.color_enhance)
        except RejectedCell as rejected:
            detail = f"{source.path or source.cell_id}: {rejected.detail}"
            rejects.append(Reject(source.cell_id, rejected.reason, detail))
            continue
        clipped += was_clipped
        cells.append(cell)
        digest = hashlib.sha256(cell.image).hexdigest()
        dhash = difference_hash(crops.decode_rgb(cell.image))
        items.append(Item(cell.cell_id, cell.label, cell.split, digest, dhash, cell.patient_id, cell.slide_id))
    unit = io.write_unit(work.path, CELL_FEATURES, map(cell_record, cells), "cell_id")
    report = UnitReport(unit, tuple(items), tuple(rejects), clipped)
    atomic_write(_side_file(work.path), canonical_json(_to_json(report)))
    return report


class RejectedCell(Exception):
    """Why one cell is not kept: a reason from a small set, and the particulars."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def crop_cell(source: SourceCell, root: Path, fill: str, color_enhance: float) -> tuple[Cell, bool]:
    """The cropped cell, and whether its box had to be clipped to the picture. Raises RejectedCell."""
    try:
        image = crops.decode_rgb(source.image or (root / source.path).read_bytes())
    except (DataError, OSError) as error:
        raise RejectedCell("picture does not decode", f"{error}; replace or delete the file") from error
    if source.box is None:
        found = segment.central_cell(np.asarray(image))
        if found is None:
            raise RejectedCell("no white cell found", "the finder saw no stained nucleus near the middle")
        box = found.box
    else:
        box = clip_box(source.box, *image.size)
    cell = Cell(
        cell_id=source.cell_id,
        split=source.split,
        label=source.label,
        label_source=source.label_source,
        image=crops.encode_jpeg(crops.context_crop(image, box, fill, color_enhance)),
        slide_id=source.slide_id,
        patient_id=source.patient_id,
        bbox=box,
        comments=source.comments,
        attributes=source.attributes,
        geometry=crops.geometry_name(fill),
        color_enhance=color_enhance,
        domain=source.domain,
    )
    return cell, source.box is not None and box != source.box


def clip_box(box: Box, width: int, height: int) -> Box:
    """The part of an annotated box inside its picture. Raises RejectedCell for inverted, empty or outside boxes."""
    if box.width < 0 or box.height < 0:
        raise RejectedCell("inverted box", f"box {_text(box)} has its right or bottom before its left or top")
    if box.area == 0:
        raise RejectedCell("box without area", f"box {_text(box)} has no area")
    clipped = Box(max(box.left, 0), max(box.top, 0), min(box.right, width), min(box.bottom, height))
    if clipped.width <= 0 or clipped.height <= 0:
        raise RejectedCell("box outside its picture", f"box {_text(box)} lies outside the {width}x{height} px picture")
    return clipped


def _text(box: Box) -> str:
    return f"({box.left}, {box.top})-({box.right}, {box.bottom})"


def _side_file(path: Path) -> Path:
    return path.with_suffix(".json")


def _to_json(report: UnitReport) -> dict[str, Any]:
    return {
        "sha256": sha256_file(report.unit.path),
        "keys": report.unit.keys,
        "items": [dataclasses.asdict(item) for item in report.items],
        "rejects": [dataclasses.asdict(reject) for reject in report.rejects],
        "clipped": report.clipped,
    }


def _finished(path: Path) -> UnitReport | None:
    """The report of an earlier run if its files are whole."""
    side = _side_file(path)
    if not (side.is_file() and path.is_file()):
        return None
    saved = json.loads(side.read_bytes())
    if saved["sha256"] != sha256_file(path):
        return None
    unit = io.Unit(path, tuple((split, id) for split, id in saved["keys"]))
    items = tuple(Item(**item) for item in saved["items"])
    return UnitReport(unit, items, tuple(Reject(**reject) for reject in saved["rejects"]), saved["clipped"])
