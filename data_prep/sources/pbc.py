"""PBC (Acevedo et al. 2020) single-cell pictures with WBCAtt's eleven attributes and its authors' split.

ROOT/cells/pbc_barcelona/<Class>/*.jpg and ROOT/annotations/wbcatt/selected_2500.csv. The five white-cell classes carry
attributes; ImmatureGranulocyte, Erythroblast and Platelet become `Others`, without attributes or a given split.
"""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator
from pathlib import Path

from data_prep.schema import ATTRIBUTES, OTHERS, SPLITS, WHITE_CELL_CLASSES, DataError
from data_prep.sources import (
    IMAGE_SUFFIXES,
    Listing,
    Reject,
    SourceCell,
    composed,
    is_hidden,
    reject_clashes,
    relative,
    stem_id,
)

IMAGES = "cells/pbc_barcelona"
ANNOTATIONS = "annotations/wbcatt/selected_2500.csv"
LABELS = {name: name for name in WHITE_CELL_CLASSES} | dict.fromkeys(
    ("ImmatureGranulocyte", "Erythroblast", "Platelet"), OTHERS
)
LICENCES = (
    "PBC_dataset_normal_DIB, Acevedo et al. 2020, doi:10.17632/snkd93bnjr.1, CC BY 4.0",
    "WBCAtt, Tsutsui et al. 2023, arXiv:2306.13531, MIT",
)
Row = dict[str, str]


def read_annotations(path: Path) -> dict[tuple[str, str], Row]:
    """(class, file name) -> row. Raises DataError for a missing file or column, or a repeated picture."""
    if not path.is_file():
        raise DataError(f"{path} is missing: --root must be the folder that holds {ANNOTATIONS}")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = {"split", "img_name", "label", *ATTRIBUTES} - set(reader.fieldnames or ())
        if missing:
            raise DataError(f"{path} lacks the columns {', '.join(sorted(missing))}")
        rows: dict[tuple[str, str], Row] = {}
        for number, row in enumerate(reader, start=2):
            key = (row["label"], composed(row["img_name"]))
            if key in rows:
                raise DataError(f"{path} line {number} repeats the picture {key[1]}: delete one of the two lines")
            rows[key] = row
    return rows


def listing(root: Path) -> Listing:
    """All pictures under ROOT/cells/pbc_barcelona. Raises DataError when the folder is missing or holds none."""
    folder = root / IMAGES
    if not folder.is_dir():
        raise DataError(f"{folder} is missing: --root must be the folder that holds {IMAGES}")
    rows = read_annotations(root / ANNOTATIONS)
    found = list(_items(root, folder, rows))
    cells, clashes = reject_clashes([item for item in found if isinstance(item, SourceCell)])
    rejects = [item for item in found if isinstance(item, Reject)] + clashes
    if not cells:
        reasons = "; ".join(reject.detail for reject in rejects[:3]) or "it has no class folders"
        raise DataError(f"{folder} holds no usable picture: {reasons}")
    hidden = sum(is_hidden(path) for path in folder.rglob("*"))
    pictured = {(path.parent.name, composed(path.name)) for path in folder.glob("*/*")}
    notes = [f"{hidden} hidden or system files ignored"] if hidden else []
    if unpictured := sum(key not in pictured for key in rows):
        notes.append(f"{unpictured} lines of {ANNOTATIONS} have no picture")
    if bare := sum(cell.label != OTHERS and not cell.attributes for cell in cells):
        notes.append(f"{bare} pictures of the five classes have no line in {ANNOTATIONS}, so no attributes")
    return Listing(cells, rejects, notes, LICENCES)


def _items(root: Path, folder: Path, rows: dict[tuple[str, str], Row]) -> Iterator[SourceCell | Reject]:
    for path in sorted(folder.iterdir()):
        if is_hidden(path):
            continue
        if path.is_file():
            if path.suffix.lower() in IMAGE_SUFFIXES:
                detail = f"{relative(path, root)} lies in no class folder: move it into one of {', '.join(LABELS)}"
                yield Reject(relative(path, root), "no label folder", detail)
            continue
        members = [member for member in sorted(path.iterdir()) if not is_hidden(member)]
        if not members:
            yield Reject(
                relative(path, root), "empty folder", f"folder {relative(path, root)} is empty: fill or delete it"
            )
        for member in members:
            yield _item(root, path.name, member, rows)


def _item(root: Path, folder: str, path: Path, rows: dict[tuple[str, str], Row]) -> SourceCell | Reject:
    where = relative(path, root)
    if folder not in LABELS:
        near = difflib.get_close_matches(folder.strip().casefold(), [name.casefold() for name in LABELS], n=1)
        hint = next((f"did you mean {name}?" for name in LABELS if near and name.casefold() == near[0]), "")
        known = hint or f"the known ones are {', '.join(LABELS)}"
        return Reject(where, "unknown label folder", f'{where} lies in the unknown label folder "{folder}": {known}')
    if not path.is_file() or path.suffix.lower() not in IMAGE_SUFFIXES:
        return Reject(where, "not an image file", f"{where} is not an image file: remove it")
    row = rows.get((folder, composed(path.name)))
    attributes = {name: row[name] for name in ATTRIBUTES} if row else {}
    odd = [f"{name} {value!r}" for name, value in attributes.items() if value not in ATTRIBUTES[name]]
    if row and row["split"] not in SPLITS:
        odd.append(f"split {row['split']!r}")
    if odd:
        return Reject(where, "unknown annotation value", f"{where} is annotated with the unknown {', '.join(odd)}")
    return SourceCell(
        cell_id=f"PBC:{folder}/{stem_id(path)}",
        label=LABELS[folder],
        path=where,
        split=row["split"] if row else "",
        attributes=attributes,
        comments="" if folder in WHITE_CELL_CLASSES else folder,
    )
