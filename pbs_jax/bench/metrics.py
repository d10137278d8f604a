"""Scores of single answers, by profile, and the metrics made of them.

`paper` is bit-exact with the official scorer (tests: scorer_cases). `robust` differs in extraction (extract.py), in
tokens (normalize.py), in PMatch (token boundaries, a negated mention or an enumeration of cell classes doesn't count)
and takes ROUGE-L's F from rouge-score (tests: equal to its scorer to the last bit). A metric is a function of column
sums over answers, so that one resampling serves them all. Similarity is similarity.py's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rouge_score import scoring

from data_prep.schema import OTHERS, WHITE_CELL_CLASSES, DataError
from pbs_jax.bench import normalize
from pbs_jax.bench.extract import Extraction, affirmed, extract, mentions, paper_choice_text

Floats = NDArray[np.float64]
_SIBLINGS = frozenset(name.casefold() for name in (*WHITE_CELL_CLASSES, OTHERS))


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """One answer's column values (COLUMNS of its question type) and how it was read."""

    columns: Mapping[str, float]
    extraction: Extraction


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """`value(sums)` maps column sums {name: [draws]} (with "n", the number of answers) to the metric [draws]."""

    name: str
    columns: tuple[str, ...]
    value: Callable[[Mapping[str, Floats]], Floats]
    definition: Mapping[str, str]  # by profile, part of the signature
    is_mean: bool = True


def score_answer(profile: str, question_type: str, prediction: str, answer: str, options: Sequence[str] = ()) -> Score:
    """Scores one reply. `options` in the order shown. Raises DataError for an unknown profile or question type."""
    return _score(profile, question_type, prediction, answer, tuple(options))


@functools.lru_cache(maxsize=1 << 16)  # template questions repeat
def _score(profile: str, question_type: str, prediction: str, answer: str, options: tuple[str, ...]) -> Score:
    reading = extract(profile, question_type, prediction, options)
    invalid = float(reading.value is None)
    match question_type:
        case "true_false":
            columns = _true_false(profile, prediction, answer, reading)
        case "multiple_choice":
            right = _paper_choice(prediction, answer, options) if profile == "paper" else reading.value == answer
            columns = {"right": float(right)}
        case "fill_blank":
            exact, partial = _matches(profile, prediction, answer)
            columns = {"exact": exact, "partial": partial}
        case "open":
            columns = dict(zip(("bleu1", "rouge_l"), _overlaps(profile, prediction, answer), strict=True))
        case _:
            raise DataError(f'question type "{question_type}" is unknown')
    return Score(columns | {"invalid": invalid, "words": float(len(prediction.split()))}, reading)


def _true_false(profile: str, prediction: str, answer: str, reading: Extraction) -> dict[str, float]:
    if profile == "paper":  # first word against first word: two empty texts agree, as in the official scorer
        right = normalize.paper(prediction).split()[:1] == normalize.paper(answer).split()[:1]
    else:
        right = reading.value == answer
    gold = answer == "True"
    return {
        "right": float(right),
        "gold_true": float(gold),
        "hit_true": float(right and gold),
        "hit_false": float(right and not gold),
        "said_true": float(reading.value == "True"),
    }


def _paper_choice(prediction: str, answer: str, options: Sequence[str]) -> bool:
    return normalize.paper(paper_choice_text(prediction, options)) == normalize.paper(answer)


def _matches(profile: str, prediction: str, answer: str) -> tuple[float, float]:
    """(EMatch, PMatch)."""
    if profile == "paper":
        gold, said = normalize.paper(answer), normalize.paper(prediction)
        return float(said == gold), float(gold in said)
    reply = normalize.unwrap(prediction)
    gold_tokens = normalize.tokens(answer)
    exact = normalize.tokens(reply) == gold_tokens
    found = normalize.clauses(reply)
    partial = affirmed(found, gold_tokens) and not _enumerates_classes(found, gold_tokens)
    return float(exact), float(exact or partial)


def _enumerates_classes(found: Sequence[str], gold: Sequence[str]) -> bool:
    """Whether a reply to a question for one cell class names several."""
    if len(gold) != 1 or gold[0].removesuffix("s") not in _SIBLINGS:
        return False
    return sum(bool(mentions(found, [name]) or mentions(found, [name + "s"])) for name in _SIBLINGS) > 1


def _overlaps(profile: str, prediction: str, answer: str) -> tuple[float, float]:
    """(BLEU-1, ROUGE-L)."""
    if profile == "paper":
        gold, said = normalize.paper(answer).split(), normalize.paper(prediction).split()
        return bleu1(gold, said), rouge_l(gold, said)
    reply = normalize.unwrap(prediction)
    gold_tokens, tokens = normalize.tokens(answer), normalize.tokens(reply)
    common = _longest_common_subsequence(gold_tokens, tokens)
    # rouge-score's own scorer fills the same table cell by cell in Python, and imports nltk: 2 s for the release.
    f = scoring.fmeasure(common / len(tokens), common / len(gold_tokens)) if common else 0.0
    return bleu1(gold_tokens, tokens), float(f)


def bleu1(reference: Sequence[str], prediction: Sequence[str]) -> float:
    """Clipped unigram precision times the brevity penalty, unsmoothed; an empty prediction is 0 (paper 3.3)."""
    if not prediction:
        return 0.0
    left: dict[str, int] = {}
    for token in reference:
        left[token] = left.get(token, 0) + 1
    hits = 0
    for token in prediction:
        if left.get(token, 0):
            left[token] -= 1
            hits += 1
    precision = hits / len(prediction)
    if len(prediction) >= len(reference):
        return precision
    return math.exp(1 - len(reference) / len(prediction)) * precision


def rouge_l(reference: Sequence[str], prediction: Sequence[str]) -> float:
    """F1 of the longest common subsequence of two token lists; 0 when either is empty."""
    common = _longest_common_subsequence(reference, prediction)
    if not common:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


def _longest_common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length, by the bit-parallel recurrence (Hyyro 2004): one big-integer step per token of b."""
    places: dict[str, int] = {}
    for k, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << k
    full = (1 << len(a)) - 1
    row = full
    for token in b:
        matched = row & places.get(token, 0)
        row = (row + matched | row - matched) & full
    return len(a) - row.bit_count()


def _balanced(sums: Mapping[str, Floats]) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums["hit_true"] / sums["gold_true"] + sums["hit_false"] / (sums["n"] - sums["gold_true"])) / 2


def _mcc(sums: Mapping[str, Floats]) -> Floats:
    """Matthews correlation; an unreadable reply counts as the wrong answer, so that it can't help."""
    gold, n = sums["gold_true"], sums["n"]
    tp, tn = sums["hit_true"], sums["hit_false"]
    fn, fp = gold - tp, n - gold - tn
    scale = np.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return np.divide(tp * tn - fp * fn, scale, out=np.zeros_like(scale), where=scale > 0)


def _mean(column: str) -> Callable[[Mapping[str, Floats]], Floats]:
    def value(sums: Mapping[str, Floats]) -> Floats:
        return sums[column] / sums["n"]

    return value


_WORDS = {"paper": "nfkc-casefold-w", "robust": "robust-tokens-1"}


def _by_profile(name: str, paper: str, robust: str) -> dict[str, str]:
    return {
        "paper": "-".join(filter(None, (name, paper, _WORDS["paper"]))),
        "robust": "-".join(filter(None, (name, robust, _WORDS["robust"]))),
    }


_TRUTH = ("hit_true", "hit_false", "gold_true")
METRICS: dict[str, tuple[Metric, ...]] = {
    "true_false": (
        Metric("accuracy", ("right",), _mean("right"), _by_profile("acc", "first-word", "asserted-polarity")),
        Metric("balanced_accuracy", _TRUTH, _balanced, _by_profile("bacc", "first-word", "asserted-polarity"), False),
        Metric("mcc", _TRUTH, _mcc, _by_profile("mcc", "first-word", "asserted-polarity"), False),
        Metric("yes_rate", ("said_true",), _mean("said_true"), _by_profile("yes", "first-word", "asserted-polarity")),
    ),
    "multiple_choice": (
        Metric("accuracy", ("right",), _mean("right"), _by_profile("acc", "letter-or-text", "stated-letter-text")),
    ),
    "fill_blank": (
        Metric("exact_match", ("exact",), _mean("exact"), _by_profile("em", "", "")),
        Metric("partial_match", ("partial",), _mean("partial"), _by_profile("pm", "substring", "token-affirmed")),
    ),
    "open": (
        Metric("bleu1", ("bleu1",), _mean("bleu1"), _by_profile("bleu1-sent-bp", "", "")),
        Metric("rouge_l", ("rouge_l",), _mean("rouge_l"), _by_profile("rougeL-f1", "lcs", "rouge-score")),
    ),
}
INVALID = Metric("invalid", ("invalid",), _mean("invalid"), _by_profile("invalid", "", ""))


def mean(values: Sequence[float]) -> float:
    """Plain left-to-right mean, nan over nothing. `sum` compensates from Python 3.12 on: its last digit differs."""
    return float(np.cumsum(values)[-1]) / len(values) if len(values) else math.nan
