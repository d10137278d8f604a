"""The record layouts of `slides` and `patches`, and the way between records and dataclasses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.io import open_dataset, read_manifest
from data_prep.records import FLOAT, INT, JPEG, TEXT, TEXTS, Features

SLIDE_FEATURES: Features = {
    "slide_id": TEXT,
    "split": TEXT,
    "patient_id": TEXT,  # "" unknown
    "diagnosis": TEXT,  # "" none
    "pattern": TEXT,  # "A".."E" for mosaics, else ""
    "site": TEXT,
    "scanner": TEXT,
    "mpp": FLOAT,  # micrometres per pixel at level 0, 0 unknown
    "mpp_source": TEXT,
    "width": INT,
    "height": INT,
    "tiles_in": INT,
    "tiles_kept": INT,
    "counts": TEXT,  # JSON object {class: number of white cells the pipeline found}
    "details": TEXT,  # JSON object: reader, vendor, hashes, tiles rejected by reason, QC scores
}
PATCH_FEATURES: Features = {
    "patch_id": TEXT,  # "<slide_id>:<x>_<y>"
    "slide_id": TEXT,
    "split": TEXT,
    "x": INT,  # left and top in level-0 px
    "y": INT,
    "mpp": FLOAT,
    "side": INT,
    "qc_score": FLOAT,
    "image": JPEG,  # q95 4:4:4, side x side px
    "cell_ids": TEXTS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Slide:
    """One slide after the pipeline (dataset `slides`)."""

    slide_id: str
    split: str
    width: int
    height: int
    tiles_in: int
    tiles_kept: int
    patient_id: str = ""
    diagnosis: str = ""
    pattern: str = ""
    site: str = ""
    scanner: str = ""
    mpp: float = 0.0
    mpp_source: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """One kept tile (dataset `patches`). `image` holds JPEG bytes of a `side` px square at level 0."""

    patch_id: str
    slide_id: str
    split: str
    x: int
    y: int
    qc_score: float
    image: bytes
    cell_ids: tuple[str, ...] = ()
    mpp: float = 0.0
    side: int = 512


def patch_id(slide_id: str, x: int, y: int) -> str:
    return f"{slide_id}:{x}_{y}"


def slide_record(slide: Slide) -> dict[str, Any]:
    record = {name: getattr(slide, name) for name in SLIDE_FEATURES}
    for name in ("counts", "details"):
        record[name] = json.dumps(dict(record[name]), sort_keys=True)
    return record


def record_slide(record: Mapping[str, Any]) -> Slide:
    fields = dict(record)
    fields["mpp"] = round(record["mpp"], 6)  # stored as float32
    for name in ("counts", "details"):
        fields[name] = json.loads(record[name])
    return Slide(**fields)


def patch_record(patch: Patch) -> dict[str, Any]:
    return {name: getattr(patch, name) for name in PATCH_FEATURES} | {"cell_ids": list(patch.cell_ids)}


def record_patch(record: Mapping[str, Any]) -> Patch:
    fields = dict(record)
    fields["cell_ids"] = tuple(record["cell_ids"])
    for name in ("mpp", "qc_score"):
        fields[name] = round(record[name], 6)
    return Patch(**fields)


def read_slides(out: Path, split: str | None = None) -> Iterator[Slide]:
    """The slides of OUT/slides, one split or all."""
    for name in [split] if split else read_manifest(out / "slides")["splits"]:
        yield from map(record_slide, open_dataset(out / "slides", name))


def read_patches(out: Path, split: str | None = None) -> Iterator[Patch]:
    """The patches of OUT/patches, one split or all."""
    for name in [split] if split else read_manifest(out / "patches")["splits"]:
        yield from map(record_patch, open_dataset(out / "patches", name))
