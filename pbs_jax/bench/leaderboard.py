"""A leaderboard page from validated submissions to one question set: blind rows on top, ties said, nothing unequal mixed.

A model is ranked by metric, not by a sum: beside each value stands whether the best model can be told from it (paired,
clustered, Holm over the models of that metric). The order of rows is a reading aid: the mean of the primary endpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_prep import html
from data_prep.io import atomic_write
from data_prep.schema import QA, DataError
from pbs_jax.bench import compare, tables
from pbs_jax.bench.evaluate import ALL, SMALL, Cell, Settings
from pbs_jax.bench.records import Questions
from pbs_jax.bench.report import STYLE, as_html
from pbs_jax.bench.score import Run, Scores, load_run, score_runs
from pbs_jax.bench.validate import Validation, validate

PRIMARY = (("multiple_choice", "accuracy"), ("fill_blank", "exact_match"))  # declared before any result
DROPPED = ("mcc", "bleu1")  # the page has the metric that ranks and what explains it
ALPHA = 0.05
BEST, TIED = "best", "tied"


def write(
    out: Path,
    submissions: Sequence[Path],
    questions: Questions,
    settings: Settings,
    *,
    train: Sequence[QA] | None = None,
    title: str = "PBSBench leaderboard",
) -> list[Validation]:
    """Writes leaderboard.html, .md, .json and .csv; returns all validations, the refused ones among them.

    Raises DataError when no submission is valid, or when valid ones differ in protocol, answer modes or data.
    """
    checked = [validate(path, questions) for path in submissions]
    good = [(path, found) for path, found in zip(submissions, checked, strict=True) if found.valid]
    if not good:
        first = next((f"{found.path}: {found.problems[0]}" for found in checked), "none given")
        raise DataError(f"no submission is valid ({first}); `pbs bench validate` lists all problems")
    runs = [load_run(path, questions) for path, _ in good]
    scores = score_runs(runs, settings, train=train, expected=questions)
    profile = settings.profiles[-1]
    marks = separable(scores, settings, profile)
    order = _order(scores, profile)
    cells = [dataclasses.replace(cell, rank=order.get(cell.row, cell.rank)) for cell in scores.cells]
    shown = [_track(cells, track, profile, marks, scores.notes) for track in dict.fromkeys(c.track for c in cells)]
    entries = _entries(runs, [found for _, found in good])
    refused = [found for found in checked if not found.valid]
    content = {
        "title": title,
        "dataset_id": questions.dataset_id,
        "protocol": scores.origin.protocol,
        "primary": [list(endpoint) for endpoint in PRIMARY],
        "order": [row for row, _ in sorted(order.items(), key=lambda item: item[1])],
        "marks": [
            {"row": row, "track": track, "question_type": kind, "metric": metric, "mark": mark, "p_holm": p}
            for (row, track, kind, metric), (mark, p) in marks.items()
        ],
        "submissions": [found.to_json() for found in checked],
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
    atomic_write(out / "leaderboard.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    atomic_write(out / "leaderboard.md", "\n".join([f"# {title}\n", *map(tables.to_markdown, [*shown, entries])]))
    atomic_write(out / "leaderboard.html", _page(title, shown, entries, refused, scores))
    atomic_write(out / "leaderboard.csv", tables.tables_csv(shown))
    return checked


Marks = Mapping[tuple[str, str, str, str], tuple[str, float | None]]


def separable(scores: Scores, settings: Settings, profile: str) -> Marks:
    """(row, track, question type, metric) -> ("best", None) or ("tied", p): models that the best one can't be told from.

    None is marked where fewer than two models answered, n is small, or the column can't rank.
    """
    out: dict[tuple[str, str, str, str], tuple[str, float | None]] = {}
    for track in dict.fromkeys(cell.track for cell in scores.cells):
        for question_type, (metric, _) in compare.PRIMARY.items():
            cells = [
                cell
                for cell in scores.cells
                if (cell.track, cell.question_type, cell.metric) == (track, question_type, metric)
                and (cell.task, cell.profile, cell.kind) == (ALL, profile, "model")
                and cell.value is not None
                and cell.coverage >= tables.MIN_COVERAGE
            ]
            unfit = any(cell.n < SMALL or any(note.startswith("not rankable") for note in cell.notes) for cell in cells)
            if len(cells) < 2 or unfit:
                continue
            best = max(cells, key=lambda cell: (cell.value or 0.0, -cell.rank)).row
            pairs = [(best, cell.row) for cell in cells if cell.row != best]
            found = compare.compare(scores, pairs, settings, profile, "metric")
            out[best, track, question_type, metric] = BEST, None
            for item in found:
                if (item.track, item.question_type) == (track, question_type) and not item.p_holm < ALPHA:
                    out[item.b, track, question_type, metric] = TIED, item.p_holm
    return out


def _order(scores: Scores, profile: str) -> dict[str, int]:
    """Place of each model by the mean of its primary endpoints over the tracks."""
    means: dict[str, list[float]] = {}
    for cell in scores.cells:
        if cell.kind == "model" and (cell.profile, cell.task) == (profile, ALL):
            values = means.setdefault(cell.row, [])
            if (cell.question_type, cell.metric) in PRIMARY and cell.value is not None:
                values.append(cell.value)
    ranked = sorted(means, key=lambda row: -sum(means[row]) / max(len(means[row]), 1))
    return {row: len(scores.rows) + k for k, row in enumerate(ranked)}


def _track(
    cells: Sequence[Cell], track: str, profile: str, marks: Marks, notes: Mapping[str, Sequence[str]]
) -> tables.Table:
    def mark(cell: Cell) -> str:
        found = marks.get((cell.row, cell.track, cell.question_type, cell.metric))
        return f" {found[0]}" if found else ""

    kept = [cell for cell in tables.overview_cells(cells, track, profile) if cell.metric not in DROPPED]
    table = tables.build(f"{tables.TRACKS.get(track, track)} - {profile} profile", kept, mark=mark)
    explained = (
        *notes.get(track, ()),
        f'"{BEST}": the highest value; "{TIED}": not separable from it (paired by question, clusters\' signs flipped, Holm '
        f"over the models of the metric, {ALPHA:g}). No mark: separable, or a column that can't rank.",
        "Order: mean of MCQ accuracy and FB EMatch over all tracks, the endpoints declared beforehand.",
    )
    return dataclasses.replace(table, notes=(*explained, *table.notes))


def _entries(runs: Sequence[Run], found: Sequence[Validation]) -> tables.Table:
    rows = [
        (
            run.label,
            str(run.seed),
            f"{item.facts['coverage']:.1%}",
            item.facts["sha256"][:12],
            "; ".join(item.warnings) or "-",
        )
        for run, item in zip(runs, found, strict=True)
    ]
    return tables.Table("Submissions", ("", "seed", "answered", "predictions sha256", "warnings"), tuple(rows))


def _page(
    title: str, shown: Sequence[tables.Table], entries: tables.Table, refused: Sequence[Validation], scores: Scores
) -> str:
    lead = "Rows without image stand on top: a model that does not beat them has shown nothing. Intervals are 95 %, by cluster."
    body = STYLE + as_html(shown)
    sections = [html.Section("Scores", body, lead), html.Section("Submissions", as_html([entries]))]
    if refused:
        rows = [(item.facts["name"], problem) for item in refused for problem in item.problems]
        sections.append(html.Section("Refused", html.table(rows, ("submission", "problem"))))
    origin = f"{len(scores.asked):,} questions, protocol {scores.origin.protocol}, data {scores.origin.dataset_id[:12]}"
    return html.render_page(title, sections, subtitle=origin)
