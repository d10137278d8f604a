"""`pbs bench ask` counts right answers, refusals and attention; the models are stood in for, the files are real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.picture import Preparation
from data_prep.schema import DataError
from data_prep.slide_qa_bank import DOMINANT, WORDINGS
from data_prep.slide_table import SlideRow
from pbs_jax.ask import evaluate
from pbs_jax.ask.evidence import SlideAttention


@pytest.fixture
def mosaics(tmp_path: Path) -> Path:
    """Four test slides of one known class each, one where two classes tie, one of another split."""
    (tmp_path / "truth").mkdir()
    lines = ["path,slide_id,split,mpp"]
    counts = [{"Neutrophil": 5, "Basophil": 1}, {"Neutrophil": 1, "Basophil": 5}, {"Neutrophil": 0, "Basophil": 3}]
    counts += [{"Neutrophil": 4, "Basophil": 2}, {"Neutrophil": 2, "Basophil": 2}, {"Neutrophil": 9, "Basophil": 0}]
    for number, count in enumerate(counts):
        lines.append(f"images/s{number}.tiff,s{number},{'train' if number == 5 else 'test'},0.25")
        cells = [{"box": [520, 10, 560, 50]}]
        (tmp_path / "truth" / f"s{number}.json").write_text(json.dumps({"counts": count, "cells": cells}))
    (tmp_path / "slides.csv").write_text("\n".join(lines) + "\n")
    for folder in ("images", "background"):
        (tmp_path / folder).mkdir()
        for number in range(len(counts)):
            (tmp_path / folder / f"s{number}.tiff").touch()
    (tmp_path / "background.csv").write_text("\n".join(lines).replace("images/", "background/") + "\n")
    return tmp_path


def test_the_report_counts_what_was_said(mosaics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"s0": "Neutrophil", "s1": "Basophil", "s2": "Neutrophil", "s3": None}

    # Two patches of four places of 256 px; the cell covers 40 x 40 px of the second's first place.
    shares = np.array([[[0.1, 0.05], [0.05, 0.05]], [[0.6, 0.05], [0.05, 0.05]]])
    attention = SlideAttention(np.array([[0, 0], [512, 0]]), shares)

    def answer(root: Path, row: SlideRow, models: Any) -> Any:
        if row.path.startswith("background") or said[row.slide_id] is None:
            return None, None
        return said[row.slide_id], attention

    @dataclasses.dataclass
    class Loaded:
        slide: str = "a phase 4"

    monkeypatch.setattr(evaluate, "load_models", lambda checkpoints: Loaded())
    monkeypatch.setattr(evaluate, "_answer", answer)
    text = evaluate.report([Path("x")], mosaics, None, None)
    assert "4 held-out mosaics" in text and "mosaics refused: 1 of 4" in text
    found = {line.split()[1]: line for line in text.splitlines() if line.startswith("  ")}
    assert " 0.500 [" in found["ask"] and " 0.500 [" in found["Neutrophil"] and " 0.000 [" in found["slides"]
    assert (
        f"attention on white cells {0.6 * 1600 / 256**2:.3f}, their share of the area {1600 / 8 / 256**2:.3f}" in text
    )
    assert "outlined places with a white cell 0.125, of all places 0.125" in text


def test_the_question_is_the_templates() -> None:
    assert evaluate.QUESTION in WORDINGS[DOMINANT].blanks


def test_files_that_are_no_smears_are_listed_with_the_reason(shared: Path) -> None:
    models = type("Models", (), {"prepare": Preparation(), "backbone": None, "classify": None})
    lines = evaluate._refusals(shared / "data" / "slides", models)
    assert lines[0] == f"files that are no blood smears: {len(lines) - 1} of {len(lines) - 1} refused"
    assert len(lines) >= 4 and all(": refused: " in line for line in lines[1:])


def test_a_checkpoint_that_answers_no_slides_is_refused(mosaics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "load_models", lambda checkpoints: type("Loaded", (), {"slide": None}))
    with pytest.raises(DataError, match="none is a phase 4"):
        evaluate.report([Path("RUNS/3")], mosaics, None, None)
