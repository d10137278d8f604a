"""Paired comparison of rows on the same questions: difference, clustered 95 % interval, sign-flip p, Holm in a family.

The gain of image over blind (the same model without its image, same answer mode) is the part of a score that pixels
can explain.
"""

from __future__ import annotations

import dataclasses
import itertools
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


FAMILIES = ("track", "metric")


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


def compare(
    answers: Answers,
    pairs: Sequence[tuple[str, str]],
    settings: Settings,
    profile: str = "robust",
    family: str = "track",
) -> list[Comparison]:
    """All pairs of rows, on every track and question type that both rows answer.

    Args:
      pairs: (a, b) names of rows.
      family: the tests that Holm's correction takes together: those of one "track", or of one "metric" on a track (a
        leaderboard's, where each metric ranks for itself).
    Raises DataError for an unknown row or family.
    """
    if family not in FAMILIES:
        raise DataError(f'family "{family}" is unknown: use {" or ".join(FAMILIES)}')
    rows = {row.name: row for row in answers.rows}
    for name in dict.fromkeys(itertools.chain(*pairs)):
        if name not in rows:
            raise DataError(f'there is no row "{name}"; rows: {", ".join(rows)}')
    columns = {
        name: _columns(answers.asked, rows[name], profile, settings) for name in dict.fromkeys(itertools.chain(*pairs))
    }
    found: list[Comparison] = []
    for track in dict.fromkeys(map(track_of, answers.asked)):
        for question_type in QUESTION_TYPES:
            of_type = [
                k for k, qa in enumerate(answers.asked) if (track_of(qa), qa.question_type) == (track, question_type)
            ]
            for a, b in pairs if of_type else ():
                difference = _difference(answers.asked, of_type, columns[a], columns[b], question_type, settings)
                if difference:
                    metric = PRIMARY[question_type][0]
                    found.append(Comparison(a, b, track, question_type, metric, difference, difference.p))
    families: dict[tuple[str, ...], list[int]] = {}
    for k, item in enumerate(found):
        families.setdefault((item.track,) if family == "track" else (item.track, item.metric), []).append(k)
    for places in families.values():
        for k, p in zip(places, stats.holm([found[k].difference.p for k in places]), strict=True):
            found[k] = dataclasses.replace(found[k], p_holm=p)
    return found


def _difference(
    asked: Sequence[QA],
    places: Sequence[int],
    a: Mapping[str, np.ndarray],
    b: Mapping[str, np.ndarray],
    question_type: str,
    settings: Settings,
) -> stats.Difference | None:
    """None where the rows have no answered question in common. Orders of one question are averaged first."""
    missing = np.full(len(asked), np.nan)
    values = [columns.get(PRIMARY[question_type][1], missing) for columns in (a, b)]
    by_id: dict[str, list[int]] = {}
    for k in places:
        if all(np.isfinite(value[k]) for value in values):
            by_id.setdefault(asked[k].id, []).append(k)
    if not by_id:
        return None
    questions = [asked[orders[0]] for orders in by_id.values()]
    weights = _weights(questions)
    one, other = (np.array([value[orders].mean() for orders in by_id.values()]) * weights for value in values)
    return stats.paired_difference(
        one,
        other,
        [cluster_of(qa, settings.cluster) for qa in questions],
        strata=[str(qa.source.get("dataset", "")) for qa in questions],
        draws=settings.draws,
        seed=settings.seed,
    )


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


def to_table(title: str, comparisons: Sequence[Comparison], family: str = "track") -> Table:
    rows = tuple(
        (
            f"{item.a} - {item.b}",
            TRACKS.get(item.track, item.track),
            f"{TYPE_NAMES[item.question_type]} {METRIC_NAMES[item.metric]} (n={item.difference.n})",
            str(item.difference),
            f"{item.p_holm:.4f}",
        )
        for item in comparisons
    )
    note = (
        f"Paired by question, resampled by cluster; p from sign flips of clusters, Holm over the tests of a {family}."
    )
    return Table(title, ("", "Track", "Metric", "Difference [95 %]", "p (Holm)"), rows, (note,))
