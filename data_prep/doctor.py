"""`pbs data doctor`: is the installation fit, do the slides of a folder open to their last tile, is a dataset whole?

Every finding is one sentence: what is wrong, where, and what to do. Nothing is changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import openslide

from data_prep import crops, io, split
from data_prep.progress import progress
from data_prep.schema import DataError
from data_prep.slide_table import load
from data_prep.slide_units import Look, LookUnit, look
from data_prep.slides import open_slide

NEEDED = ("array-record", "openslide-python", "openslide-bin", "pillow", "scikit-image", "scipy", "tensorflow-datasets")
OPTIONAL = {"imagecodecs": "JPEG and JPEG-2000 TIFFs that OpenSlide refuses", "jax": "naming cells and features"}
OPEN_FILES, FREE_GB = 256, 5.0
END_BYTES = 1 << 20  # of the beginning and the end, which with the size tell equal files apart


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """`bad`: something to repair; else a remark."""

    bad: bool
    text: str


def installation() -> Iterator[Finding]:
    """Packages, OpenSlide's library, limits of the machine."""
    for name in NEEDED:
        try:
            yield Finding(False, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(True, f"{name} is not installed: pip install {name}")
    library = openslide.__library_version__
    old = int(library.split(".")[0]) < 4
    yield Finding(old, f"OpenSlide library {library}{' is older than 4: pip install openslide-bin' if old else ''}")
    for name, use in OPTIONAL.items():
        try:
            yield Finding(False, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(False, f"{name} is not installed; it is for {use}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files < OPEN_FILES
    yield Finding(
        few, f"{files} open files allowed{f', fewer than {OPEN_FILES}: raise it with ulimit -n' if few else ''}"
    )
    yield Finding(False, f"{len(os.sched_getaffinity(0))} processors")


def slides(root: Path, table: Path | None) -> Iterator[Finding]:
    """Opens every slide, resolves its scale, decodes its last pixels (a file cut short shows there), and looks for
    equal files. Raises DataError for a table that cannot be used."""
    rows = load(root, table)
    same: dict[str, str] = {}
    for row in progress(rows, len(rows), "slides"):
        found = look(LookUnit(root, row))
        if not isinstance(found, Look):
            yield Finding(True, f"{found.id}: {found.reason}: {found.detail}")
            continue
        width, height = found.size
        try:
            with open_slide(root / row.path) as slide:
                slide.read(max(width - 512, 0), max(height - 512, 0), 512, 512)
        except DataError as error:
            yield Finding(True, f"{row.slide_id}: its last tile does not decode ({error}): copy it again")
        if found.facts["odd"]:
            yield Finding(True, f"{row.slide_id}: {found.facts['odd']}")
        first = same.setdefault(_fingerprint(root / row.path), row.slide_id)
        if first != row.slide_id:
            yield Finding(True, f"{row.slide_id} and {first} are the same file: leave one out of the table")
        scale = f"{found.scale.mpp:g} um/px ({found.scale.source})"
        note = f"; {found.scale.note}" if found.scale.note else ""
        yield Finding(bool(note), f"{row.slide_id}: {width}x{height} px, {scale}, {found.facts['vendor']}{note}")


def _fingerprint(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(END_BYTES)
        file.seek(max(size - END_BYTES, 0))
        return hashlib.sha256(start + file.read() + str(size).encode()).hexdigest()


def dataset(out: Path) -> Iterator[Finding]:
    """Verifies each dataset below `out`, decodes every picture, and looks for leaks between splits."""
    found = sorted(path.parent for path in out.glob(f"*/{io.VERSION}"))
    if not found:
        yield Finding(True, f"{out} holds no dataset: give the --out of `pbs data run`")
        return
    for directory in found:
        if problems := io.verify(directory):
            yield from (Finding(True, problem) for problem in problems)
            continue
        manifest = io.read_manifest(directory)
        yield Finding(False, f"{manifest['dataset']}: whole, {manifest['identity']['kept']} records")
        if "image" in manifest["features"]:
            yield from _pictures(directory, manifest["id_feature"], list(manifest["splits"]))
    if (out / "cells" / io.VERSION).is_dir():
        yield from (Finding(True, leak) for leak in split.leaks(out))
    free = shutil.disk_usage(out).free / 1e9
    yield Finding(free < FREE_GB, f"{free:.1f} GB free{' there: make room' if free < FREE_GB else ''}")


def _pictures(directory: Path, id_feature: str, splits: list[str]) -> Iterator[Finding]:
    for name in splits:
        source = io.open_dataset(directory, name)
        for record in progress(source, len(source), f"pictures, {directory.name} {name}"):
            try:
                crops.decode_rgb(record["image"])
            except DataError as error:
                yield Finding(True, f"{directory.parent.name} {record[id_feature]}: {error}")
