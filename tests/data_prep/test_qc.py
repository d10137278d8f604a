"""The QC score on real fields, the same fields spoilt, and tissue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from data_prep import qc, slide_cells
from data_prep.slides import open_slide

MPP = 0.25
FIELDS = (  # field and the factor that brings its red cells to about 30 px, their size at 0.25 um/px
    *((f"bccd/JPEGImages/BloodImage_00{k}.jpg", 0.3) for k in ("003", "140", "231", "315", "407")),
    *((f"chula_rbc12/Dataset/{k}.jpg", 0.75) for k in (10, 164, 241, 308, 406, 52)),
)


def quality(tile: np.ndarray, stain: slide_cells.Stain | None = None) -> qc.Quality:
    stain = stain or slide_cells.measure_stain([tile])
    half = slide_cells.halve(tile, stain)
    return qc.classical(half, len(slide_cells.red_cells(half, MPP).centres), MPP)


@pytest.fixture(scope="module", params=FIELDS, ids=lambda field: str(field[0]))
def tile(request: pytest.FixtureRequest, shared: Path) -> np.ndarray:
    name, factor = request.param
    with Image.open(shared / "data" / "fields" / name) as image:
        size = (round(image.width * factor), round(image.height * factor))
        field = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX))
    margins = ((0, max(512 - field.shape[0], 0)), (0, max(512 - field.shape[1], 0)), (0, 0))
    return np.pad(field, margins, mode="symmetric")[:512, :512]


def test_real_fields_are_kept_and_blurred_or_dark_ones_not(tile: np.ndarray) -> None:
    stain = slide_cells.measure_stain([tile])
    assert quality(tile).score >= qc.THRESHOLD
    blurred = quality(ndimage.gaussian_filter(tile, (4, 4, 0)), stain)
    assert blurred.score < qc.THRESHOLD and blurred.reason == "out of focus"
    dark = quality((tile // 6).astype(np.uint8))
    assert dark.score < qc.THRESHOLD and dark.reason == "dark"


def test_a_dark_tile_of_a_lit_slide_is_dark(tile: np.ndarray) -> None:
    stain = slide_cells.measure_stain([tile])
    found = quality((tile * 0.2).astype(np.uint8), stain)
    assert found.score < qc.THRESHOLD and found.reason == "dark"


def test_a_blank_tile_has_a_finite_score_and_its_reason() -> None:
    for level in (255, 240, 0):
        found = quality(np.full((512, 512, 3), level, np.uint8))
        assert found.score == 0 and all(np.isfinite(value) for value in found.parts.values())
        assert found.reason == qc.BLANK
    speckled = np.random.default_rng(0).normal(235, 3, (512, 512, 3)).clip(0, 255).astype(np.uint8)
    assert quality(speckled).score < qc.THRESHOLD


def test_tissue_is_rejected(shared: Path) -> None:
    path = shared / "data" / "slides" / "aperio_cmu1" / "CMU-1-Small-Region.svs"
    with open_slide(path) as slide:
        tiles = [slide.read(x, y, 512, 512) for y in range(0, 2455, 800) for x in range(0, 1708, 800)]
    stain = slide_cells.measure_stain(tiles)
    kept = [found for tile in tiles if (found := quality(tile, stain)).score >= qc.THRESHOLD]
    assert len(kept) <= 1  # of 12, even when the 20x scan is called 40x: the slide's verdict takes care of it


def test_a_tile_without_glass_is_crowded(tile: np.ndarray) -> None:
    """Nothing has an edge there, so nothing is known of its focus."""
    stain = slide_cells.measure_stain([tile])
    red = np.median(tile[slide_cells.halve(tile, stain).total.repeat(2, 0).repeat(2, 1) > stain.cell], axis=0)
    found = quality(np.broadcast_to(red.astype(np.uint8), tile.shape).copy(), stain)
    assert found.score == 0 and found.parts["focus"] == 0 and found.reason == "crowded"
