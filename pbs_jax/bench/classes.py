"""Cell type by class, for out-of-domain cells above all: accuracy per class, macro mean, beside a constant answer.

Reads the fill-in-the-blank questions about the type. Out-of-domain sets are uneven (BCCD: 0.59 neutrophils), so the
plain accuracy of "always Neutrophil" stands beside every figure, and classes below MIN_CLASS cells are left out of
the macro mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_prep import stats
from data_prep.schema import QA, WHITE_CELL_CLASSES
from pbs_jax.bench.attributes import LABEL, fact_of
from pbs_jax.bench.evaluate import Settings, cluster_of, track_of
from pbs_jax.bench.metrics import score_answer
from pbs_jax.bench.tables import TRACKS, Table

MIN_CLASS = 20
CONSTANT = WHITE_CELL_CLASSES[0]


@dataclasses.dataclass(frozen=True, slots=True)
class ByClass:
    """EMatch (robust) of the type questions of one track; `constant` is always answering CONSTANT."""

    track: str
    classes: Mapping[str, stats.Interval]
    overall: stats.Interval
    macro: float
    constant: float
    constant_macro: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def by_class(asked: Sequence[QA], seeds: Sequence[Sequence[str | None]], settings: Settings) -> list[ByClass]:
    """One entry per track with type questions; `seeds[s][k]` answers question k. Seeds are averaged."""
    out = []
    for track in dict.fromkeys(map(track_of, asked)):
        places = [k for k, qa in enumerate(asked) if track_of(qa) == track and _asks_type(qa)]
        places = [k for k in places if all(replies[k] is not None for replies in seeds)]
        if not places:
            continue
        questions = [asked[k] for k in places]
        hits = np.mean([[_hit(str(given[k]), asked[k]) for k in places] for given in seeds], axis=0)
        gold = np.array([qa.answer for qa in questions])
        clusters = np.array([cluster_of(qa, settings.cluster) for qa in questions])
        draws, seed = settings.draws, settings.seed
        names = sorted(set(gold), key=lambda name: (-(gold == name).sum(), name))
        classes = {
            name: stats.clustered_ci(hits[gold == name], clusters[gold == name].tolist(), draws=draws, seed=seed)
            for name in names
        }
        large = [name for name in names if classes[name].n >= MIN_CLASS]
        out.append(
            ByClass(
                track=track,
                classes=classes,
                overall=stats.clustered_ci(hits, clusters.tolist(), draws=draws, seed=seed),
                macro=float(np.mean([classes[name].value for name in large])) if large else float("nan"),
                constant=float((gold == CONSTANT).mean()),
                constant_macro=1 / len(large) if CONSTANT in large else 0.0,
            )
        )
    return out


def _asks_type(qa: QA) -> bool:
    return qa.question_type == "fill_blank" and fact_of(qa) == LABEL


def _hit(reply: str, qa: QA) -> float:
    return score_answer("robust", "fill_blank", reply, qa.answer).columns["exact"]


def to_table(found: Sequence[ByClass], model: str) -> Table:
    rows = []
    for item in found:
        track = TRACKS.get(item.track, item.track)
        rows += [
            (f"{track}: {name} (n={value.n})", _interval(value), "1.000" if name == CONSTANT else "0.000")
            for name, value in item.classes.items()
        ]
        rows.append((f"{track}: all (n={item.overall.n})", _interval(item.overall), f"{item.constant:.3f}"))
        rows.append(
            (f"{track}: macro, classes with n >= {MIN_CLASS}", f"{item.macro:.3f}", f"{item.constant_macro:.3f}")
        )
    note = "EMatch of the fill-in-the-blank questions about the type, robust profile; 95 % intervals by cluster."
    return Table(f"Cell type by class - {model}", ("", model, f'always "{CONSTANT}"'), tuple(rows), (note,))


def _interval(value: stats.Interval) -> str:
    low, high = value.low, value.high
    if value.value in (0.0, 1.0):  # a bootstrap of a constant knows no doubt
        low, high = stats.wilson(round(value.value * value.n), value.n)
    return str(dataclasses.replace(value, low=low, high=high)) if value.n > 1 else f"{value.value:.3f}"
