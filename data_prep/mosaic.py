"""Mosaics: white cells of PBC laid into real red-cell fields, as small slides whose every cell is known.

OUT/images/<slide_id>.tiff, OUT/background/<slide_id>.tiff (the same without white cells, for val and test slides),
OUT/truth/<slide_id>.json, and the tables OUT/slides.csv and OUT/background.csv for `pbs data run`. A mosaic is made of
photographs of single cells; it is no photograph of a smear. Cells keep the split of `pbs data run --source pbc` and are
used again within a split, never across; so are fields. Nothing but the white cells depends on a slide's pattern.
Patterns are named A-E: they are proportions, not diseases.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import mosaic_fields, mosaic_paste, mosaic_plan, mosaic_sources, pyramid, segment, split
from data_prep.crops import decode_rgb
from data_prep.executors import Quarantined, run_units
from data_prep.files import atomic_write, canonical_json, sha256_file
from data_prep.mosaic_plan import Plan, plan
from data_prep.mosaic_sources import Measured
from data_prep.progress import progress
from data_prep.schema import SPLITS, WHITE_CELL_CLASSES, DataError, stable_hash
from data_prep.slide_table import COLUMNS, SlideRow
from data_prep.sources import pbc

FIELDS = "fields/chula_rbc12/Dataset"
WHITE_CELL = 70.0  # px, width of the median white cell, as in S-BIAD440
MPP = 0.25  # nominal, that of a 40x scan. Not measured: PBC publishes none, and red cells of 42 px would say 0.18
VAL_SHARE = 0.1
CODE = (mosaic_fields, mosaic_paste, mosaic_plan, mosaic_sources, pyramid, segment, split)  # what decides the pixels


@dataclasses.dataclass(frozen=True, slots=True)
class MosaicJob:
    """What `pbs data mosaic` was asked for. `fields`: folder of red-cell pictures (default: ROOT/FIELDS)."""

    cells: Path
    out: Path
    fields: Path | None = None
    slides: int = 200
    held_out: int = 60
    seed: int = 0
    workers: int = 1
    side: int = 1536

    @property
    def fields_root(self) -> Path:
        return self.fields or self.cells / FIELDS


@dataclasses.dataclass(frozen=True, slots=True)
class _SlideUnit:
    plan: Plan
    root: Path
    out: Path
    key: str
    seed: int
    side: int
    scale: float


def run(job: MosaicJob, say: Callable[[str], None] = print) -> None:
    """Makes the slides that are not there yet.

    Raises:
        DataError: numbers that cannot be, missing folders, or a split without cells or fields.
    """
    held_out, val = job.held_out, max(1, round(job.slides * VAL_SHARE))
    if held_out < 1 or job.slides - held_out - val < 1:
        raise DataError(f"--slides {job.slides} leaves no training slide beside {held_out} held out and {val} val")
    listing = pbc.listing(job.cells)
    pictures = mosaic_sources.pictures(job.fields_root)
    key = _key(job, [job.cells / cell.path for cell in listing.cells] + pictures)
    state = job.out / "mosaic.json"
    if state.is_file() and json.loads(state.read_bytes())["key"] == key:
        say(f"up to date: {job.slides} slides under {job.out}")
        return
    work = job.out / ".units" / key[:16]
    how = {"seed": job.seed, "workers": job.workers}
    pools, cell_rejects = mosaic_sources.measured_cells(job.cells, listing.cells, work, **how)
    fields, field_rejects = mosaic_sources.prepared_fields(job.fields_root, pictures, work, **how)
    widths = [cell.width for pool in pools.values() for cell in pool]
    scale = WHITE_CELL / float(np.median(widths))
    plans = plan(pools, fields, slides=job.slides, held_out=held_out, val=val, seed=job.seed)
    todo = [_SlideUnit(p, job.cells, job.out, key, job.seed, job.side, scale) for p in plans]
    for number, result in progress(run_units(_draw, todo, job.workers), len(todo), "slides"):
        if isinstance(result, Quarantined):
            raise DataError(f"slide {todo[number].plan.slide_id} could not be drawn: {result.reason}")
    atomic_write(job.out / "background.csv", _table([p for p in plans if p.split != "train"], "background"))
    atomic_write(job.out / "slides.csv", _table(plans, "images"))
    counts = {name: sum(p.split == name for p in plans) for name in SPLITS}
    details = {
        "scale": round(scale, 6),
        "slides": counts,
        "cells": {name: sum(len(p.cells) for p in plans if p.split == name) for name in SPLITS},
        "cells_distinct": {name: len(pools[name]) for name in SPLITS},
        "fields": {name: len(fields[name]) for name in SPLITS},
        "cells_left_out": dict(sorted(cell_rejects.items())),
        "fields_left_out": dict(sorted(field_rejects.items())),
        "mpp": "nominal, not measured",
        "licences": [*listing.licences, "red-cell fields: see their folder"],
    }
    atomic_write(state, canonical_json({"key": key} | details))
    shutil.rmtree(work.parent, ignore_errors=True)
    say("\n".join(f"{name}: {value}" for name, value in details.items()))


def _key(job: MosaicJob, pictures: Sequence[Path]) -> str:
    code = [Path(str(module.__file__)) for module in CODE]
    hashes = "".join(map(sha256_file, [Path(__file__), *code, *pictures]))
    return hashlib.sha256(f"{job.slides}/{job.held_out}/{job.seed}/{job.side}/{hashes}".encode()).hexdigest()


def _draw(unit: _SlideUnit) -> str:
    """Draws one slide, unless it is there: the truth is written last and says that its pictures are whole."""
    p = unit.plan
    truth = unit.out / "truth" / f"{p.slide_id}.json"
    image = unit.out / "images" / f"{p.slide_id}.tiff"
    if truth.is_file() and image.is_file() and json.loads(truth.read_bytes()).get("key") == unit.key:
        return p.slide_id
    rng = np.random.default_rng(stable_hash("background", unit.seed, p.slide_id))
    fields = [np.load(path).astype(np.float32) * p.stain.red for path in p.fields]
    picture = mosaic_fields.quilt([mosaic_fields.render(f, p.stain.background) for f in fields], unit.side, rng)
    if p.split != "train":  # what a blind look at held-out slides sees; nobody reads it for training slides
        _write(unit, "background", picture)
    rng = np.random.default_rng(stable_hash("cells", unit.seed, p.slide_id))
    cells = [p.cells[k] for k in rng.permutation(len(p.cells))]
    cutouts = [_cut(cell, unit, int(rng.integers(8))) for cell in cells]
    spots = mosaic_paste.places(picture, p.stain, [cutout.alpha.shape[::-1] for cutout in cutouts], rng)
    pairs = zip(cutouts, spots, strict=True)
    boxes = [mosaic_paste.paste(picture, p.stain, cutout, left, top) for cutout, (left, top) in pairs]
    _write(unit, "images", picture)
    record: dict[str, Any] = {
        "key": unit.key,
        "counts": {label: sum(cell.source.label == label for cell in cells) for label in WHITE_CELL_CLASSES},
        "cells": [
            {
                "cell_id": cell.source.cell_id,
                "label": cell.source.label,
                "attributes": dict(cell.source.attributes),
                "box": [box.left, box.top, box.right, box.bottom],
            }
            for cell, box in zip(cells, boxes, strict=True)
        ],
    }
    atomic_write(truth, canonical_json(record))
    return p.slide_id


def _cut(cell: Measured, unit: _SlideUnit, turn: int) -> mosaic_paste.Cutout:
    rgb = np.asarray(decode_rgb((unit.root / cell.source.path).read_bytes()))
    return mosaic_paste.cut_out(rgb, cell.outline, cell.stain.background, unit.scale, turn)


def _write(unit: _SlideUnit, folder: str, rgb: np.ndarray) -> None:
    path = unit.out / folder / f"{unit.plan.slide_id}.tiff"
    pyramid.write_pyramid(path, unit.side, unit.side, lambda x, y, w, h: rgb[y : y + h, x : x + w], mpp=MPP)


def _table(plans: Sequence[Plan], folder: str) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for p in plans:
        row = SlideRow(
            path=f"{folder}/{p.slide_id}.tiff",
            slide_id=p.slide_id,
            pattern=p.pattern,
            split=p.split,
            site="mosaic",
            mpp=MPP,
            mpp_source="nominal",
        )
        writer.writerow(dataclasses.astuple(row))
    return buffer.getvalue()
