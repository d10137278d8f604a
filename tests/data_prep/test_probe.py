"""The text-only probes stay at chance on the template questions and find each planted give-away."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from data_prep.probe import check_probe, position_p, text_probe
from data_prep.qa import cell_questions
from data_prep.schema import QA, DataError, shown_options
from tests.data_prep.wbcatt import expert_cells, made_cells


def _split(questions: list[QA], split: str) -> list[QA]:
    return [qa for qa in questions if qa.split == split]


@pytest.fixture(scope="module")
def questions() -> list[QA]:
    return cell_questions(made_cells(60))


def test_text_of_the_expert_cells_questions_stays_at_chance(shared: Path) -> None:
    questions = cell_questions(expert_cells(shared))
    result = text_probe(_split(questions, "train"), _split(questions, "test"))
    check_probe(result, "pbc test")
    assert max(result["true_false_logistic"], result["true_false_nearest"]) <= 0.55
    for name in ("choice_logistic", "choice_nearest"):
        assert result[name] <= result["choice_chance"] + 0.05
    assert abs(result["choice_longest"] - result["choice_chance"]) <= 0.05


def test_a_prior_on_statements_is_found(questions: list[QA]) -> None:
    biased = [
        qa
        for qa in questions
        if qa.question_type != "true_false" or (qa.answer == "True") == ("nucleus" in qa.question)
    ]
    result = text_probe(_split(biased, "train"), _split(biased, "test"))
    assert min(result["true_false_logistic"], result["true_false_nearest"]) > 0.9
    with pytest.raises(DataError, match=r"planted: .*true_false_logistic 1.000 > 0.550"):
        check_probe(result, "planted")


def test_a_prior_on_options_is_found(questions: list[QA]) -> None:
    first = [qa for qa in questions if qa.question_type == "multiple_choice" and qa.answer == qa.options[0]]
    result = text_probe(_split(first, "train"), _split(first, "test"))
    assert min(result["choice_logistic"], result["choice_nearest"]) > 0.9
    with pytest.raises(DataError, match="choice_logistic"):
        check_probe(result, "planted")


def test_a_telling_length_is_found(questions: list[QA]) -> None:
    long = [
        dataclasses.replace(
            qa,
            answer=f"{qa.answer}, typically",
            options=tuple(f"{o}, typically" if o == qa.answer else o for o in qa.options),
        )
        for qa in questions
        if qa.question_type == "multiple_choice"
    ]
    result = text_probe(_split(long, "train"), _split(long, "test"))
    assert result["choice_longest"] == 1.0
    with pytest.raises(DataError, match="choice_longest"):
        check_probe(result, "planted")


def test_uneven_positions_are_found(questions: list[QA]) -> None:
    assert min(position_p(questions).values()) > 0.001
    stuck = [qa for qa in questions if qa.question_type == "multiple_choice" and shown_options(qa)[0] == qa.answer]
    assert max(position_p(stuck).values()) < 1e-6
    with pytest.raises(DataError, match="gold positions are uneven"):
        check_probe(text_probe(_split(stuck, "train"), _split(stuck, "test")), "planted")


def test_kinds_that_are_absent_are_left_out(questions: list[QA]) -> None:
    blanks = [qa for qa in questions if qa.question_type == "fill_blank"]
    assert text_probe(blanks, blanks) == {}
