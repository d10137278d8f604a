"""Paired comparison of two rows on the same questions: difference, clustered 95 % interval, sign-flip p, Holm within
a track.

The gain of image over blind (the same model without its image, same answer mode) is the part of a score that pixels
can explain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_prep import stats
from data_prep.schema import QA, QUESTION_TYPES, DataError
from pbs_jax.bench.evaluate import Row, Settings, cluster_of, reply_columns, track_of
from pbs_jax.bench.score import Answers
from pbs_jax.bench.tables import METRIC_NAMES, TRACKS, TYPE_NAMES, Table

# One metric per question type; true/false answers are weighted so that their mean is the balanced accuracy.
PRIMARY = {
    "true_false": ("balanced_accuracy", "right"),
    "multiple_choice": ("accuracy", "right"),
    "fill_blank": ("exact_match", "exact"),
    "open": ("rouge_l", "rouge_l"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Row `a` minus row `b` on one question type of a track; seeds averaged."""

    a: str
    b: str
    track: str
    question_type: str
    metric: str
    difference: stats.Difference
    p_holm: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(answers: Answers, a: str, b: str, settings: Settings, profile: str = "robust") -> list[Comparison]:
    """All tracks and question types that both rows answer. Raises DataError for an unknown row."""
    rows = {row.name: row for row in answers.rows}
    for name in (a, b):
        if name not in rows:
            raise DataError(f'there is no row "{name}"; rows: {", ".join(rows)}')
    columns = {name: _columns(answers.asked, rows[name], profile, settings) for name in (a, b)}
    found: list[tuple[str, str, str, stats.Difference]] = []
    for track in dict.fromkeys(map(track_of, answers.asked)):
        for question_type in QUESTION_TYPES:
            metric, column = PRIMARY[question_type]
            values = [columns[name].get(column, np.full(len(answers.asked), np.nan)) for name in (a, b)]
            places = [
                k
                for k, qa in enumerate(answers.asked)
                if (track_of(qa), qa.question_type) == (track, question_type) and all(np.isfinite(v[k]) for v in values)
            ]
            if places:
                questions = [answers.asked[k] for k in places]
                weights = _weights(questions)
                difference = stats.paired_difference(
                    values[0][places] * weights,
                    values[1][places] * weights,
                    [cluster_of(qa, settings.cluster) for qa in questions],
                    strata=[str(qa.source.get("dataset", "")) for qa in questions],
                    draws=settings.draws,
                    seed=settings.seed,
                )
                found.append((track, question_type, metric, difference))
    adjusted = stats.holm([difference.p for *_, difference in found])
    return [
        Comparison(a, b, track, question_type, metric, difference, p)
        for (track, question_type, metric, difference), p in zip(found, adjusted, strict=True)
    ]


def _columns(asked: Sequence[QA], row: Row, profile: str, settings: Settings) -> Mapping[str, np.ndarray]:
    """Columns averaged over the row's seeds."""
    plain = dataclasses.replace(settings, similarity=None)
    seeds = [reply_columns(asked, replies, profile, plain) for replies in row.replies]
    return {name: np.mean([seed[name] for seed in seeds], axis=0) for name in seeds[0]}


def _weights(questions: Sequence[QA]) -> np.ndarray:
    """1 each, or for true/false n / (2 n_gold)."""
    if questions[0].question_type != "true_false":
        return np.ones(len(questions))
    gold = np.array([qa.answer == "True" for qa in questions])
    return np.where(gold, len(gold) / (2 * max(gold.sum(), 1)), len(gold) / (2 * max((~gold).sum(), 1)))


def to_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    rows = tuple(
        (
            f"{item.a} - {item.b}",
            TRACKS.get(item.track, item.track),
            f"{TYPE_NAMES[item.question_type]} {METRIC_NAMES[item.metric]} (n={item.difference.n})",
            f"{item.difference.value:+.3f} [{item.difference.low:+.3f}, {item.difference.high:+.3f}]",
            f"{item.p_holm:.4f}",
        )
        for item in comparisons
    )
    note = "Paired by question, resampled by cluster; p from sign flips of clusters, Holm over the rows of one pair."
    return Table(title, ("", "Track", "Metric", "Difference [95 %]", "p (Holm)"), rows, (note,))
