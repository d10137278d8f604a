"""Sheets on which experts label crops: a sample stratified by slide (the paper's 20,000, 3.1.2), and a smaller one by the
machine's class that says how far the machine agrees with them (the paper's 300).

The pages are for looking, the CSV beside them for writing; neither shows the machine's label. Labels come back by id:
`labelled` writes the labelled cells as a dataset of their own, `agreement` compares them with the machine's labels.
"""

from __future__ import annotations

import csv
import dataclasses
import io as text_io
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep import html, io
from data_prep.datasets import CELL_FEATURES, cell_record, read_cells
from data_prep.files import atomic_write, sha256_file
from data_prep.review import Item, pictures, read_sheet, sample
from data_prep.schema import CELL_LABELS, NOT_WHITE, OTHERS, Cell, DataError
from data_prep.stats import wilson

PURPOSES = {"training": 20_000, "acceptance": 300}
CHOICES = (*CELL_LABELS, *NOT_WHITE)
SHEET = "labels.csv"
CELLS_A_PAGE = 400
_COLUMNS = ("id", "label", "comments")
_PICTURE_SIDE = 112


def write_label_sheet(root: Path, out: Path, purpose: str, count: int | None = None, seed: int = 0) -> list[Item]:
    """Writes OUT/labels.csv and OUT/labels-*.html for cells of ROOT/cells; returns the sample.

    Args:
        purpose: "training", slides as even as they allow, or "acceptance", the machine's classes as even.
        count: crops; default `PURPOSES`.

    Raises:
        DataError: no cells, no machine labels to accept, or a sheet that already holds labels.
    """
    sheet = out / SHEET
    if sheet.is_file() and any(row["label"] for row in read_sheet(sheet, _COLUMNS)):
        raise DataError(f"{sheet} holds labels: name another --out, or move it")
    cells = read_cells(root)
    if purpose == "acceptance":
        items = [Item(c.cell_id, c.label, c.cell_id, "") for c in cells if c.label and c.label_source == "model"]
    else:
        items = [Item(c.cell_id, c.slide_id or c.split, c.cell_id, "") for c in cells]
    if not items:
        raise DataError(f"{root}/cells has no cell that a model has labelled: run the slide job with --backbone")
    chosen = sample(items, PURPOSES[purpose] if count is None else count, seed)
    if purpose == "acceptance":
        chosen.sort(key=lambda item: item.id)  # in the order of classes the page would tell them
    text = text_io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    writer.writerows((item.id, "", "") for item in chosen)
    atomic_write(sheet, text.getvalue())
    for number, start in enumerate(range(0, len(chosen), CELLS_A_PAGE)):
        part = chosen[start : start + CELLS_A_PAGE]
        atomic_write(out / f"labels-{number:03d}.html", _page(part, start, len(chosen), root))
    return chosen


def _page(items: Sequence[Item], start: int, total: int, root: Path) -> str:
    found = pictures(root, {item.id for item in items})
    grid = html.image_grid([(found[item.id], item.id) for item in items], _PICTURE_SIDE)
    lead = f"{start + 1}-{start + len(items)} of {total}. Write into {SHEET}, column label: {', '.join(CHOICES)}."
    return html.render_page("Cells to label", [html.Section("Crops", grid)], subtitle=lead)


def read_labels(sheet: Path) -> dict[str, tuple[str, str]]:
    """Id -> (class, comments) of the rows that are filled; a type in `NOT_WHITE` becomes Others with that comment.

    Raises DataError naming the line: an unknown label, a repeated id, or no label at all.
    """
    labels: dict[str, tuple[str, str]] = {}
    choices = {name.casefold(): name for name in CHOICES}
    seen: set[str] = set()
    for number, row in enumerate(read_sheet(sheet, _COLUMNS), 2):
        if row["id"] in seen:
            raise DataError(f"{sheet}:{number} names {row['id']} a second time")
        seen.add(row["id"])
        if not (given := row["label"].strip()):
            continue
        if given.casefold() not in choices:
            raise DataError(f'{sheet}:{number} label "{given}" is none of {", ".join(CHOICES)}')
        name = choices[given.casefold()]
        labels[row["id"]] = (OTHERS, name) if name in NOT_WHITE else (name, row["comments"].strip())
    if not labels:
        raise DataError(f"{sheet} holds no label yet: fill the column label")
    return labels


def labelled(root: Path, sheet: Path, out: Path) -> str:
    """Writes the labelled cells of ROOT/cells as OUT/cells, label source "human"; returns the content id.

    Raises DataError for a label whose cell is not in ROOT, or for OUT being ROOT.
    """
    if out.resolve() == root.resolve():
        raise DataError(f"--out {out} is --root: the machine's labels stay, name another folder")
    labels = read_labels(sheet)
    cells = [
        dataclasses.replace(
            cell, label=labels[cell.cell_id][0], comments=labels[cell.cell_id][1], label_source="human", confidence=1.0
        )
        for cell in _cells(root, labels)
    ]
    manifest = io.read_manifest(root / "cells")
    return io.write_dataset(
        out,
        "cells",
        {**CELL_FEATURES, "image": io.FeatureSpec.from_json(manifest["features"]["image"])},
        map(cell_record, cells),
        id_feature="cell_id",
        config={"source": "labels"},
        inputs={"cells": manifest["content_id"], "labels": sha256_file(sheet)},
        records_in=len(labels),
        split_level=manifest["split"]["level"],
        licences=manifest["licences"],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Agreement:
    """Of the crops that the machine calls `label`, how many the experts call the same. `low`, `high`: Wilson, 95 %."""

    label: str
    agreed: int
    total: int
    low: float
    high: float


def agreement(root: Path, sheet: Path) -> list[Agreement]:
    """The whole first, then by the machine's class. Raises DataError as `read_labels`."""
    labels = read_labels(sheet)
    pairs = [(cell.label, labels[cell.cell_id][0] == cell.label) for cell in _cells(root, labels)]
    names = ["all", *(name for name in CELL_LABELS if any(label == name for label, _ in pairs))]
    rows = []
    for name in names:
        of = [same for label, same in pairs if name in ("all", label)]
        rows.append(Agreement(name, sum(of), len(of), *wilson(sum(of), len(of))))
    return rows


def _cells(root: Path, labels: Mapping[str, tuple[str, str]]) -> list[Cell]:
    found = [cell for cell in read_cells(root) if cell.cell_id in labels]
    if lost := sorted(labels.keys() - {cell.cell_id for cell in found}):
        raise DataError(f"{root}/cells has no cell {lost[0]} ({len(lost)} such): give the --root of the sheet")
    return found
