"""Label sheets: a fair sample by slide, blind to the machine, labels back by id, agreement with its interval."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from data_prep import label_sheet
from data_prep.datasets import CELL_FEATURES, cell_record, read_cells
from data_prep.io import read_manifest, write_dataset
from data_prep.schema import WHITE_CELL_CLASSES, Cell, DataError
from data_prep.stats import wilson
from pbs_jax import cli
from tests.data_prep.cell_job import picture


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty machine-labelled cells, most of them of one slide."""
    out = tmp_path_factory.mktemp("labels")
    data = picture()
    cells = [
        Cell(f"S:{k:02d}", "train", WHITE_CELL_CLASSES[k % 5], "model", data, slide_id="big" if k < 40 else f"s{k % 2}")
        for k in range(50)
    ]
    write_dataset(out, "cells", CELL_FEATURES, map(cell_record, cells), id_feature="cell_id", config={}, inputs={})
    return out


def fill(sheet: Path, labels: dict[str, str]) -> None:
    with sheet.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["label"] = labels.get(row["id"], "")
    with sheet.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_sample_is_even_over_slides_and_blind(root: Path, tmp_path: Path):
    args = ["data", "labels", "--root", str(root), "--out", str(tmp_path), "--count", "12"]
    assert cli.main(args) == 0
    with (tmp_path / label_sheet.SHEET).open(newline="") as file:
        rows = list(csv.DictReader(file))
    slides = {cell.cell_id: cell.slide_id for cell in read_cells(root)}
    assert Counter(slides[row["id"]] for row in rows) == {"big": 4, "s0": 4, "s1": 4}
    page = (tmp_path / "labels-000.html").read_text()
    body = page.partition('<div class="grid">')[2]
    assert body.count("data:image/jpeg") == 12 and not any(name in body for name in WHITE_CELL_CLASSES)
    assert not any(row["label"] for row in rows)


def test_pages_are_cut(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(label_sheet, "CELLS_A_PAGE", 20)
    label_sheet.write_label_sheet(root, tmp_path, "training")
    counts = [path.read_text().count("data:image/jpeg") for path in sorted(tmp_path.glob("labels-*.html"))]
    assert counts == [20, 20, 10]


def test_labels_come_back_as_a_dataset(root: Path, tmp_path: Path):
    label_sheet.write_label_sheet(root, tmp_path, "training")
    fill(tmp_path / label_sheet.SHEET, {"S:00": "basophil", "S:07": "Platelet", "S:41": "Artifact"})
    args = ["data", "labels", "--root", str(root), "--labels", str(tmp_path / label_sheet.SHEET)]
    assert cli.main([*args, "--out", str(tmp_path / "made")]) == 0
    found = {c.cell_id: (c.label, c.comments, c.label_source) for c in read_cells(tmp_path / "made")}
    assert found == {
        "S:00": ("Basophil", "", "human"),
        "S:07": ("Others", "Platelet", "human"),
        "S:41": ("Artifact", "", "human"),
    }
    assert read_manifest(tmp_path / "made" / "cells")["inputs"]["cells"] == read_manifest(root / "cells")["content_id"]
    with pytest.raises(DataError, match="holds labels"):
        label_sheet.write_label_sheet(root, tmp_path, "training")
    with pytest.raises(DataError, match="is --root"):
        label_sheet.labelled(root, tmp_path / label_sheet.SHEET, root)


def test_acceptance_is_agreement_by_the_machines_class(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    chosen = label_sheet.write_label_sheet(root, tmp_path, "acceptance", 25)
    assert set(Counter(item.stratum for item in chosen).values()) == {5}
    sheet = tmp_path / label_sheet.SHEET
    wrong = next(item for item in chosen if item.stratum == "Monocyte")
    fill(sheet, {item.id: "Others" if item is wrong else item.stratum for item in chosen})
    rows = {row.label: row for row in label_sheet.agreement(root, sheet)}
    assert rows["all"] == label_sheet.Agreement("all", 24, 25, *wilson(24, 25))
    assert rows["Monocyte"].agreed == 4 and rows["Basophil"].agreed == 5
    assert cli.main(["data", "labels", "--root", str(root), "--labels", str(sheet)]) == 0
    assert "24 of   25  0.960" in capsys.readouterr().out


def test_bad_sheets_are_named(root: Path, tmp_path: Path):
    sheet = tmp_path / label_sheet.SHEET
    for content, message in (
        ("id,label,comments\nS:00,Neutro,\n", 'label "Neutro" is none of'),
        ("id,label,comments\nS:00,Monocyte,\nS:00,Monocyte,\n", "a second time"),
        ("id,label,comments\nS:00,,\n", "no label yet"),
        ("id,comments\nS:00,\n", "lacks the column label"),
        ("id,label,comments\nT:00,Monocyte,\n", "has no cell T:00"),
    ):
        sheet.write_text(content)
        with pytest.raises(DataError, match=message):
            label_sheet.agreement(root, sheet)


def test_unlabelled_cells_have_nothing_to_accept(root: Path, tmp_path: Path):
    cells = [dataclasses.replace(cell, label="") for cell in read_cells(root)]
    write_dataset(tmp_path, "cells", CELL_FEATURES, map(cell_record, cells), id_feature="cell_id", config={}, inputs={})
    with pytest.raises(DataError, match="that a model has labelled"):
        label_sheet.write_label_sheet(tmp_path, tmp_path / "sheet", "acceptance")
