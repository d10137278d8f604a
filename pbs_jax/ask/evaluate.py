"""`pbs bench ask`: `pbs ask` from file to answer on mosaics whose white cells are known, and on files that are no smears.

Prints how often the most frequent white cell is named right, beside one who always says Neutrophil and beside the same
model on the same slides before their cells were laid in; how much of the attention falls on cells, beside their share of
the area; and who was refused, rightly and wrongly.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import slide_table
from data_prep.picture import open_picture
from data_prep.progress import progress
from data_prep.schema import WHITE_CELL_CLASSES, DataError
from data_prep.slide_readers import SLIDE_SUFFIXES
from data_prep.slide_table import SlideRow
from data_prep.stats import wilson
from pbs_jax.ask.evidence import TOP, SlideAttention
from pbs_jax.ask.picture import Models, as_question, ask, load_models, ready, slide_attention

QUESTION = "Which white blood cell type is most common on this slide?"  # as the slide templates ask it
NEUTROPHIL = WHITE_CELL_CLASSES[0]


def report(checkpoints: Sequence[Path], mosaics: Path, others: Path | None, limit: int | None) -> str:
    """mosaics: of `pbs data mosaic`; slides without one most frequent class are left out. others: a folder of files that
    are no blood smears. Raises DataError for checkpoints that answer no slides, or a folder without test slides."""
    models = load_models(checkpoints)
    if models.slide is None:
        raise DataError(f"{', '.join(map(str, checkpoints))}: none is a phase 4, which answers about slides")
    slides = []  # (row of the table, its truth, the most frequent class)
    for row in _test_rows(mosaics, "slides.csv"):
        truth = json.loads((mosaics / "truth" / f"{row.slide_id}.json").read_text(encoding="utf-8"))
        if dominant := _dominant(truth["counts"]):
            slides.append((row, truth, dominant))
    if not slides:
        raise DataError(f"{mosaics}/slides.csv lists no test slide with one most frequent class")
    slides = slides[:limit]
    backgrounds = {row.slide_id: row for row in _test_rows(mosaics, "background.csv")}
    right, plain, refused, seen = [], [], [], []
    for row, truth, dominant in progress(slides, len(slides), "asking slides"):
        said, attention = _answer(mosaics, row, models)
        right.append(said == dominant)
        refused.append(said is None)
        if row.slide_id in backgrounds:
            plain.append(_answer(mosaics, backgrounds[row.slide_id], models)[0] == dominant)
        if attention is not None:
            seen.append(_on_cells(attention, truth["cells"]))
    neutrophils = [dominant == NEUTROPHIL for *_, dominant in slides]
    lines = [
        f"most frequent white cell, {len(right)} held-out mosaics:",
        f"  pbs ask                   {_share(right)}",
        f"  always {NEUTROPHIL:<19}{_share(neutrophils)}",
        f"  the slides without their white cells  {_share(plain)} (a refusal is not right)",
        *_looked(seen),
        f"mosaics refused: {sum(refused)} of {len(refused)}",
    ]
    return "\n".join(lines + (_refusals(others, models) if others else []))


def _test_rows(mosaics: Path, table: str) -> list[SlideRow]:
    """The test slides of a table; none where there is no table."""
    path = mosaics / table
    return [row for row in slide_table.load(mosaics, path) if row.split == "test"] if path.is_file() else []


def _dominant(counts: Mapping[str, int]) -> str:
    """The most frequent class, "" where two are."""
    first, second = sorted(counts.values(), reverse=True)[:2]
    return max(counts, key=counts.__getitem__) if first > second else ""


def _on_cells(attention: SlideAttention, cells: Sequence[Mapping[str, Any]]) -> tuple[float, float, float, float]:
    """(attention on the boxes of white cells, their share of the area; of the outlined places those that touch a box, of all)."""
    covered = attention.on([cell["box"] for cell in cells])
    touched = (covered > 0).ravel()
    hits = touched[attention.order[:TOP]]
    return float((attention.shares * covered).sum()), float(covered.mean()), hits.mean(), touched.mean()


def _looked(seen: Sequence[tuple[float, float, float, float]]) -> list[str]:
    if not seen:
        return []
    inside, area, hit, chance = np.mean(seen, axis=0)
    return [
        f"attention on white cells {inside:.3f}, their share of the area {area:.3f}",
        f"outlined places with a white cell {hit:.3f}, of all places {chance:.3f}",
    ]


def _answer(root: Path, row: SlideRow, models: Models) -> tuple[str | None, SlideAttention | None]:
    """(answer, where the model looked); Nones for a refusal."""
    with tempfile.TemporaryDirectory() as work:
        try:
            picture = open_picture(
                root / row.path, models.prepare, kind="slide", mpp=row.mpp, work=Path(work), backbone=models.backbone
            )
            prepared = ready(picture, models)
        except DataError:
            return None, None
        return ask(prepared, as_question(QUESTION, level="slide")).text, slide_attention(prepared)


def _refusals(folder: Path, models: Models) -> list[str]:
    """One line a file: refused with which reason, or taken for a smear."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.casefold() in SLIDE_SUFFIXES and path.is_file())
    lines, taken = [], 0
    for path in progress(files, len(files), "files that are no smears"):
        with tempfile.TemporaryDirectory() as work:
            try:
                open_picture(path, models.prepare, work=Path(work), backbone=models.backbone, classify=models.classify)
            except DataError as error:
                lines.append(f"  {path.name}: refused: {error}")
            else:
                taken += 1
                lines.append(f"  {path.name}: TAKEN FOR A SMEAR")
    return [f"files that are no blood smears: {len(files) - taken} of {len(files)} refused", *lines]


def _share(right: Sequence[bool]) -> str:
    if not right:
        return "not asked"
    low, high = wilson(sum(right), len(right))
    return f"{np.mean(right):.3f} [{low:.3f}, {high:.3f}]"
