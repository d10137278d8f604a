"""The visual gain: a model's score with the image minus its score without, on the same questions.

Without: `blind` (no picture), `blank` (a grey one) or `mismatched` (another cell's or slide's). Pairs are found by the
model's name; the difference is paired by question, its interval and p are those of `compare` (clusters, sign flips,
Holm over a track). A score whose gain can't be told from 0 is a score that text alone explains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from data_prep.schema import DataError
from pbs_jax.bench import compare
from pbs_jax.bench.evaluate import ALL, SMALL, Settings
from pbs_jax.bench.score import Run, Scores
from pbs_jax.bench.tables import METRIC_NAMES, TRACKS, TYPE_NAMES, Table

WITHOUT = ("blind", "blank", "mismatched")
LEVEL = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Gain:
    """`image` and `without` are the two scores, `comparison` their paired difference."""

    comparison: compare.Comparison
    image: float | None
    without: float | None

    @property
    def verdict(self) -> str:
        difference = self.comparison.difference
        if difference.n < SMALL:
            return "small n"
        if self.comparison.p_holm >= LEVEL or difference.low <= 0 <= difference.high:
            return "no gain to be seen"
        return "the image helps" if difference.value > 0 else "the image hurts"

    def to_json(self) -> dict[str, Any]:
        scores = {"image": self.image, "without": self.without, "verdict": self.verdict}
        return self.comparison.to_json() | scores


def pairs(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """(label with image, label without) of each model, in the order of WITHOUT.

    Runs that show patches are paired with those that show as many, and with blind ones, which show none.
    """
    found: dict[tuple[str, str], None] = {}
    for modality in WITHOUT:
        for image in runs:
            for other in runs:
                same = image.name == other.name and other.patches in (None, image.patches)
                if image.modality == "image" and other.modality == modality and same:
                    found[image.label, other.label] = None
    return list(found)


def gains(scores: Scores, runs: Sequence[Run], settings: Settings, profile: str = "robust") -> list[Gain]:
    """All pairs on every track and question type. Raises DataError when no model was run both ways."""
    if not (both := pairs(runs)):
        raise DataError("no model was run with and without its image: give runs of one --name and two modalities")
    at = {
        (c.row, c.track, c.question_type, c.metric): c.value
        for c in scores.cells
        if (c.profile, c.task) == (profile, ALL)
    }
    return [
        Gain(item, *(at.get((row, item.track, item.question_type, item.metric)) for row in (item.a, item.b)))
        for item in compare.compare(scores, both, settings, profile)
    ]


def to_table(found: Sequence[Gain], title: str = "What the image adds") -> Table:
    rows = []
    for item in found:
        c, d = item.comparison, item.comparison.difference
        name = f"{TYPE_NAMES[c.question_type]} {METRIC_NAMES[c.metric]} (n={d.n})"
        scores = ("-" if value is None else f"{value:.3f}" for value in (item.image, item.without))
        track = TRACKS.get(c.track, c.track)
        rows.append((f"{c.a} - {c.b}", track, name, *scores, str(d), f"{c.p_holm:.4f}", item.verdict))
    header = ("", "Track", "Metric", "With", "Without", "Gain [95 %]", "p (Holm)", "")
    note = "Paired by question, resampled by cluster; p from sign flips of clusters, Holm over the tests of a track."
    return Table(title, header, tuple(rows), (note,))
