"""`pbs data inspect`: one record of any dataset of a job and the chain it belongs to: slide, patch, cells, questions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.datasets import record_qa
from data_prep.io import RecordSource, open_dataset, read_manifest
from data_prep.schema import DataError, shown_options

CHAIN = ("slides", "patches", "cells", "cell_qa", "slide_qa")


def describe(out: Path, id: str) -> tuple[list[str], bytes]:
    """The lines to print about a record, and its picture (b"" when it has none); of a rejected one why it is none.

    Raises:
        DataError: neither a dataset under `out` nor its rejects.jsonl has this id.
    """
    for name in CHAIN:
        for source in _sources(out, name):
            if id in source.ids:
                record = source[source.position(id)]
                image = record.pop("image", b"")
                lines = [f"{name}, split {source.split}", *(f"{key}: {value}" for key, value in record.items())]
                return lines + list(_chain(out, name, record, source.split)), image
    if lines := list(_rejected(out / "rejects.jsonl", id)):
        return lines, b""
    raise DataError(
        f'{out} has no record "{id}" in {", ".join(CHAIN)}: ids are listed in the ids.txt of each dataset and in rejects.jsonl'
    )


def _rejected(path: Path, id: str) -> Iterator[str]:
    for reject in map(json.loads, path.read_text().splitlines() if path.is_file() else ()):
        if reject["id"] == id:
            yield f"rejected, {reject['reason']}: {reject['detail']}"


def _sources(out: Path, name: str, split: str = "") -> Iterator[RecordSource]:
    if (out / name).is_dir():
        for found in read_manifest(out / name)["splits"]:
            if not split or found == split:
                yield open_dataset(out / name, found)


def _chain(out: Path, name: str, record: Mapping[str, Any], split: str) -> Iterator[str]:
    """Whose part the record is, what it holds, and what is asked about it."""
    if name in ("cell_qa", "slide_qa"):
        yield f"asked about: {record['image_id']}"
        return
    if record.get("slide_id") and name != "slides":
        for source in _sources(out, "slides", split):
            slide = source[source.position(record["slide_id"])]
            yield f"of slide {slide['slide_id']}: {slide['width']}x{slide['height']} px, {slide['mpp']:g} um/px"
    if name == "cells" and record["patch_id"]:
        for source in _sources(out, "patches", split):
            patch = source[source.position(record["patch_id"])]
            yield f"in patch {patch['patch_id']}: QC {patch['qc_score']:.3f}, {len(patch['cell_ids'])} cells"
    own = record[{"slides": "slide_id", "patches": "patch_id", "cells": "cell_id"}[name]]
    for source in (found for kind in ("cell_qa", "slide_qa") for found in _sources(out, kind, split)):
        for qa in map(record_qa, source):
            if qa.image_id == own:
                options = f" [{' | '.join(shown_options(qa))}]" if qa.options else ""
                yield f"{qa.question_type}: {qa.question}{options} -> {qa.answer}"
