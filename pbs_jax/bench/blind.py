"""Rows that never see the image: what a score must beat before it means anything.

Constants, the longest option, the most frequent training answer (to the same question text; overall), and the answer
of the nearest training question by TF-IDF. Replies go through the same extraction and metrics as a model's. Ties
break by a hash of the question's id.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from scipy import sparse

from data_prep.schema import QA, QUESTION_TYPES, stable_hash
from pbs_jax.bench import normalize

LETTERS = "ABCDEFGH"
_BATCH = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class BlindRow:
    """`replies[k]` answers the k-th question, None for other types. `note` says why a row has no reply at all."""

    name: str
    replies: tuple[str | None, ...]
    note: str = ""


def blind_rows(asked: Sequence[QA], train: Sequence[QA] | None) -> list[BlindRow]:
    """All rows for the questions asked (options as shown). Without training questions those that need them say so."""
    rows = [_constant(word, asked, "true_false") for word in ("True", "False")]
    most = max((len(qa.options) for qa in asked), default=0)
    rows += [_constant(letter, asked, "multiple_choice") for letter in LETTERS[:most]]
    rows.append(_row("longest option", asked, "multiple_choice", longest_option))
    learned = {
        "most frequent answer": _most_frequent,
        "most frequent answer, same question": _most_frequent_by_text,
        "text-only nearest question": nearest_question,
    }
    for name, reply in learned.items():
        if train:
            rows.append(BlindRow(name, tuple(reply(asked, train))))
        else:
            rows.append(BlindRow(name, (None,) * len(asked), "not computed: needs --train"))
    return rows


def _row(name: str, asked: Sequence[QA], question_type: str, reply: Callable[[QA], str]) -> BlindRow:
    return BlindRow(name, tuple(reply(qa) if qa.question_type == question_type else None for qa in asked))


def _constant(text: str, asked: Sequence[QA], question_type: str) -> BlindRow:
    return _row(f'always "{text}"', asked, question_type, lambda qa: text)


def longest_option(qa: QA) -> str:
    """The option with the most characters; among equals one by hash."""
    return _best(qa, [len(option) for option in qa.options])


def _best(qa: QA, scores: Sequence[float]) -> str:
    """The best-scored option in full; ties by hash of (id, option), so that they don't follow the order shown."""
    top = max(scores)
    ties = [option for option, score in zip(qa.options, scores, strict=True) if score >= top - 1e-12]
    return min(ties, key=lambda option: stable_hash("blind", qa.id, option))


@dataclasses.dataclass(frozen=True, slots=True)
class _Votes:
    """The commonest answer, "" if none is known, and the counts of normalised answers, for matching options."""

    commonest: str
    folded: Counter[str]

    @classmethod
    def of(cls, answers: Counter[str]) -> _Votes:
        folded: Counter[str] = Counter()
        for answer, count in answers.items():
            folded[normalize.robust(answer)] += count
        return cls(min(answers, key=lambda answer: (-answers[answer], answer), default=""), folded)

    def reply(self, qa: QA) -> str | None:
        """The likeliest answer; multiple choice picks among its options; None where nothing is known."""
        if qa.question_type == "multiple_choice":
            scores = [self.folded[normalize.robust(option)] for option in qa.options]
            return _best(qa, scores) if any(scores) else None
        return self.commonest or None


def _counts(train: Iterable[QA], key: Callable[[QA], str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for qa in train:
        counts[key(qa)][qa.answer] += 1
    return counts


def _votes(train: Iterable[QA], key: Callable[[QA], str]) -> dict[str, _Votes]:
    return {name: _Votes.of(counts) for name, counts in _counts(train, key).items()}


_NOTHING = _Votes("", Counter())


def _type_of(qa: QA) -> str:
    return qa.question_type


def _most_frequent(asked: Sequence[QA], train: Sequence[QA]) -> list[str | None]:
    overall = _votes(train, _type_of)
    return [overall.get(qa.question_type, _NOTHING).reply(qa) or _anything(qa) for qa in asked]


def _anything(qa: QA) -> str:
    return _best(qa, [0.0] * len(qa.options)) if qa.options else ""


def _text(qa: QA) -> str:
    """What a text-only reader sees, options in an order that carries nothing."""
    return normalize.robust("\n".join([qa.question, *sorted(qa.options)]))


def _most_frequent_by_text(asked: Sequence[QA], train: Sequence[QA]) -> list[str | None]:
    def key(qa: QA) -> str:
        return f"{qa.question_type}\x1f{normalize.robust(qa.question)}"

    by_text, overall = _votes(train, key), _votes(train, _type_of)
    return [
        by_text.get(key(qa), _NOTHING).reply(qa) or overall.get(qa.question_type, _NOTHING).reply(qa) or _anything(qa)
        for qa in asked
    ]


def nearest_question(asked: Sequence[QA], train: Sequence[QA]) -> list[str | None]:
    """The commonest answer of the training question (same type, question with options) nearest by TF-IDF cosine."""
    out: list[str | None] = [None] * len(asked)
    for question_type in QUESTION_TYPES:
        places = [k for k, qa in enumerate(asked) if qa.question_type == question_type]
        answers = _counts((qa for qa in train if qa.question_type == question_type), _text)
        if not places or not answers:
            continue
        texts = list(answers)
        neighbours = _nearest([_text(asked[k]) for k in places], texts)
        for k, ties in zip(places, neighbours, strict=True):
            votes = sum((answers[texts[t]] for t in ties), Counter())
            out[k] = _Votes.of(votes).reply(asked[k]) or _closest_option(asked[k], votes)
    return [reply if reply is not None else _anything(qa) for reply, qa in zip(out, asked, strict=True)]


def _closest_option(qa: QA, answers: Counter[str]) -> str | None:
    """The option that shares most words with the neighbours' answers."""
    if not qa.options or not answers:
        return None
    words = {word for answer in answers for word in normalize.tokens(answer)}
    return _best(qa, [len(words & set(normalize.tokens(o))) / (len(normalize.tokens(o)) or 1) for o in qa.options])


def _nearest(queries: Sequence[str], texts: Sequence[str]) -> list[list[int]]:
    """For each query the texts at the highest cosine (all of them when several tie)."""
    vocabulary = {word: k for k, word in enumerate(sorted({word for text in texts for word in text.split()}))}
    frequency = Counter(word for text in texts for word in set(text.split()))
    weight = np.array([1 + math.log((1 + len(texts)) / (1 + frequency[word])) for word in vocabulary])
    pool = _vectors(texts, vocabulary, weight)
    out = []
    for start in range(0, len(queries), _BATCH):
        block = _vectors(queries[start : start + _BATCH], vocabulary, weight) @ pool.T
        scores = block.toarray()
        top = scores.max(axis=1, keepdims=True)
        out += [np.flatnonzero(row).tolist() for row in scores >= top - 1e-9]
    return out


def _vectors(texts: Sequence[str], vocabulary: dict[str, int], weight: np.ndarray) -> sparse.csr_matrix:
    """Unit TF-IDF rows [texts, words]; unknown words are left out."""
    counts = [Counter(vocabulary[word] for word in text.split() if word in vocabulary) for text in texts]
    rows = np.repeat(np.arange(len(texts)), [len(count) for count in counts])
    columns = np.array([k for count in counts for k in count], np.int64)
    values = np.array([n for count in counts for n in count.values()], np.float64) * weight[columns]
    matrix = sparse.csr_matrix((values, (rows, columns)), shape=(len(texts), len(vocabulary)))
    length = np.sqrt(np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel())
    return sparse.diags(1 / np.where(length > 0, length, 1)) @ matrix
