"""A small finished cell job on disk: synthetic attributes, one plain picture, captions and template questions."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from PIL import Image

from data_prep import derived
from data_prep.qa import cell_questions
from data_prep.schema import Cell
from tests.data_prep.wbcatt import made_cells


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (224, 224), (200, 150, 180)).save(out, "JPEG")
    return out.getvalue()


def write_job(out: Path, n_per_class: int) -> list[Cell]:
    """Writes OUT/cells and OUT/cell_qa of 5 x `n_per_class` cells and returns the cells."""
    data = picture()
    cells = [dataclasses.replace(cell, image=data) for cell in made_cells(n_per_class)]
    cells_id = derived.write_cells(out, cells, [], records_in=len(cells), config={}, inputs={}, split_level="image")
    derived.write_questions(out, cell_questions(cells), {}, {"cells": cells_id}, "image")
    return cells
