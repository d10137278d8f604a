"""The eleven attributes as fill-in-the-blank: does the model see morphology, or only the cell's type?

Cell type alone nearly solves most attributes, so the row to beat answers with the majority value of the model's *own
predicted* class (training cells). "Evidence beyond cell type" is claimed only where image minus that row is above 0:
paired by question, resampled by image, Holm over the attributes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_prep import stats
from data_prep.schema import ATTRIBUTES, QA, DataError
from pbs_jax.bench.evaluate import Settings, cluster_of
from pbs_jax.bench.metrics import score_answer
from pbs_jax.bench.tables import Table

LABEL = "label"
ROWS = ("majority", "true class", "own class", "image")
EVIDENCE, NO_EVIDENCE = "evidence beyond cell type", "no evidence beyond cell type"
ALPHA = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Attribute:
    """EMatch by row ("majority", "true class", "own class", "image"), and the difference image minus own class."""

    name: str
    n: int
    rows: Mapping[str, stats.Interval]
    difference: stats.Difference
    p_holm: float
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def fact_of(qa: QA) -> str | None:
    """The single fact that a template question asks for ("label" or an attribute), None for other questions."""
    facts = [str(fact).partition("=")[0] for fact in qa.provenance.get("facts", ())]
    return facts[0] if len(facts) == 1 else None


def attribute_rows(
    train: Sequence[QA], asked: Sequence[QA], seeds: Sequence[Sequence[str | None]], settings: Settings
) -> list[Attribute]:
    """Scores the attribute questions of `asked`; `seeds[s][k]` is the reply of seed s to question k. Seeds are
    averaged.

    The table uses the `robust` profile. Raises DataError without fill-in-the-blank questions about types and
    attributes in `train`.
    """
    learned = _learn(train)
    predicted = [_own_classes(asked, replies, learned) for replies in seeds]
    truth = {qa.image_id: qa.answer for qa in asked if _asks(qa) == LABEL}
    found = []
    for name in ATTRIBUTES:
        places = [k for k, qa in enumerate(asked) if _asks(qa) == name and qa.image_id in truth]
        places = [k for k in places if all(replies[k] is not None for replies in seeds)]
        if places:
            found.append(
                (name, *_score(name, [asked[k] for k in places], places, seeds, predicted, truth, learned, settings))
            )
    adjusted = stats.holm([difference.p for _, _, _, difference in found])
    out = []
    for (name, n, rows, difference), p in zip(found, adjusted, strict=True):
        beyond = difference.low > 0 and p < ALPHA
        out.append(Attribute(name, n, rows, difference, p, EVIDENCE if beyond else NO_EVIDENCE))
    return out


def _asks(qa: QA) -> str | None:
    return fact_of(qa) if qa.question_type == "fill_blank" else None


class _Learned:
    """Majority answers of the training cells: over all, and by class."""

    def __init__(self, overall: Mapping[str, Counter[str]], by_class: Mapping[tuple[str, str], Counter[str]]):
        self._overall, self._by_class = overall, by_class
        self.classes = sorted({label for _, label in by_class})

    def answer(self, attribute: str, label: str | None = None) -> str:
        counts = self._by_class.get((attribute, label or "")) or self._overall[attribute]
        return min(counts, key=lambda answer: (-counts[answer], answer))


def _learn(train: Sequence[QA]) -> _Learned:
    label = {qa.image_id: qa.answer for qa in train if _asks(qa) == LABEL}
    overall: dict[str, Counter[str]] = defaultdict(Counter)
    by_class: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for qa in train:
        attribute = _asks(qa)
        if attribute in ATTRIBUTES and qa.image_id in label:
            overall[attribute][qa.answer] += 1
            by_class[attribute, label[qa.image_id]][qa.answer] += 1
    if not overall:
        raise DataError(
            "the training questions ask no attribute as fill-in-the-blank: give the cell_qa dataset as --train"
        )
    return _Learned(overall, by_class)


def _own_classes(asked: Sequence[QA], replies: Sequence[str | None], learned: _Learned) -> dict[str, str]:
    """The class that the model itself names for each image; absent where it names none of the training classes."""
    own = {}
    for qa, reply in zip(asked, replies, strict=True):
        if _asks(qa) == LABEL and reply is not None:
            named = [name for name in learned.classes if _matches(reply, name)]
            if len(named) == 1:
                own[qa.image_id] = named[0]
    return own


def _matches(reply: str, answer: str) -> float:
    return score_answer("robust", "fill_blank", reply, answer).columns["exact"]


def _score(
    name: str,
    questions: Sequence[QA],
    places: Sequence[int],
    seeds: Sequence[Sequence[str | None]],
    predicted: Sequence[Mapping[str, str]],
    truth: Mapping[str, str],
    learned: _Learned,
    settings: Settings,
) -> tuple[int, dict[str, stats.Interval], stats.Difference]:
    replies = {
        "majority": [[learned.answer(name)] * len(questions)],
        "true class": [[learned.answer(name, truth[qa.image_id]) for qa in questions]],
        "own class": [[learned.answer(name, own.get(qa.image_id)) for qa in questions] for own in predicted],
        "image": [[str(given[k]) for k in places] for given in seeds],
    }
    hits = {
        row: np.mean([[_matches(r, qa.answer) for r, qa in zip(s, questions, strict=True)] for s in said], axis=0)
        for row, said in replies.items()
    }
    clusters = [cluster_of(qa, settings.cluster) for qa in questions]
    draws, seed = settings.draws, settings.seed
    rows = {row: stats.clustered_ci(values, clusters, draws=draws, seed=seed) for row, values in hits.items()}
    difference = stats.paired_difference(hits["image"], hits["own class"], clusters, draws=draws, seed=seed)
    return len(questions), rows, difference


def to_table(attributes: Sequence[Attribute], model: str) -> Table:
    rows = tuple(
        (
            f"{item.name} (n={item.n})",
            *(str(item.rows[row]) for row in ROWS),
            str(item.difference),
            f"{item.p_holm:.4f}",
            item.verdict,
        )
        for item in attributes
    )
    header = ("Attribute", "Majority", "Majority | true class", f"Majority | {model}'s class", model)
    return Table(
        f"Attributes beyond cell type - {model}",
        (*header, "Image - own class", "p (Holm)", "Verdict"),
        rows,
        ("EMatch, robust profile; 95 % intervals by image; majority values from training cells.",),
    )
