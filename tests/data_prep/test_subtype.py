"""The two stages of naming in a slide job (paper 3.1.2): white cell or not, then which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep import slide_write, subtype
from data_prep.datasets import read_cells
from data_prep.io import read_manifest
from data_prep.schema import ARTIFACT, NO_WHITE_CELL, WHITE_CELL, DataError
from data_prep.slide_datasets import read_slides
from data_prep.slide_pipeline import SlideJob, run


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classifiers that call every second cell no white cell, and every cell a monocyte, with 0.7; known by their paths."""

    def classifier(workdir: Path, *, match_stain: bool, target: str) -> Any:
        def classify(images: Iterable[bytes]) -> Iterator[subtype.Named]:
            for number, _ in enumerate(images):
                if target == "subtype":
                    yield "Monocyte", 0.7
                else:
                    yield (WHITE_CELL, NO_WHITE_CELL)[number % 2], 0.9

        return classify

    monkeypatch.setattr(slide_write.subtype, "classifier", classifier)
    monkeypatch.setattr(slide_write.subtype, "classifier_sha256", lambda workdir, target="subtype": str(workdir))


def test_what_is_no_white_cell_is_an_artifact(stages: None, smears: Path, tmp_path: Path) -> None:
    """And is not counted in the differential, nor called Others for the second stage's doubt."""
    job = SlideJob(tmp_path / "out", smears, smears / "slides.csv", Path("second"), Path("first"), min_confidence=0.8)
    outcome = run(job, lambda line: None)
    cells = list(read_cells(job.out))
    artifacts = [cell for cell in cells if cell.label == ARTIFACT]
    assert len(artifacts) == len(cells) // 2 and {cell.confidence for cell in artifacts} == {0.9}
    assert {cell.label for cell in cells} == {ARTIFACT, "Others"}
    counts = [slide.counts for slide in read_slides(job.out)]
    assert sum(sum(counted.values()) for counted in counts) == len(cells) - len(artifacts)
    assert any(f"{len(artifacts)} of them no white cells" in line for line in outcome.lines)
    assert read_manifest(job.out / "cells")["inputs"]["white_cells"] == "first"


def test_another_first_stage_is_another_job(stages: None, smears: Path, tmp_path: Path) -> None:
    job = SlideJob(tmp_path / "out", smears, smears / "slides.csv", Path("second"), Path("first"))
    run(job, lambda line: None)
    assert not run(job, lambda line: None).fresh
    assert run(slide_write.dataclasses.replace(job, white_cells=Path("other")), lambda line: None).fresh


def test_the_first_stage_alone_names_nothing(smears: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give --backbone, which names the rest"):
        run(SlideJob(tmp_path / "out", smears, white_cells=Path("first")))
