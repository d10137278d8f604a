"""Questions that their text alone answers: a probe that never sees the image, trained on other images' questions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_prep import probe
from data_prep.schema import QA, stable_hash

CERTAIN = 0.95
_STRENGTH = 10.0  # inverse regularisation: at 1 no wording is certain among TF-IDF rows of unit length
FEWEST = 200  # closed questions of a type below which a probe says nothing
_FOLDS = 2


def trivial(questions: Sequence[QA]) -> dict[str, str]:
    """Id -> why, for closed questions whose right answer the probe gives more than CERTAIN.

    Two folds by image: each half is answered by a logistic probe of the other half (words and word pairs; for multiple
    choice each option beside its question, normalised over the options).
    """
    found: dict[str, str] = {}
    for kind in ("true_false", "multiple_choice"):
        asked = [qa for qa in questions if qa.question_type == kind]
        if len(asked) < FEWEST:
            continue
        folds = np.array([stable_hash("fold", qa.image_id) % _FOLDS for qa in asked])
        if len(set(folds.tolist())) < _FOLDS:
            continue
        for fold in range(_FOLDS):
            train = [qa for qa, at in zip(asked, folds, strict=True) if at != fold]
            test = [qa for qa, at in zip(asked, folds, strict=True) if at == fold]
            for qa, p in zip(test, probabilities(train, test), strict=True):
                if p > CERTAIN:
                    found[qa.id] = f"a text-only probe gives its answer {p:.2f}"
    return found


def probabilities(train: Sequence[QA], test: Sequence[QA]) -> np.ndarray:
    """float[n]: what a text-only probe of `train` gives the right answer of each closed question of `test`."""
    from sklearn.linear_model import LogisticRegression

    if test[0].question_type == "true_false":
        seen, asked = probe.features([qa.question for qa in train], [qa.question for qa in test])
        gold = [qa.answer == "True" for qa in train]
        if len(set(gold)) == 1:
            return np.array([float((qa.answer == "True") == gold[0]) for qa in test])
        true = LogisticRegression(C=_STRENGTH, max_iter=300).fit(seen, gold).predict_proba(asked)[:, 1]
        return np.where([qa.answer == "True" for qa in test], true, 1 - true)
    seen, asked = probe.features(probe.pairs(train), probe.pairs(test))
    model = LogisticRegression(C=_STRENGTH, max_iter=300).fit(
        seen, [o == qa.answer for qa in train for o in qa.options]
    )
    score, at, out = model.decision_function(asked), 0, []
    for qa in test:
        weights = np.exp(score[at : at + len(qa.options)])
        at += len(qa.options)
        out.append(weights[qa.options.index(qa.answer)] / weights.sum())
    return np.array(out)
