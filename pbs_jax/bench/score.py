"""Scoring of prediction files: one or several runs (seeds) of one or several models on the same questions, blind rows
first.

Runs whose answer modes, protocols or dataset ids differ are refused: their numbers must not stand in one table.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.schema import QA, DataError
from pbs_jax.bench import blind, evaluate, remarks
from pbs_jax.bench.extract import extract
from pbs_jax.bench.paper import CLOSED_LOOP
from pbs_jax.bench.records import Key, Prediction, Questions, load_predictions, protocol_of, questions_id

SCHEMA = 1
BY_IMAGE = "The split is by image: cells of one slide or donor may stand on both sides of it."
PREDICTIONS, RUN_CARD = "predictions.jsonl", "run.json"


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One prediction file with what its run.json says. Runs that share `name` and `modality` are seeds of one model."""

    name: str
    seed: int
    modality: str
    protocol: str
    dataset_id: str
    predictions: tuple[Prediction, ...]
    remarks: tuple[str, ...] = ()
    patches: int | None = None  # shown of a slide
    closed_loop: bool = False  # the model wrote the questions
    seen: tuple[str, ...] = ()  # their image sets that the model's backbone was pre-trained on

    @property
    def label(self) -> str:
        parts = [f"{self.patches} patches"] if self.patches else []
        parts += [self.modality] if self.modality != "image" else []
        marks = [CLOSED_LOOP] * self.closed_loop + [remarks.SEEN] * bool(self.seen)
        return ", ".join([" ".join([self.name, *marks]), *parts])


@dataclasses.dataclass(frozen=True)
class Answers:
    """All rows' replies to the same questions; `asked` holds them with options as shown."""

    origin: evaluate.Origin
    rows: tuple[evaluate.Row, ...]
    asked: tuple[QA, ...]


@dataclasses.dataclass(frozen=True)
class Scores(Answers):
    """`positions` counts how often a model chose the first, second ... option."""

    cells: tuple[evaluate.Cell, ...]
    positions: dict[str, dict[str, dict[str, int]]]

    @property
    def notes(self) -> dict[str, tuple[str, ...]]:
        """By track: what must stand under its tables."""
        closed = any(CLOSED_LOOP in row.name for row in self.rows)
        tracks = dict.fromkeys(map(evaluate.track_of, self.asked))
        found = remarks.by_track(self.asked)
        mark = (remarks.CLOSED_LOOP_NOTE,) if closed else ()
        return {track: (*found.get(track, ()), *mark) for track in tracks}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self.origin),
            "questions": len(self.asked),
            "notes": self.notes,
            "not_computed": {row.name: row.note for row in self.rows if row.note},
            "positions": self.positions,
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
        }


def load_run(path: Path, questions: Questions | None = None) -> Run:
    """Reads a predictions file, or a folder that `pbs bench run` wrote."""
    path = Path(path)
    file = path / PREDICTIONS if path.is_dir() else path
    predictions = load_predictions(file, questions)
    card_path = file.with_name(RUN_CARD)
    card = json.loads(card_path.read_text()) if file.name == PREDICTIONS and card_path.is_file() else {}
    by_image = "image" in (card.get("split_level"), questions.split_level if questions else "")
    dataset_id = questions.dataset_id if questions else card.get("dataset_id") or questions_id(predictions)
    seen = remarks.seen_by_backbone(card, (item.qa for item in predictions))
    return Run(
        name=card.get("name") or (path.name if path.is_dir() else path.stem),
        seed=int(card.get("seed", 0)),
        modality=card.get("modality", "image"),
        protocol=card.get("protocol") or protocol_of(predictions),
        dataset_id=dataset_id,
        predictions=tuple(predictions),
        remarks=(
            *card.get("model", {}).get("remarks", ()),
            *((BY_IMAGE,) if by_image else ()),
            *remarks.seen_note(seen),
        ),
        patches=card.get("patches"),
        closed_loop=remarks.wrote_them(card, str(card.get("name") or path.stem), (item.qa for item in predictions)),
        seen=seen,
    )


def gather(
    runs: Sequence[Run],
    *,
    train: Sequence[QA] | None = None,
    expected: Questions | None = None,
    errors_as_wrong: bool = False,
) -> Answers:
    """Lays the runs beside the blind rows.

    Args:
      train: training questions, for the blind rows that learn answers.
      expected: the questions that should have been asked; unasked ones lower coverage.
      errors_as_wrong: score an error as an empty answer instead of leaving it out.
    Raises DataError when runs must not be compared.
    """
    origin = _common_origin(runs)
    asked: dict[Key, QA] = {item.key: item.qa for run in runs for item in run.predictions}
    known = {item.qa.id for run in runs for item in run.predictions}
    for qa in expected.items if expected else ():
        if qa.id not in known:
            asked[qa.id, tuple(range(len(qa.options)))] = qa
    questions = tuple(asked.values())
    rows = [evaluate.Row(r.name, "blind", (r.replies,), r.note) for r in blind.blind_rows(questions, train)]
    by_label: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.modality == "image"):
        by_label.setdefault(run.label, []).append(run)
    for label, seeds in by_label.items():
        if len({run.seed for run in seeds}) < len(seeds):
            raise DataError(f'two runs of "{label}" have the same seed: give each its own --seed or --name')
        replies = tuple(_replies(run, list(asked), errors_as_wrong) for run in sorted(seeds, key=lambda run: run.seed))
        rows.append(evaluate.Row(label, "model" if seeds[0].modality == "image" else "blind", replies))
    return Answers(origin, tuple(rows), questions)


def score_runs(
    runs: Sequence[Run],
    settings: evaluate.Settings,
    *,
    train: Sequence[QA] | None = None,
    expected: Questions | None = None,
    errors_as_wrong: bool = False,
) -> Scores:
    """Scores all runs beside the blind rows; arguments and errors as `gather`."""
    found = gather(runs, train=train, expected=expected, errors_as_wrong=errors_as_wrong)
    cells = evaluate.evaluate(found.asked, found.rows, found.origin, settings)
    positions = _positions(found.asked, found.rows, settings.profiles)
    return Scores(found.origin, found.rows, found.asked, tuple(cells), positions)


def _replies(run: Run, keys: Sequence[Key], errors_as_wrong: bool) -> tuple[str | None, ...]:
    given = {
        item.key: "" if item.status == "error" else item.prediction
        for item in run.predictions
        if errors_as_wrong or item.status != "error"
    }
    return tuple(given.get(key) for key in keys)


def _common_origin(runs: Sequence[Run]) -> evaluate.Origin:
    if not runs:
        raise DataError("no run to score: give at least one predictions file or run folder")
    modes: dict[str, set[str]] = {}
    for run in runs:
        for item in run.predictions:
            modes.setdefault(item.qa.question_type, set()).add(item.answer_mode)
    for question_type, found in modes.items():
        if len(found) > 1:
            raise DataError(f"{question_type} answers mix the modes {', '.join(sorted(found))}: score them apart")
    for field, why in (("protocol", "option orders"), ("dataset_id", "question sets")):
        values = sorted({getattr(run, field) for run in runs})
        if len(values) > 1:
            raise DataError(f"the runs differ in {field} ({', '.join(v[:12] for v in values)}), so in their {why}")
    answer_modes = {question_type: min(found) for question_type, found in modes.items()}
    return evaluate.Origin(answer_modes, runs[0].protocol, runs[0].dataset_id)


def _positions(
    questions: Sequence[QA], rows: Sequence[evaluate.Row], profiles: Sequence[str]
) -> dict[str, dict[str, dict[str, int]]]:
    """{row: {profile: {letter or "invalid": count}}} over a model's multiple-choice answers, all seeds."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for row in rows:
        if row.kind != "model":
            continue
        for profile in profiles:
            counts: Counter[str] = Counter()
            for replies in row.replies:
                for qa, reply in zip(questions, replies, strict=True):
                    if qa.question_type == "multiple_choice" and reply is not None:
                        value = extract(profile, qa.question_type, reply, qa.options).value
                        counts["invalid" if value is None else blind.LETTERS[qa.options.index(value)]] += 1
            out.setdefault(row.name, {})[profile] = dict(sorted(counts.items()))
    return out
