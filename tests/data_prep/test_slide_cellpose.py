"""Cellpose-SAM as the finder of a slide job: which instances are white cells, what it costs, and the real network once."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from data_prep import slide_cellpose, slide_cells
from data_prep.datasets import read_cells
from data_prep.evaluate import overlap
from data_prep.io import read_manifest
from data_prep.schema import Box, DataError
from data_prep.slide_datasets import read_slides
from data_prep.slide_pipeline import SlideJob, run
from data_prep.smear_draw import MPP, PlacedCell, draw_smear

LABELS = ("Neutrophil", "Lymphocyte", "Monocyte", "Eosinophil")


@pytest.fixture(scope="module")
def smear() -> tuple[np.ndarray, list[PlacedCell]]:
    picture, cells, _ = draw_smear(640, 640, LABELS, np.random.default_rng(7))
    return picture, cells


class Known:
    """Answers as the network would if it knew the drawn cells: their boxes as ellipses, and red cells beside."""

    gpu = False

    def __init__(self, cells: list[PlacedCell]) -> None:
        self.cells, self.asked = cells, 0

    def eval(self, x: np.ndarray, **options: Any) -> tuple[Any, ...]:
        self.asked += 1
        labels = np.zeros(x.shape[:2], np.int32)
        rows, columns = np.ogrid[: x.shape[0], : x.shape[1]]
        for number, cell in enumerate(self.cells, 1):
            box = cell.box
            y, x_ = (box.top + box.bottom - 1) / 2, (box.left + box.right - 1) / 2
            inside = ((rows - y) / (box.height / 2)) ** 2 + ((columns - x_) / (box.width / 2)) ** 2 <= 1
            labels[inside] = number
        free = labels == 0
        labels[5:45, 5:45][free[5:45, 5:45]] = len(self.cells) + 1  # an instance of a red cell's size without a nucleus
        return (labels,)


def seen(picture: np.ndarray) -> tuple[slide_cells.Halved, Box]:
    half = slide_cells.halve(picture, slide_cells.measure_stain([picture]))
    return half, Box(0, 0, picture.shape[1], picture.shape[0])


def test_instances_with_a_nucleus_are_the_white_cells(smear: tuple[np.ndarray, list[PlacedCell]]) -> None:
    picture, cells = smear
    half, core = seen(picture)
    labels = slide_cellpose.instances(Known(cells), picture)
    found = slide_cellpose.with_nucleus(labels, half, MPP, core)
    whole = [cell.box for cell in cells if cell.box.left > 0 and cell.box.top > 0]
    assert len(found) == len(cells) == len(LABELS)
    for box in whole:
        assert min(abs(box.left - f.box.left) + abs(box.bottom - f.box.bottom) for f in found) <= 3


def test_an_instance_belongs_to_the_tile_of_its_centre(smear: tuple[np.ndarray, list[PlacedCell]]) -> None:
    picture, cells = smear
    half, core = seen(picture)
    labels = slide_cellpose.instances(Known(cells), picture)
    middle = (cells[0].box.left + cells[0].box.right) // 2
    halves = [Box(0, 0, middle, core.bottom), Box(middle, 0, core.right, core.bottom)]
    parts = [slide_cellpose.with_nucleus(labels, half, MPP, part) for part in halves]
    assert sum(map(len, parts)) == len(slide_cellpose.with_nucleus(labels, half, MPP, core))


def test_a_picture_without_nuclei_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slide_cellpose, "load", lambda weights: pytest.fail("the network was asked"))
    picture, _, _ = draw_smear(640, 640, (), np.random.default_rng(3))
    half, core = seen(picture)
    assert slide_cellpose.CellposeFinder(Path("w"))(picture, half, MPP, core) == []


def test_what_does_not_fit_is_asked_in_smaller_parts() -> None:
    class Small:
        gpu = True

        def __init__(self) -> None:
            self.asked: list[int] = []

        def eval(self, x: np.ndarray, batch_size: int, **options: Any) -> tuple[Any, ...]:
            self.asked.append(batch_size)
            if batch_size > 2:
                raise RuntimeError("CUDA out of memory")
            return (np.zeros(x.shape[:2], np.uint16),)

    small = Small()
    assert slide_cellpose.instances(small, np.zeros((8, 9, 3), np.uint8)).shape == (8, 9)
    assert small.asked == [8, 4, 2]


class ByStain:
    """Labels what is stained like a nucleus, with a rim for the cytoplasm; the first `silent` calls are left unanswered."""

    gpu = False

    def __init__(self, silent: int = 0) -> None:
        self.silent = silent

    def eval(self, x: np.ndarray, **options: Any) -> tuple[Any, ...]:
        if self.silent > 0:
            self.silent -= 1
            return (None,)
        cells = slide_cells.grow(seen(x)[0].nuclear, 8)
        labels, _ = ndimage.label(cells)
        return (np.pad(labels.repeat(2, 0).repeat(2, 1), ((0, x.shape[0] % 2), (0, x.shape[1] % 2))),)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_job_finds_its_cells_by_the_network(
    silent: int, smears: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a slide with a tile of two left unanswered is rejected alone."""
    weights = tmp_path / "cpsam"
    zipfile.ZipFile(weights, "w").close()
    network = ByStain(silent)
    monkeypatch.setattr(slide_cellpose, "load", lambda path: network)
    monkeypatch.setattr(slide_cellpose.importlib.util, "find_spec", lambda name: True)
    job = SlideJob(tmp_path / "out", smears, smears / "slides.csv", cellpose_weights=weights)
    outcome = run(job, lambda line: None)
    assert outcome.rejected == ({"was not segmented": 1} if silent else {})
    manifest = read_manifest(job.out / "cells")
    assert manifest["config"]["cells"] == slide_cellpose.NAME and len(manifest["inputs"]["cellpose"]) == 64
    cells, slides = list(read_cells(job.out)), list(read_slides(job.out))
    assert len(slides) == 2 - silent and all(slide.tiles_kept == slide.tiles_in for slide in slides)
    for slide in slides:
        truth = json.loads((smears / "truth" / f"{slide.slide_id}.json").read_text())["cells"]
        own = [cell.bbox for cell in cells if cell.slide_id == slide.slide_id]
        found = [any(overlap(Box(*true["box"]), box) > 0.3 for box in own) for true in truth]
        assert sum(found) >= 0.7 * len(truth)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_missing_is_named_before_the_work(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "cpsam"
    if there:
        weights.write_bytes(b"")
    monkeypatch.setattr(slide_cellpose.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pbs-jax\[cellpose\]" if there else "is no file: download cpsam"):
        slide_cellpose.weights_sha256(weights)


def test_a_file_that_holds_no_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpsam").write_bytes(b"<html>not found</html>")
    monkeypatch.setattr(slide_cellpose.importlib.util, "find_spec", lambda name: True)
    with pytest.raises(DataError, match="cpsam holds no weights"):
        slide_cellpose.weights_sha256(tmp_path / "cpsam")


@pytest.mark.slow
def test_the_real_network_takes_our_call(smear: tuple[np.ndarray, list[PlacedCell]], tmp_path: Path) -> None:
    """Cellpose-SAM's own code with weights drawn here: how good they are is no matter, the call and its answer are."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cellpose", reason="pip install pbs-jax[cellpose]")
    from cellpose.vit import CPSAM

    torch.manual_seed(0)
    weights = tmp_path / "cpsam"
    torch.save(CPSAM(dtype=torch.float32).state_dict(), weights)
    assert len(slide_cellpose.weights_sha256(weights)) == 64
    labels = slide_cellpose.instances(slide_cellpose.load(weights), smear[0][:256, :256])
    slide_cellpose.load.cache_clear()
    assert labels.shape == (256, 256) and labels.dtype == np.int32 and labels.min() >= 0
