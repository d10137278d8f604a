"""BCCD fields (Shenggan/BCCD_Dataset): white-cell boxes in VOC XML, one subtype per picture in labels.csv.

ROOT/fields/bccd/{JPEGImages,Annotations,labels.csv}. Only pictures with exactly one white-cell box and one subtype say
which cell is which; the others are rejects. All of it is out-of-domain test data.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from data_prep.schema import WHITE_CELL_CLASSES, Box, DataError
from data_prep.sources import IMAGE_SUFFIXES, Listing, Reject, SourceCell, is_hidden, reject_clashes, relative, stem_id

FOLDER = "fields/bccd"
LICENCES = ("BCCD_Dataset, Shenggan 2017, MIT",)
SUBTYPES = {name.upper(): name for name in WHITE_CELL_CLASSES}


def read_labels(path: Path) -> dict[str, list[str]]:
    """Picture stem -> subtypes as written. Raises DataError for a missing file or column."""
    if not path.is_file():
        raise DataError(f"{path} is missing: --root must be the folder that holds {FOLDER}")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if not {"Image", "Category"} <= set(reader.fieldnames or ()):
            raise DataError(f"{path} lacks the columns Image and Category")
        rows = [(row["Image"].strip(), row["Category"]) for row in reader]
    if bad := [image for image, _ in rows if not image.isdigit()]:
        raise DataError(f'{path} has the Image "{bad[0]}"; it must be a picture number')
    return {f"BloodImage_{int(image):05d}": [p.strip() for p in text.split(",") if p.strip()] for image, text in rows}


def read_boxes(path: Path, kind: str = "WBC") -> list[tuple[float, float, float, float]]:
    """Boxes of white cells or another kind (xmin, ymin, xmax, ymax) of a VOC file, equal ones once. Raises DataError when it is no VOC."""
    try:
        objects = ElementTree.parse(path).getroot().iter("object")
        named = [item for item in objects if (item.findtext("name") or "").strip().upper() == kind.upper()]
        texts = [[item.findtext(f"bndbox/{side}") or "" for side in ("xmin", "ymin", "xmax", "ymax")] for item in named]
        boxes = [(a, b, c, d) for a, b, c, d in dict.fromkeys(tuple(map(float, text)) for text in texts)]
        if bad := [box for box in boxes if not all(map(math.isfinite, box))]:
            raise ValueError(f"the box {bad[0]} is not finite")
        return boxes
    except (ElementTree.ParseError, ValueError, OSError) as error:
        raise DataError(f"{path.name} is not readable as VOC boxes ({error})") from error


def listing(root: Path) -> Listing:
    """One item per picture of ROOT/fields/bccd/JPEGImages. Raises DataError if the folder is missing or has none."""
    folder = root / FOLDER / "JPEGImages"
    if not folder.is_dir():
        raise DataError(f"{folder} is missing: --root must be the folder that holds {FOLDER}")
    labels = read_labels(root / FOLDER / "labels.csv")
    paths = sorted(folder.iterdir())
    found = list(_items(root, [path for path in paths if not is_hidden(path)], labels))
    cells, clashes = reject_clashes([item for item in found if isinstance(item, SourceCell)])
    rejects = [item for item in found if isinstance(item, Reject)] + clashes
    if not cells:
        reasons = "; ".join(reject.detail for reject in rejects[:3]) or "it is empty"
        raise DataError(f"{folder} holds no usable picture: {reasons}")
    hidden = sum(map(is_hidden, paths))
    stems = {path.stem for path in paths}
    notes = [f"{hidden} hidden or system files ignored"] if hidden else []
    if unpictured := sum(stem not in stems for stem, subtypes in labels.items() if subtypes):
        notes.append(f"{unpictured} labelled lines of labels.csv have no picture")
    return Listing(cells, rejects, notes, LICENCES)


def _items(root: Path, paths: list[Path], labels: dict[str, list[str]]) -> Iterator[SourceCell | Reject]:
    for path in paths:
        where = relative(path, root)
        if not path.is_file() or path.suffix.lower() not in IMAGE_SUFFIXES:
            yield Reject(where, "not an image file", f"{where} is not an image file: remove it")
            continue
        annotation = root / FOLDER / "Annotations" / f"{path.stem}.xml"
        subtypes = labels.get(path.stem, [])
        if not annotation.is_file():
            yield Reject(where, "no annotation file", f"{where} has no file {relative(annotation, root)}")
        elif not subtypes:
            yield Reject(where, "no subtype", f"{where} has no subtype in labels.csv")
        elif len(subtypes) > 1:
            yield Reject(
                where, "several subtypes", f"{where} has the subtypes {', '.join(subtypes)}: which box is which?"
            )
        elif subtypes[0].upper() not in SUBTYPES:
            yield Reject(where, "unknown subtype", f'{where} has the unknown subtype "{subtypes[0]}"')
        else:
            yield _boxed(where, path, annotation, SUBTYPES[subtypes[0].upper()])


def _boxed(where: str, path: Path, annotation: Path, label: str) -> SourceCell | Reject:
    try:
        boxes = read_boxes(annotation)
    except DataError as error:
        return Reject(where, "unreadable boxes", f"{where}: {error}")
    if len(boxes) != 1:
        reason = "several white-cell boxes" if boxes else "no white-cell box"
        return Reject(
            where, reason, f"{where} has {len(boxes)} white-cell boxes; exactly one tells which cell is meant"
        )
    box = Box(*map(round, boxes[0]))
    return SourceCell(
        cell_id=f"BCCD:{stem_id(path)}:0",
        label=label,
        path=where,
        box=box,
        split="test",
        domain="ood",
        slide_id="",
        comments="",
    )
