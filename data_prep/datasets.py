"""The record layouts of `cells` and `cell_qa`, and the way between records and the schema's dataclasses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.io import VERSION, open_dataset, read_manifest
from data_prep.records import FLOAT, JPEG, TEXT, TEXTS, Features, array
from data_prep.schema import QA, Box, Cell, qa_from_record

CELL_FEATURES: Features = {
    "cell_id": TEXT,
    "patch_id": TEXT,
    "slide_id": TEXT,
    "patient_id": TEXT,
    "split": TEXT,
    "domain": TEXT,
    "bbox": array("int32", 4),  # left, top, right, bottom in the source picture, right and bottom exclusive
    "image": JPEG,
    "label": TEXT,
    "label_source": TEXT,
    "confidence": FLOAT,
    "comments": TEXT,
    "attributes": TEXT,  # JSON object, {} when none were recorded
    "caption": TEXT,
    "geometry": TEXT,
    "color_enhance": FLOAT,
}
QA_FEATURES: Features = {
    name: TEXTS if name == "options" else TEXT for name in QA.__dataclass_fields__
}  # source and provenance as JSON objects


def cell_record(cell: Cell) -> dict[str, Any]:
    record = {name: getattr(cell, name) for name in CELL_FEATURES}
    box = cell.bbox
    record["bbox"] = np.array([box.left, box.top, box.right, box.bottom], np.int32)
    record["attributes"] = json.dumps(dict(cell.attributes))
    return record


def record_cell(record: Mapping[str, Any]) -> Cell:
    fields = dict(record)
    fields["bbox"] = Box(*map(int, record["bbox"]))
    fields["attributes"] = json.loads(record["attributes"])
    for name in ("confidence", "color_enhance"):
        fields[name] = round(record[name], 6)  # stored as float32
    return Cell(**fields)


def qa_record(qa: QA) -> dict[str, Any]:
    record = {name: getattr(qa, name) for name in QA_FEATURES}
    for name in ("source", "provenance"):
        record[name] = json.dumps(dict(record[name]))
    return record


def record_qa(record: Mapping[str, Any]) -> QA:
    return qa_from_record(record, str(record["id"]))


def read_cells(out: Path, split: str | None = None) -> Iterator[Cell]:
    """The cells of OUT/cells, one split or all."""
    for name in [split] if split else read_manifest(out / "cells")["splits"]:
        yield from map(record_cell, open_dataset(out / "cells", name))


def stored_questions(out: Path) -> list[QA]:
    """The questions of OUT/cell_qa and OUT/slide_qa, whichever is there, of all splits."""
    stored = [out / name for name in ("cell_qa", "slide_qa") if (out / name / VERSION).is_dir()]
    parts = [open_dataset(path, split) for path in stored for split in read_manifest(path)["splits"]]
    return [record_qa(record) for part in parts for record in part]


def read_questions(out: Path, split: str | None = None) -> Iterator[QA]:
    """The questions of OUT/cell_qa, one split or all."""
    for name in [split] if split else read_manifest(out / "cell_qa")["splits"]:
        yield from map(record_qa, open_dataset(out / "cell_qa", name))
