"""`pbs data synth --kind smear`: synthetic smears as pyramidal TIFFs with ground truth, laid out like the mosaics.

OUT/images/<slide_id>.tiff, OUT/truth/<slide_id>.json, OUT/slides.csv. A smear depends on (seed, its number) alone, and
an existing file is kept, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.executors import Quarantined, run_units
from data_prep.files import atomic_write, canonical_json
from data_prep.mosaic_plan import CONCENTRATION, PATTERNS
from data_prep.progress import progress
from data_prep.pyramid import write_pyramid
from data_prep.schema import WHITE_CELL_CLASSES, DataError, stable_hash
from data_prep.slide_table import COLUMNS, SlideRow
from data_prep.smear_draw import MPP, PlacedCell, Region, draw_smear

WIDTH, HEIGHT = 3072, 1536
CELLS = 60
SPLIT_CYCLE = ("train", "train", "test", "train", "val", "test", "train", "test", "train", "train")


@dataclasses.dataclass(frozen=True, slots=True)
class SmearUnit:
    """One smear to write below `out`."""

    out: Path
    number: int
    seed: int
    width: int
    height: int
    cells: int


def write_smears(
    out: Path,
    count: int,
    seed: int = 0,
    *,
    width: int = WIDTH,
    height: int = HEIGHT,
    cells: int = CELLS,
    workers: int = 1,
) -> int:
    """Writes `count` smears, their truth and slides.csv; returns the number of white cells in them.

    Raises:
        DataError: a count below 1, a smear of less than one tile, or a worker that died.
    """
    if count < 1 or cells < 0 or min(width, height) < 512:
        raise DataError(f"{count} smears of {width}x{height} px: give at least 1, and at least 512 px each way")
    units = [SmearUnit(out, number, seed, width, height, cells) for number in range(count)]
    placed = 0
    for number, result in progress(run_units(write_smear, units, workers), count, "smears"):
        if isinstance(result, Quarantined):
            raise DataError(f"smear {number}: {result.reason}; give fewer --workers")
        placed += result
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for unit in units:
        table.writerow(dataclasses.asdict(row_of(unit)))
    atomic_write(out / "slides.csv", text.getvalue())
    return placed


def row_of(unit: SmearUnit) -> SlideRow:
    slide_id = f"smear-{unit.seed}-{unit.number:04d}"
    return SlideRow(
        path=f"images/{slide_id}.tiff",
        slide_id=slide_id,
        patient_id=f"P{unit.seed}-{unit.number:04d}",
        pattern=list(PATTERNS)[unit.number % len(PATTERNS)],
        split=SPLIT_CYCLE[unit.number // len(PATTERNS) % len(SPLIT_CYCLE)],
        site="synthetic",
        scanner="synthetic",
        mpp=MPP,
        mpp_source="nominal",
    )


def write_smear(unit: SmearUnit) -> int:
    """Writes one smear and, last, its truth, unless they are there; returns its number of white cells."""
    row = row_of(unit)
    image, truth = unit.out / row.path, unit.out / "truth" / f"{row.slide_id}.json"
    rng = np.random.default_rng(stable_hash("smear", unit.seed, unit.number, unit.width, unit.height, unit.cells))
    shares = rng.dirichlet(CONCENTRATION * np.array(PATTERNS[row.pattern]))
    labels = [str(label) for label in rng.choice(WHITE_CELL_CLASSES, unit.cells, p=shares)]
    pixels, cells, regions = draw_smear(unit.width, unit.height, labels, rng)
    if not (image.is_file() and truth.is_file()):
        write_pyramid(
            image, unit.width, unit.height, lambda x, y, w, h: pixels[y : y + h, x : x + w], mpp=MPP, quality=90
        )
        atomic_write(truth, canonical_json(_truth(row.slide_id, cells, regions)))
    return len(cells)


def _truth(slide_id: str, cells: list[PlacedCell], regions: list[Region]) -> dict[str, Any]:
    counts = Counter(cell.label for cell in cells)
    return {
        "counts": {label: counts[label] for label in WHITE_CELL_CLASSES},
        "cells": [
            {
                "cell_id": f"{slide_id}:{k:04d}",
                "label": cell.label,
                "attributes": cell.attributes,
                "box": [cell.box.left, cell.box.top, cell.box.right, cell.box.bottom],
            }
            for k, cell in enumerate(cells)
        ],
        "regions": [{"kind": r.kind, "box": [r.box.left, r.box.top, r.box.right, r.box.bottom]} for r in regions],
    }
