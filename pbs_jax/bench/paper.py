"""The paper's own numbers (arXiv 2604.17570), read from paper_tables.json and shown behind a dagger.

They are copies for reading: rows without answers, so that no test, interval or rank ever takes them in. Their standard
deviations are checked against sqrt(p (1 - p) / n), the one statistic that the printed p and n determine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.schema import QUESTION_TYPES
from pbs_jax.bench import tables
from pbs_jax.bench.evaluate import ALL, Cell
from pbs_jax.bench.tables import Table

DATA = Path(__file__).with_name("paper_tables.json")
DAGGER, CLOSED_LOOP = "†", "‡"
NUMBERS = (2, 3, 5, 6, 8, 9, 10, 11, 12)
WRITER = "gpt-4o"  # wrote the released questions and answers
SMALLEST_SE = 0.004  # below it the printed third decimal is mostly rounding
PROPORTIONS = ("accuracy", "exact_match", "partial_match")
ID_NOTE = "cell_id"
Column = tuple[str, str, str, str]  # track, question type, task, metric
_PRINTED = re.compile(r"(-?\d\.\d\d)\((\d\.\d{3})\)")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One printed number. `n` is Table 4's count of questions, 0 where it gives none."""

    table: int
    model: str
    track: str
    question_type: str
    task: str
    metric: str
    value: float
    sd: float
    n: int


@functools.cache
def _data() -> dict[str, Any]:
    return dict(json.loads(DATA.read_text()))


def counts(track: str, task: str = ALL) -> Mapping[str, int] | None:
    """Questions by type in the paper's Table 4; None where it has no such row."""
    found = _data()["counts"].get(track, {}).get(task)
    return dict(zip(QUESTION_TYPES, found, strict=True)) if found else None


def tasks(track: str) -> list[str]:
    """The tasks of a track in Table 4's order, "all" last."""
    return list(_data()["counts"].get(track, ()))


def groups() -> Mapping[str, str]:
    """Kind of each model by its name in the paper."""
    return dict(_data()["groups"])


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All printed numbers of the tables in NUMBERS."""
    out = []
    for number in NUMBERS:
        table = _data()["tables"][str(number)]
        for model, line in table["rows"].items():
            for (track, question_type, task, metric), text in zip(table["columns"], line.split(), strict=True):
                value, sd = map(float, _parts(text))
                n = (counts(track, task) or {}).get(question_type, 0)
                out.append(Entry(number, model, track, question_type, task, metric, value, sd, n))
    return tuple(out)


def _parts(text: str) -> tuple[str, str]:
    found = _PRINTED.fullmatch(text)
    if not found:
        raise ValueError(f'{DATA.name}: "{text}" is not value(sd)')
    return found[1], found[2]


def std_check() -> list[dict[str, Any]]:
    """Printed sd over sqrt(p (1 - p) / n), by table and over all accuracies with known n.

    Each: name, entries, mean ratio, sd of the ratios. A mean of 1 says that the paper resampled single questions.
    """
    usable = [e for e in entries() if e.metric in PROPORTIONS and e.n and _se(e) > SMALLEST_SE]
    named = [(f"Table {number}", [e for e in usable if e.table == number]) for number in NUMBERS]
    named.append(("all accuracies", [e for e in usable if e.metric == "accuracy"]))
    named.append(("all proportions", usable))
    out = []
    for name, found in named:
        ratios = [e.sd / _se(e) for e in found]
        if len(ratios) > 1:
            spread = statistics.stdev(ratios)
            out.append({"name": name, "entries": len(ratios), "ratio": statistics.fmean(ratios), "sd": spread})
    return out


def _se(entry: Entry) -> float:
    return math.sqrt(entry.value * (1 - entry.value) / entry.n)


def table(number: int, cells: Sequence[Cell] = (), profile: str = "paper") -> Table:
    """Table `number` of the paper: rows without image, our models, then the paper's rows, each name with a dagger.

    Our numbers stand as value(sd by question), the paper's form. Raises DataError when a column mixes signatures.
    """
    content = _data()["tables"][str(number)]
    columns: list[Column] = [tuple(column) for column in content["columns"]]
    wanted = set(columns)
    mine = [c for c in cells if c.profile == profile and (c.track, c.question_type, c.task, c.metric) in wanted]
    at: dict[Column, dict[str, Cell]] = {column: {} for column in columns}
    for cell in mine:
        at[cell.track, cell.question_type, cell.task, cell.metric][cell.row] = cell
    title = f"Table {number}: {content['title'].rstrip('.')}"
    for column, found in at.items():
        tables.one_signature(list(found.values()), " ".join(column), title)
    order = sorted(mine, key=lambda cell: (cell.kind != "blind", cell.rank))
    rows = {cell.row: cell.kind for cell in order}
    spoke = {cell.row for cell in cells if cell.question_type == "open" and cell.profile == profile}
    own = [(row, *(_show(at[column].get(row), column, row in spoke) for column in columns)) for row in rows]
    copied = [(marked(model), *line.split()) for model, line in content["rows"].items()]
    several = len({column[0] for column in columns}) > 1
    header = ("", *(_header(column, at[column], several) for column in columns))
    notes = [f"{DAGGER} copied from the paper, its own n ({DAGGER} in the header); in no test, interval or rank."]
    if any(model.startswith("GPT-4o") for model in content["rows"]):
        notes.append(f"{CLOSED_LOOP} GPT-4o also wrote the questions and the gold answers: a closed loop.")
    if own:
        notes.insert(
            0, f"value(sd by question), {profile} profile: questions about one image count as independent here."
        )
        notes += tables.merged(note for cell in mine for note in tables.cell_notes(cell))
        notes += tables.signatures([*found.values()] for found in at.values())
    if own and any(column[0] == ID_NOTE for column in columns):
        notes.append("The released in-domain cell questions are not the paper's: only other columns are comparable.")
    blind = sum(kind == "blind" for kind in rows.values())
    return Table(title, header, (*own, *copied), tuple(notes), blind, len(copied))


def all_tables(cells: Sequence[Cell] = (), profile: str = "paper") -> list[Table]:
    """Tables 2, 3, 5, 6, 8-12."""
    return [table(number, cells, profile) for number in NUMBERS]


def marked(model: str) -> str:
    """The model's name with the dagger of a copied number, and the mark of the model that wrote the questions."""
    return f"{model} {DAGGER}" + (CLOSED_LOOP if model.startswith("GPT-4o") else "")


def _header(column: Column, found: Mapping[str, Cell], several: bool) -> str:
    track, question_type, task, metric = column
    parts = [{"cell_id": "ID", "cell_ood": "OOD"}.get(track, "")] if several else []
    parts += [tables.TYPE_NAMES[question_type], "" if task == ALL else task.replace("_", " ")]
    parts.append(tables.METRIC_NAMES[metric])
    theirs = (counts(track, task) or {}).get(question_type, 0)
    n = [str(max(cell.n for cell in found.values()))] if found else []
    sizes = ", ".join([*n, f"{DAGGER}{theirs}"])
    return f"{' '.join(filter(None, parts))} (n={sizes})"


def _show(cell: Cell | None, column: Column, spoke: bool) -> str:
    if cell is None:
        return "not computed" if spoke and column[3] == "similarity" else "-"
    if cell.coverage < tables.MIN_COVERAGE or cell.value is None:
        return tables.show(cell)
    return f"{cell.value:.3f}({cell.sd:.3f})" if cell.sd is not None else f"{cell.value:.3f} (n={cell.n})"
