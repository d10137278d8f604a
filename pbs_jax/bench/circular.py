"""The circular protocol: each multiple-choice question in every rotation of its options, counted once.

Soft score: the share of rotations answered rightly; strict (CircularEval): all of them. A model that always says one
letter gets 1/k and 0; one that sees the answer gets 1 and 1. `same` is the share of questions whose chosen option stays
the same in all rotations, right or wrong; accuracy by the gold's position shows which letter a model leans to.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_prep import stats
from data_prep.prompts import letter
from data_prep.schema import QA, DataError
from pbs_jax.bench.evaluate import SMALL, Row, Settings, cluster_of, track_of
from pbs_jax.bench.extract import extract
from pbs_jax.bench.score import Answers
from pbs_jax.bench.tables import TRACKS, Table


@dataclasses.dataclass(frozen=True, slots=True)
class Circular:
    """One row on a track; seeds averaged question by question.

    `by_position`: accuracy where the gold stands first, second … with the number of rotations; `chosen`: share of
    answers that name the first, second … option, the last entry is what could not be read.
    """

    row: str
    kind: str
    track: str
    soft: stats.Interval
    strict: stats.Interval
    same: float
    chance: float
    by_position: tuple[tuple[float, int], ...]
    chosen: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def circular(answers: Answers, settings: Settings, profile: str = "robust") -> list[Circular]:
    """All rows on all tracks. Questions that lack a rotation's answer are left out. Raises DataError without rotations."""
    tracks: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for k, qa in enumerate(answers.asked):
        if qa.question_type == "multiple_choice":
            tracks[track_of(qa)][qa.id].append(k)
    if answers.origin.protocol != "circular":
        raise DataError(f"the answers are of protocol {answers.origin.protocol}: run with --protocol circular")
    found = []
    for track, questions in tracks.items():
        for row in answers.rows:
            if (one := _row(answers.asked, row, list(questions.values()), track, settings, profile)) is not None:
                found.append(one)
    return found


def _row(
    asked: Sequence[QA], row: Row, questions: Sequence[list[int]], track: str, settings: Settings, profile: str
) -> Circular | None:
    kept = [q for q in questions if len(q) == len(asked[q[0]].options)]
    kept = [q for q in kept if all(replies[k] is not None for replies in row.replies for k in q)]
    if not kept:
        return None
    places = [k for q in kept for k in q]  # the presentations, question by question
    sizes = np.array([len(q) for q in kept])
    starts = np.cumsum([0, *sizes])[:-1]
    width = int(sizes.max())
    golds = np.array([asked[k].options.index(asked[k].answer) for k in places])
    # Positions chosen, [seeds, presentations]; `width` stands for what can't be read.
    picks = np.array([[_pick(profile, asked[k], str(replies[k]), width) for k in places] for replies in row.replies])
    right = picks == golds
    share = np.add.reduceat(right, starts, axis=1, dtype=float) / sizes
    # Which option that was, whatever its position: its place in the alphabet, -1 for what can't be read.
    named = np.full((len(places), width + 1), -1)
    for line, k in zip(named, places, strict=True):
        line[: len(asked[k].options)] = [sorted(asked[k].options).index(option) for option in asked[k].options]
    options = named[np.arange(len(places)), picks]
    lowest, highest = (part.reduceat(options, starts, axis=1) for part in (np.minimum, np.maximum))
    first = [asked[q[0]] for q in kept]
    clusters = [cluster_of(qa, settings.cluster) for qa in first]
    strata = [str(qa.source.get("dataset", "")) for qa in first]

    def interval(values: np.ndarray) -> stats.Interval:
        found = stats.clustered_ci(values, clusters, strata=strata, draws=settings.draws, seed=settings.seed)
        if found.value not in (0.0, 1.0):
            return found
        low, high = stats.wilson(round(found.value * found.n), found.n)  # a bootstrap of a constant knows no doubt
        return dataclasses.replace(found, low=low, high=high)

    return Circular(
        row=row.name,
        kind=row.kind,
        track=track,
        soft=interval(share.mean(axis=0)),
        strict=interval((share > 1 - 1e-9).mean(axis=0)),
        same=float(np.mean((lowest == highest) & (lowest >= 0))),
        chance=float(np.mean(1 / sizes)),
        by_position=tuple(
            (float(right[:, golds == k].mean()), int((golds == k).sum())) for k in range(width) if (golds == k).any()
        ),
        chosen=tuple(float(np.mean(picks == k)) for k in range(width + 1)),
    )


def _pick(profile: str, qa: QA, reply: str, unread: int) -> int:
    value = extract(profile, qa.question_type, reply, qa.options).value
    return unread if value is None else qa.options.index(value)


def to_tables(found: Sequence[Circular]) -> list[Table]:
    """A table a track: blind rows first, then models."""
    out = []
    for track in dict.fromkeys(item.track for item in found):
        items = sorted((item for item in found if item.track == track), key=lambda item: item.kind != "blind")
        width = max(len(item.by_position) for item in items)
        header = (
            "", f"Soft [95 %] (n={max(item.soft.n for item in items)})", "Strict [95 %]", "Same choice",
            *(f"Gold {letter(k)}" for k in range(width)), *(f"Says {letter(k)}" for k in range(width)), "Unread",
        )  # fmt: skip
        rows = tuple(
            (
                item.row,
                _shown(item.soft),
                _shown(item.strict),
                f"{item.same:.3f}",
                *(f"{value:.3f}" for value, _ in item.by_position),
                *(f"{value:.3f}" for value in item.chosen),
            )
            for item in items
        )
        notes = (
            "Soft: share of a question's rotations answered rightly; strict: all of them. Rotations are one question, not new n.",
            f"A model that knows nothing has soft {items[0].chance:.3f}, and as much strict only if it keeps to one option.",
            "Gold A: accuracy where the gold stands first. Says A: share of answers that name the first option.",
        )
        blind = sum(item.kind == "blind" for item in items)
        out.append(Table(f"{TRACKS.get(track, track)}: option order (circular)", header, rows, notes, blind))
    return out


def _shown(interval: stats.Interval) -> str:
    if interval.n < SMALL:
        return f"{interval.value:.3f} (n={interval.n})"
    return str(interval)
