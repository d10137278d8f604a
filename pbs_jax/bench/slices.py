"""Scores by other groups than tasks: out-of-domain data set and cell class, question texts seen in training or not.

A slice is the same scoring with each question's task renamed, so that intervals, coverage, signatures and small-n marks
are those of every other table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from data_prep.schema import OTHERS, QA, WHITE_CELL_CLASSES
from pbs_jax.bench import normalize
from pbs_jax.bench.attributes import LABEL, fact_of
from pbs_jax.bench.compare import PRIMARY
from pbs_jax.bench.evaluate import ALL, Cell, Row, Settings, evaluate, track_of
from pbs_jax.bench.score import Answers
from pbs_jax.bench.tables import METRIC_NAMES, TRACKS, TYPE_NAMES, Table, cell_notes, merged, one_signature, show

N, L, M, E, B = WHITE_CELL_CLASSES
# The paper's Table 7, and LISC's file names.
_CLASSES = {
    "AML-Cytomorphology_LMU": {"BAS": B, "EOS": E, "LYA": L, "LYT": L, "MON": M, "NGB": N, "NGS": N},
    "APL": {
        "Band neutrophils": N,
        "Segmented neutrophils": N,
        "Basophil": B,
        "Eosinophils": E,
        "Lymphocyte": L,
        "Lymphocyte, variant": L,
        "Monocyte": M,
    },
    "WBC_LISC": {"baso": B, "eosi": E, "lymp": L, "mono": M, "neut": N},
}
SEEN, NEW = "text seen in training", "text not in training"


def sources(asked: Sequence[QA]) -> list[str]:
    """ "data set: class" of each question's image; "" where nothing tells the class.

    Released images tell it by their path (never shown to a model), ours by the gold of their question for the type.
    """
    golds = {qa.image_id: qa.answer for qa in asked if fact_of(qa) == LABEL and qa.question_type == "fill_blank"}
    golds |= {qa.image_id: qa.answer for qa in asked if fact_of(qa) == LABEL and qa.question_type == "multiple_choice"}
    return [_source(qa, golds.get(qa.image_id, "")) for qa in asked]


def _source(qa: QA, gold: str) -> str:
    dataset = str(qa.source.get("dataset") or qa.image_id.partition(":")[0])
    if dataset in _CLASSES:
        parts = str(qa.source["path"]).split("/")
        key = re.split(r"[_-]", parts[-1])[0].casefold() if dataset == "WBC_LISC" else parts[-2]
        return f"{dataset}: {_CLASSES[dataset].get(key, OTHERS)}"
    return f"{dataset}: {gold}" if gold else ""


def by_source(answers: Answers, settings: Settings) -> list[Cell]:
    """Out-of-domain scores by data set and class; empty without such questions."""
    names = [name if qa.domain == "ood" else "" for qa, name in zip(answers.asked, sources(answers.asked), strict=True)]
    return _sliced(answers, names, settings)


def texts(asked: Sequence[QA], train: Sequence[QA]) -> list[str]:
    """SEEN for each question whose text, normalised, is a training question's too; else NEW."""
    known = {normalize.robust(qa.question) for qa in train}
    return [SEEN if normalize.robust(qa.question) in known else NEW for qa in asked]


def by_text(answers: Answers, train: Sequence[QA], settings: Settings) -> list[Cell]:
    """Scores of questions whose text stands in the training questions, and of the others; only tracks that have both."""
    names = texts(answers.asked, train)
    mixed = {track_of(qa) for qa, name in zip(answers.asked, names, strict=True) if name == SEEN}
    mixed &= {track_of(qa) for qa, name in zip(answers.asked, names, strict=True) if name == NEW}
    return _sliced(
        answers,
        [name if track_of(qa) in mixed else "" for qa, name in zip(answers.asked, names, strict=True)],
        settings,
    )


def to_tables(cells: Sequence[Cell], what: str) -> list[Table]:
    """One table per track and question type: a row per slice with its n; the best row without image, then the models."""
    out = []
    for track, question_type in dict.fromkeys((cell.track, cell.question_type) for cell in cells):
        here = [
            cell
            for cell in cells
            if (cell.track, cell.question_type, cell.metric) == (track, question_type, PRIMARY[question_type][0])
        ]
        overall = {cell.row: cell for cell in here if cell.task == ALL}
        blind = [cell for cell in overall.values() if cell.kind == "blind" and cell.value is not None]
        best = max(blind, key=lambda cell: (cell.value or 0, -cell.rank), default=None)
        shown = [best.row] if best else []
        shown += [cell.row for cell in sorted(overall.values(), key=lambda cell: cell.rank) if cell.kind == "model"]
        for row in shown:
            one_signature([cell for cell in here if cell.row == row], row, what)
        one_signature(list(overall.values()), question_type, what)
        at = {(cell.task, cell.row): cell for cell in here}
        tasks = dict.fromkeys(cell.task for cell in here)
        sizes = {task: max(cell.n for cell in here if cell.task == task) for task in tasks}
        rows = [(f"{task} (n={sizes[task]})", *(show(at.get((task, row))) for row in shown)) for task in tasks]
        header = ("", *([f"best without image: {best.row}"] if best else []), *shown[bool(best) :])
        name = f"{TRACKS.get(track, track)} - {TYPE_NAMES[question_type]} {METRIC_NAMES[here[0].metric]} by {what}"
        notes = merged(note for cell in here if cell.task == ALL for note in cell_notes(cell))
        signature = f"Signature {here[0].signature}"
        out.append(Table(name, header, tuple(rows), (*notes, signature)))
    return out


def _sliced(answers: Answers, names: Sequence[str], settings: Settings) -> list[Cell]:
    """Cells with the names as tasks, in the last profile, of the questions that have one."""
    places = [k for k, name in enumerate(names) if name]
    if not places:
        return []
    asked = [dataclasses.replace(answers.asked[k], task=names[k]) for k in places]
    rows = [
        Row(row.name, row.kind, tuple(tuple(replies[k] for k in places) for replies in row.replies), row.note)
        for row in answers.rows
    ]
    settings = dataclasses.replace(settings, profiles=settings.profiles[-1:], similarity=None)
    return evaluate(asked, rows, answers.origin, settings)
