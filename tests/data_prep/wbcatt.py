"""Cells without pixels for the text tests: WBCAtt's experts' rows, and rows drawn from the synthetic profiles."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np

from data_prep.caption import cell_caption
from data_prep.schema import ATTRIBUTES, WHITE_CELL_CLASSES, Cell
from data_prep.synthetic import sample_attributes, split_of


def expert_cells(shared: Path) -> list[Cell]:
    """The 2,500 PBC cells with the authors' split and the experts' eleven attributes."""
    with (shared / "data/annotations/wbcatt/selected_2500.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        _captioned(f"pbc:{row['img_name']}", row["split"], row["label"], {name: row[name] for name in ATTRIBUTES})
        for row in rows
    ]


def made_cells(n_per_class: int, seed: int = 0) -> list[Cell]:
    rng = np.random.default_rng(seed)
    return [
        _captioned(f"made:{label}:{k}", split_of(k, n_per_class), label, sample_attributes(label, rng))
        for k in range(n_per_class)
        for label in WHITE_CELL_CLASSES
    ]


def _captioned(id: str, split: str, label: str, attributes: dict[str, str]) -> Cell:
    cell = Cell(id, split, label, "human", b"", attributes=attributes)
    return dataclasses.replace(cell, caption=cell_caption(cell))
