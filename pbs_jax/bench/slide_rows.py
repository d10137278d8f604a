"""The slide track's own rows and its table of the dominant cell.

A slide model is shown a slide's features in place of pictures. Rows to beat: the same model on the background slides
(white cells never there), the same training on raw backbone features, blind, and one who calls everything a neutrophil.
Slides are resampled as wholes; mosaics of one split share a pool of cells, so intervals hold for this pool of cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep import stats
from data_prep.schema import QA, WHITE_CELL_CLASSES
from pbs_jax.bench.attributes import fact_of
from pbs_jax.bench.compare import PRIMARY
from pbs_jax.bench.evaluate import Settings, cluster_of, reply_columns
from pbs_jax.bench.score import Answers
from pbs_jax.bench.tables import TYPE_NAMES, Table

if TYPE_CHECKING:
    from pbs_jax.data.slide_examples import SlideBags

COMMONEST = WHITE_CELL_CLASSES[0]  # of normal blood
DOMINANT = "dominant"  # the fact that the dominant-cell templates ask for
KINDS = ("fill_blank", "multiple_choice")
LEAD = (
    "Every row against the model: no picture, the slide before its white cells were pasted (background), raw backbone "
    "features, and one who calls every slide neutrophilic."
)
BY_SLIDE = "Intervals are 95 %, by slide."
POOL = "Intervals are 95 %, by slide, given this cell pool: mosaics of a split share their cells."


class EncodedBags:
    """Slide features as `pbs_jax.bench.pictures` takes pictures. `places`: slide id -> (records by number, number)."""

    def __init__(self, bags: SlideBags) -> None:
        self._bags = bags
        self.content_id = bags.content_id
        self.places: dict[str, tuple[EncodedBags, int]] = {id: (self, k) for k, id in enumerate(bags.ids)}

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": self._bags[self._bags.ids[number]].encode()}


def always_neutrophil(asked: Sequence[QA]) -> tuple[str | None, ...]:
    """ "Neutrophil" to every slide question whose answers are white-cell classes; None for the others."""
    return tuple(COMMONEST if qa.level == "slide" and _asks_class(qa) else None for qa in asked)


def _asks_class(qa: QA) -> bool:
    match qa.question_type:
        case "multiple_choice":
            return COMMONEST in qa.options
        case "fill_blank":
            return qa.answer in WHITE_CELL_CLASSES
    return False


def dominant_tables(answers: Answers, model: str, settings: Settings, profile: str = "robust") -> list[Table]:
    """Questions for the most frequent white cell, a table a question type: every row's share of right answers, and `model`
    minus that row. Rows without an answer to them are left out; seeds are averaged."""
    places = {
        kind: [
            k
            for k, qa in enumerate(answers.asked)
            if qa.level == "slide" and qa.question_type == kind and fact_of(qa) == DOMINANT
        ]
        for kind in KINDS
    }
    if not any(places.values()):
        return []
    scored = {row.name: _scored(answers, row.replies, profile, settings) for row in answers.rows}
    scored["always Neutrophil"] = _scored(answers, (always_neutrophil(answers.asked),), profile, settings)
    return [
        _dominant_table(
            [answers.asked[k] for k in at], {name: row[at] for name, row in scored.items()}, model, settings
        )
        for at in places.values()
        if at
    ]


def _dominant_table(questions: Sequence[QA], scored: dict[str, np.ndarray], model: str, settings: Settings) -> Table:
    """`scored`: float[questions] by row."""
    clusters = [cluster_of(qa, settings.cluster) for qa in questions]
    rows = []
    for name, values in scored.items():
        known = np.isfinite(values) & np.isfinite(scored[model])
        if name == model or not known.any():
            continue
        rows.append((name, *_line(values, scored[model], known, clusters, settings)))
    own = np.isfinite(scored[model])
    rows.append((model, *_line(scored[model], None, own, clusters, settings)))
    kind = TYPE_NAMES[questions[0].question_type]
    header = ("", "n", "slides", "right [95 %]", f"{model} minus row [95 %]")
    made = any(qa.provenance.get("source") == "truth" for qa in questions)
    return Table(
        f"Dominant white cell, {kind} - {model}", header, tuple(rows), (POOL if made else BY_SLIDE,), len(rows) - 1
    )


def _scored(answers: Answers, replies: Sequence[Sequence[str | None]], profile: str, settings: Settings) -> np.ndarray:
    """float[questions]: right or not, mean over seeds, nan where a seed has no answer."""
    seeds = []
    for seed in replies:
        columns = reply_columns(answers.asked, seed, profile, settings)
        kinds = [PRIMARY[qa.question_type][1] for qa in answers.asked]
        missing = np.full(len(kinds), np.nan)
        seeds.append([columns.get(kind, missing)[k] for k, kind in enumerate(kinds)])
    return np.mean(seeds, axis=0)


def _line(
    values: np.ndarray, model: np.ndarray | None, known: np.ndarray, clusters: Sequence[str], settings: Settings
) -> tuple[str, str, str, str]:
    of = [cluster for cluster, real in zip(clusters, known, strict=True) if real]
    share = stats.clustered_ci(values[known], of, draws=settings.draws, seed=settings.seed)
    if model is None:
        return str(share.n), str(share.clusters), str(share), ""
    gap = stats.paired_difference(model[known], values[known], of, draws=settings.draws, seed=settings.seed)
    return str(share.n), str(share.clusters), str(share), str(gap)
