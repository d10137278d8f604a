"""White cell or not, scored on another source than it was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import evaluate_cells, subtype
from data_prep.evaluate_cells import Labelled, white_cell, white_cell_lines
from data_prep.schema import WHITE_CELL, DataError
from pbs_jax.cli import main


def test_both_classes_are_told_with_calibration_and_clusters() -> None:
    cells = [Labelled(b"", 1, "WBC", f"field{k % 4}") for k in range(8)]
    cells += [Labelled(b"", 0, kind, f"field{k % 4}") for k, kind in enumerate(("RBC",) * 4 + ("Platelets",) * 4)]
    probability = np.asarray([0.9] * 6 + [0.2] * 2 + [0.1] * 4 + [0.1, 0.1, 0.1, 0.9])
    lines = "\n".join(white_cell_lines(cells, probability))
    assert "balanced accuracy 0.812 [" in lines and "n 16 of 4 " in lines
    # 64 pairs: each of six white cells is above seven of the others and ties with one; each of two is above seven.
    assert f"AUC {(6 * 7.5 + 2 * 7) / 64:.3f}" in lines
    assert "  white cell: recall 0.750 [" in lines and "(n 8 of 4)" in lines
    assert "  not a white cell: recall 0.875 [" in lines
    assert "    Platelets: recall 0.750 [" in lines and "    RBC: recall 1.000 [1.000, 1.000] (n 4 of 4)" in lines
    # Of fourteen with 0.9 thirteen are right, of two with 0.8 none: (0.4 + 1.6) / 16.
    assert "mean confidence 0.887, error 0.125 (10 bins)" in lines


def test_bccds_fields_hold_both_classes(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "fields/bccd"
    (folder / "ImageSets/Main").mkdir(parents=True)
    for name in ("Annotations", "JPEGImages"):
        (folder / name).symlink_to(shared / "data/fields/bccd" / name)
    (folder / "ImageSets/Main/test.txt").write_text("BloodImage_00000")

    def classifier(workdir: Path, *, match_stain: bool, target: str) -> Any:
        def classify(images: Iterable[bytes], alike: Iterable[bytes]) -> Iterator[subtype.Named]:
            return ((WHITE_CELL, 0.8) for _ in images)

        return classify

    monkeypatch.setattr(evaluate_cells, "classifier", classifier)
    lines = white_cell(tmp_path, Path("first"))
    kinds = {line.split(":")[0].strip(): line for line in lines}
    assert "recall 1.000 (n 1 of 1)" in kinds["WBC"] and "recall 0.000" in kinds["RBC"]


def test_one_class_alone_is_no_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    monkeypatch.setattr(evaluate_cells, "_of_job", lambda root: [Labelled(b"", 1, "Monocyte", "a")])
    with pytest.raises(DataError, match="lacks other cells: the task needs both"):
        white_cell(tmp_path, Path("first"))


def test_the_command_asks_for_the_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "evaluate", "--task", "white_cell", "--root", str(tmp_path)]) == 1
    assert "needs --backbone" in capsys.readouterr().err
