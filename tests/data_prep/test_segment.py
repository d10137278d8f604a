"""The white-cell finder on drawn cells, real BCCD fields and PBC pictures, and on pictures without cells."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import segment, synthetic
from data_prep.schema import WHITE_CELL_CLASSES, Box
from data_prep.sources import bccd, pbc


def iou(a: Box, b: Box) -> float:
    width, height = min(a.right, b.right) - max(a.left, b.left), min(a.bottom, b.bottom) - max(a.top, b.top)
    shared = max(width, 0) * max(height, 0)
    return shared / (a.area + b.area - shared)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def test_drawn_cells_are_outlined():
    overlaps = []
    for cell in itertools.islice(synthetic.cells(10, seed=3), 20):
        found = segment.central_cell(cell.image)
        assert found is not None, cell.id
        overlaps.append(iou(found.box, cell.box))
        assert found.nucleus_area < found.area
    assert np.median(overlaps) > 0.85
    assert min(overlaps) > 0.5


def test_scale_does_not_matter():
    cell = next(iter(synthetic.cells(10, seed=1)))
    large = np.asarray(Image.fromarray(cell.image).resize((1024, 1024), Image.Resampling.BICUBIC))
    found, wanted = segment.central_cell(large), Box(*(4 * side for side in vars_of(cell.box)))
    assert found is not None
    assert iou(found.box, wanted) > 0.85


def vars_of(box: Box) -> tuple[int, int, int, int]:
    return box.left, box.top, box.right, box.bottom


def test_two_cells_are_two():
    _, first, second = itertools.islice(synthetic.cells(10, seed=2), 3)
    found = segment.find_white_cells(np.concatenate([first.image, second.image], axis=1))
    assert len(found) == 2
    width = first.image.shape[1]
    wanted = [first.box, Box(second.box.left + width, second.box.top, second.box.right + width, second.box.bottom)]
    assert sorted(max(iou(cell.box, box) for box in wanted) > 0.6 for cell in found) == [True, True]
    assert found[0].nucleus_area >= found[1].nucleus_area


@pytest.mark.parametrize("value", [0, 128, 255])
def test_blank_pictures_have_no_cell(value: int):
    for shape in ((300, 300, 3), (1, 1, 3), (4, 500, 3)):
        assert segment.find_white_cells(np.full(shape, value, np.uint8)) == []
        assert segment.central_cell(np.full(shape, value, np.uint8)) is None


def test_bccd_boxes_are_found(shared: Path):
    cells = bccd.listing(shared / "data").cells
    overlaps = []
    for cell in random.Random(0).sample(cells, 24):
        found = segment.find_white_cells(pixels(shared / "data" / cell.path))
        assert cell.box is not None
        overlaps.append(max((iou(cell.box, other.box) for other in found), default=0.0))
    assert np.median(overlaps) > 0.7  # the hand-drawn boxes are loose: hand-drawn masks reach 0.83
    assert np.mean(np.array(overlaps) > 0.5) >= 0.95


def test_pbc_cells_are_found_near_the_middle(shared: Path):
    cells = [cell for cell in pbc.listing(shared / "data").cells if cell.label in WHITE_CELL_CLASSES]
    for cell in random.Random(1).sample(cells, 15):
        picture = pixels(shared / "data" / cell.path)
        found = segment.central_cell(picture)
        assert found is not None, cell.cell_id
        width = picture.shape[1]
        box = found.box
        assert abs(box.left + box.right - width) / 2 < 0.2 * width, cell.cell_id
        assert 0.1 < max(box.width, box.height) / width < 0.8, cell.cell_id
