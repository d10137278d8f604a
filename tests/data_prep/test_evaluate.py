"""Scores of the cell finder on annotated fields, of a classifier, and of a job's differentials."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep import evaluate
from data_prep.schema import WHITE_CELL_CLASSES, Box, DataError
from data_prep.slide_datasets import Slide, read_slides
from data_prep.slide_units import is_cut
from pbs_jax.cli import main


def test_errors_are_in_points_of_the_share(slide_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(iter(read_slides(slide_job)))
    counted = {"Neutrophil": 6, "Lymphocyte": 3, "Basophil": 1}
    slide: Slide = dataclasses.replace(one, slide_id="m", counts=counted)
    monkeypatch.setattr(evaluate, "read_slides", lambda job, split: [slide])
    there = dict.fromkeys(WHITE_CELL_CLASSES, 0) | {"Neutrophil": 5, "Lymphocyte": 5}
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / "m.json").write_text(json.dumps({"counts": there, "cells": []}))
    lines = evaluate.differential(slide_job, tmp_path)
    assert lines[0].endswith("10 white cells counted of 10 there")
    errors = {line.split(":")[0].strip(): float(line.split()[-2]) for line in lines[1:]}
    assert errors == {"Neutrophil": 10.0, "Lymphocyte": 20.0, "Monocyte": 0.0, "Eosinophil": 0.0, "Basophil": 10.0}


def test_slides_without_a_truth_are_no_zeros(slide_job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "read_slides", lambda job, split: list(read_slides(slide_job)))
    with pytest.raises(DataError, match=r"truth/.*json is missing"):
        evaluate.differential(slide_job, tmp_path)


def test_the_command_asks_for_the_truth(slide_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "evaluate", "--task", "differential", "--root", str(slide_job)]) == 1
    assert "needs --truth" in capsys.readouterr().err


def test_a_classifier_is_told_by_class_calibration_and_confusions() -> None:
    truth = np.array(["Neutrophil"] * 20 + ["Basophil"] * 4)
    chosen = np.array(["Neutrophil"] * 15 + ["Monocyte"] * 5 + ["Basophil"] * 4)
    confidence = np.where(truth == chosen, 1.0, 0.6)
    lines = "\n".join(evaluate.subtype_lines(truth, chosen, confidence))
    assert "accuracy 0.792 " in lines and "macro over 1 classes with at least 20 cells 0.750" in lines
    assert "Neutrophil: recall 0.750" in lines and "Basophil: recall 1.000" in lines and "Monocyte: recall" not in lines
    assert "mean confidence 0.917, error 0.125" in lines  # five cells are named with 0.6 and wrong
    assert "confidence >= 0.8: 79% named, 1.000" in lines and "5 Neutrophil called Monocyte" in lines


def test_a_classifiers_score_needs_one(slide_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "evaluate", "--task", "subtype", "--root", str(slide_job)]) == 1
    assert "needs --backbone" in capsys.readouterr().err


def test_boxes_that_the_edge_cuts_and_nobody_annotated_are_told_apart() -> None:
    field = (200, 100)
    inside, above, below = Box(50, 20, 80, 50), Box(10, 0, 40, 20), Box(100, 70, 130, 100)
    hits = evaluate.matched([inside, below], [above, inside, below])
    assert hits == {1, 2} and is_cut(above, field) and is_cut(below, field) and not is_cut(inside, field)
    line = evaluate.Score("x", right=2, truth=2, found=3, cut=1).line()
    assert line.endswith("precision 0.667 (n 3), 1.000 without 1 that the edge cuts")


def test_fields_where_finder_and_annotation_part_can_be_looked_at(shared: Path, tmp_path: Path) -> None:
    real, folder = shared / "data/fields/bccd", tmp_path / "fields/bccd"
    (folder / "ImageSets/Main").mkdir(parents=True)
    for name in ("Annotations", "JPEGImages"):
        (folder / name).symlink_to(real / name)
    listed = (real / "ImageSets/Main/test.txt").read_text().split()
    agreeing, parting = listed[0], listed[13]
    for part, names in (("train", agreeing), ("val", agreeing), ("test", f"{agreeing}\n{parting}")):
        (folder / f"ImageSets/Main/{part}.txt").write_text(names)
    sheet = tmp_path / "parted.png"
    train, _, test = evaluate.white_cells(tmp_path, sheet)
    assert train.right == train.truth == train.found == 1
    assert (test.right, test.truth, test.found) == (1, 2, 2)
    with Image.open(sheet) as picture:  # one field, three columns
        assert picture.width == 3 * evaluate.ZOOM * round(640 * evaluate.BCCD)


@pytest.mark.parametrize(
    ("name", "picture", "read", "white", "red"),
    [
        ("draaslan", "image-95.png", evaluate.draaslan_fields, 2, 24),
        ("warty_pig_cc0", "44_JPG.rf.3a5a6e644198b964e85ef06005563ac2.jpg", evaluate.pig_fields, 3, 0),
    ],
)
def test_boxes_of_the_other_fields_lie_where_their_cells_do(
    name: str, picture: str, read: Any, white: int, red: int, shared: Path, tmp_path: Path
) -> None:
    real = shared / "data/fields" / name
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / picture).symlink_to(real / "images" / picture)
    (tmp_path / "labels").symlink_to(real / "labels")
    (field,) = read(tmp_path)
    score, _ = evaluate.score_white(name, [field])
    assert score.right == score.truth == score.found == white and len(field.boxes.get("RBC", [])) == red


def test_sets_without_a_goal_are_reported_with_what_is_known_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "DRAWN", 1)
    monkeypatch.setattr(evaluate, "DRAWN_SIDE", 512)
    for task in ("white_cells", "red_cells"):
        monkeypatch.setattr(evaluate, task, lambda root, show=None: [])
    draaslan, pig, drawn = evaluate.TASKS["white_cells"](tmp_path, evaluate.Options())
    assert draaslan.endswith("draaslan is missing") and pig.endswith("warty_pig_cc0 is missing")
    assert drawn.startswith("reported: white cells, drawn smears: recall 1.000 ") and drawn.endswith("1.000 (n 8)")
    *_, drawn = evaluate.TASKS["red_cells"](tmp_path, evaluate.Options())
    assert "red cells, drawn smears: no truth: counted only; " in drawn and "found in 1 fields" in drawn
