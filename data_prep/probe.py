"""What the text of a question gives away: probes trained on the train split's questions, without any image.

A benchmark whose probes beat chance rewards priors instead of looking (reference/benchmark.md 0); `check_probe` is the
gate of the template questions. scikit-learn is imported where it is used: it costs a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse, stats

from data_prep.schema import QA, DataError, shown_options

TRUE_FALSE_LIMIT = 0.55
CHOICE_MARGIN = 0.05  # above chance
POSITION_P = 0.001  # of the chi-square test that gold positions are even


def text_probe(train: Sequence[QA], test: Sequence[QA]) -> dict[str, float]:
    """Accuracies on `test` of predictors that learned from `train`'s text alone, and the give-aways of `test` itself.

    true_false_logistic, true_false_nearest; choice_logistic (each option scored beside its question), choice_nearest
    (the answer of the nearest training question with these options), choice_longest (ties shared), choice_chance (mean
    of 1 / options), gold_position_p (smallest over option counts). Kinds absent from either split are left out.
    """
    result: dict[str, float] = {}
    parts = {kind: (_of(train, kind), _of(test, kind)) for kind in ("true_false", "multiple_choice")}
    if all(parts["true_false"]):
        result |= _true_false(*parts["true_false"])
    if all(parts["multiple_choice"]):
        result |= _choice(*parts["multiple_choice"])
    return result


def check_probe(result: dict[str, float], where: str) -> None:
    """The gate. Raises DataError that lists every measure outside its limit."""
    chance = result.get("choice_chance", 0.0)
    upper = {
        "true_false_logistic": TRUE_FALSE_LIMIT,
        "true_false_nearest": TRUE_FALSE_LIMIT,
        "choice_logistic": chance + CHOICE_MARGIN,
        "choice_nearest": chance + CHOICE_MARGIN,
        "choice_longest": chance + CHOICE_MARGIN,
    }
    faults = [
        f"{name} {result[name]:.3f} > {limit:.3f}" for name, limit in upper.items() if result.get(name, 0) > limit
    ]
    if result.get("choice_longest", chance) < chance - CHOICE_MARGIN:
        faults.append(f"choice_longest {result['choice_longest']:.3f} < {chance - CHOICE_MARGIN:.3f}")
    if result.get("gold_position_p", 1.0) < POSITION_P:
        faults.append(f"gold positions are uneven (p = {result['gold_position_p']:.2g})")
    if faults:
        raise DataError(f"{where}: the text alone answers too much: {'; '.join(faults)}; rebalance the questions")


def _of(questions: Sequence[QA], kind: str) -> list[QA]:
    return [qa for qa in questions if qa.question_type == kind]


def features(train: Sequence[str], test: Sequence[str]) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    """TF-IDF of words and word pairs, unit rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\S+")
    return vectorizer.fit_transform(train), vectorizer.transform(test)


def _nearest(train: sparse.csr_matrix, test: sparse.csr_matrix) -> np.ndarray:
    """int[n]: for each test row the nearest training row by cosine (the first of equals); in blocks to bound memory."""
    blocks = (test[start : start + 512] @ train.T for start in range(0, test.shape[0], 512))
    return np.concatenate([np.asarray(block.argmax(axis=1)).ravel() for block in blocks])


def _true_false(train: Sequence[QA], test: Sequence[QA]) -> dict[str, float]:
    from sklearn.linear_model import LogisticRegression

    seen, asked = features([qa.question for qa in train], [qa.question for qa in test])
    gold = np.array([qa.answer == "True" for qa in train])
    truth = np.array([qa.answer == "True" for qa in test])
    guess = LogisticRegression(max_iter=300).fit(seen, gold).predict(asked) if len(set(gold)) == 2 else gold[0]
    return {
        "true_false_logistic": float(np.mean(guess == truth)),
        "true_false_nearest": float(np.mean(gold[_nearest(seen, asked)] == truth)),
    }


def _with_options(qa: QA) -> str:
    return " ".join((qa.question, *sorted(qa.options)))


def pairs(questions: Sequence[QA]) -> list[str]:
    """One text per (question, option): the option's words, and the option as one word with its question and its set."""
    return [
        " ".join((option, _word(option, qa.question), _word(option, *sorted(qa.options))))
        for qa in questions
        for option in qa.options
    ]


def _word(*texts: str) -> str:
    return "|".join(texts).replace(" ", "_")


def _choice(train: Sequence[QA], test: Sequence[QA]) -> dict[str, float]:
    from sklearn.linear_model import LogisticRegression

    seen, asked = features(pairs(train), pairs(test))
    model = LogisticRegression(max_iter=300).fit(seen, [o == qa.answer for qa in train for o in qa.options])
    score, at = model.decision_function(asked), 0
    logistic = []
    for qa in test:
        logistic.append(qa.options[int(score[at : at + len(qa.options)].argmax())] == qa.answer)
        at += len(qa.options)
    nearest = _nearest(*features([_with_options(qa) for qa in train], [_with_options(qa) for qa in test]))
    longest = [[len(o) == max(map(len, qa.options)) for o in qa.options] for qa in test]
    return {
        "choice_logistic": float(np.mean(logistic)),
        "choice_nearest": float(np.mean([train[k].answer == qa.answer for k, qa in zip(nearest, test, strict=True)])),
        "choice_longest": float(
            np.mean([row[qa.options.index(qa.answer)] / sum(row) for row, qa in zip(longest, test, strict=True)])
        ),
        "choice_chance": float(np.mean([1 / len(qa.options) for qa in test])),
        "gold_position_p": min(position_p(test).values()),
    }


def position_p(questions: Sequence[QA], order: str = "shuffle") -> dict[int, float]:
    """Chi-square p-value, by number of options, that every position is gold equally often in the order shown."""
    positions: dict[int, list[int]] = {}
    for qa in questions:
        if qa.question_type == "multiple_choice":
            shown = shown_options(qa, order)
            positions.setdefault(len(shown), []).append(shown.index(qa.answer))
    return {n: float(stats.chisquare(np.bincount(at, minlength=n)).pvalue) for n, at in sorted(positions.items())}
