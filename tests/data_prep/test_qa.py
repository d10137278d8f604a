"""Template questions: right answers, every format, and the balance that keeps text alone at chance."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from data_prep import qa_bank
from data_prep.qa import cell_questions
from data_prep.schema import QA, QUESTION_TYPES, Cell, DataError
from tests.data_prep.wbcatt import expert_cells, made_cells


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return made_cells(60)


@pytest.fixture(scope="module")
def questions(cells: list[Cell]) -> list[QA]:
    return cell_questions(cells)


@pytest.fixture(scope="module")
def experts(shared: Path) -> tuple[list[Cell], list[QA]]:
    cells = expert_cells(shared)
    return cells, cell_questions(cells)


def _assert_balanced(questions: list[QA]) -> None:
    """P(true | statement) = 1/2 and P(gold | option set) = 1/n, in every split and domain."""
    statements: dict[tuple, Counter[str]] = defaultdict(Counter)
    sets: dict[tuple, Counter[str]] = defaultdict(Counter)
    for qa in questions:
        if qa.question_type == "true_false":
            statements[qa.domain, qa.split, qa.question][qa.answer] += 1
        if qa.question_type == "multiple_choice":
            sets[qa.domain, qa.split, qa.options][qa.answer] += 1
    assert statements and sets
    assert all(count["True"] == count["False"] > 0 for count in statements.values())
    for (_, _, options), count in sets.items():
        assert {count[option] for option in options} == {count.total() / len(options)}


def _assert_true_to_facts(cells: list[Cell], questions: list[QA]) -> None:
    """Re-derives every answer from the cell's own record, independently of how images were chosen."""
    by_id = {cell.cell_id: cell for cell in cells}
    statements = {qa_bank.statement(f, v): (f, v) for f in qa_bank.FACTS for v in qa_bank.values(f)}
    blanks = {question: fact for fact, wording in qa_bank.WORDINGS.items() for question in wording.blanks}
    single = {question: (fact,) for fact, wording in qa_bank.WORDINGS.items() for question in wording.choices}
    choices = single | {question: pair for pair, question in qa_bank.PAIRS.items()}
    for qa in questions:
        cell = by_id[qa.image_id]
        assert (qa.split, qa.domain, qa.provenance["writer"]) == (cell.split, cell.domain, "template")
        match qa.question_type:
            case "true_false":
                fact, value = statements[qa.question.removeprefix("(True/False) ")]
                assert qa.answer == str(qa_bank.recorded(cell, fact) == value)
            case "fill_blank":
                fact = blanks[qa.question]
                assert qa_bank.value_of(fact, qa.answer) == qa_bank.recorded(cell, fact)
                assert len(qa.answer.split()) < 10
            case "multiple_choice":
                facts = choices[qa.question]
                values = [qa_bank.recorded(cell, fact) or "" for fact in facts]
                assert qa.answer == " and ".join(map(qa_bank.option, facts, values))
                assert list(qa.options) == sorted(qa.options) and 3 <= len(qa.options) <= 4
            case "open":
                assert cell.label.lower() in qa.answer.lower()


def test_made_cells_answers_follow_the_facts_in_balance(cells: list[Cell], questions: list[QA]) -> None:
    _assert_true_to_facts(cells, questions)
    _assert_balanced(questions)


def test_expert_cells_answers_follow_the_facts_in_balance(experts: tuple[list[Cell], list[QA]]) -> None:
    _assert_true_to_facts(*experts)
    _assert_balanced(experts[1])
    assert len(experts[1]) >= 12_000


def test_ids_are_unique_and_no_image_is_asked_twice_the_same(experts: tuple[list[Cell], list[QA]]) -> None:
    questions = experts[1]
    assert len({qa.id for qa in questions}) == len(questions)
    assert len({(qa.image_id, qa.question_type, qa.question, qa.options) for qa in questions}) == len(questions)


def test_every_cell_gets_every_format(experts: tuple[list[Cell], list[QA]]) -> None:
    cells, questions = experts
    asked = Counter((qa.image_id, qa.question_type, qa.task) for qa in questions)
    for cell in cells:
        counts = {
            kind: sum(asked[cell.cell_id, kind, task] for task in ("cell_subtyping", "morphology"))
            for kind in QUESTION_TYPES
        }
        assert (
            counts["fill_blank"] == (5 if cell.split == "train" else 12)
            and counts["open"] == 1
            and counts["true_false"] >= 2
        ), cell.cell_id
        subtype = asked[cell.cell_id, "multiple_choice", "cell_subtyping"]
        assert subtype >= (2 if cell.split == "train" else 1), cell.cell_id
        assert asked[cell.cell_id, "multiple_choice", "morphology"] >= 1, cell.cell_id


def test_every_fact_is_asked_in_at_least_three_formats(questions: list[QA]) -> None:
    formats = defaultdict(set)
    for qa in questions:
        for fact in qa.provenance["facts"]:
            formats[fact.split("=")[0]].add(qa.question_type)
    assert set(formats) == set(qa_bank.FACTS)
    assert all({"fill_blank", "true_false", "multiple_choice"} <= kinds for kinds in formats.values())


def test_every_value_of_every_fact_is_stated(experts: tuple[list[Cell], list[QA]]) -> None:
    for split in ("train", "val", "test"):
        stated = {qa.question for qa in experts[1] if qa.question_type == "true_false" and qa.split == split}
        wanted = {f"(True/False) {qa_bank.statement(f, v)}" for f in qa_bank.FACTS for v in qa_bank.values(f)}
        assert stated == wanted


def test_questions_do_not_depend_on_the_order_of_cells(cells: list[Cell], questions: list[QA]) -> None:
    assert sorted(cell_questions(cells[::-1]), key=lambda qa: qa.id) == sorted(questions, key=lambda qa: qa.id)
    assert {qa.id for qa in cell_questions(cells, seed=1)} != {qa.id for qa in questions}


def test_ood_cells_without_attributes_are_asked_their_type_only() -> None:
    labels = ["Neutrophil"] * 40 + ["Eosinophil"] * 20 + ["Lymphocyte"] * 8 + ["Monocyte"] * 5 + ["Basophil"] * 2
    cells = [Cell(f"bccd:{k}", "test", label, "human", b"", domain="ood") for k, label in enumerate(labels)]
    questions = cell_questions(cells)
    assert {qa.task for qa in questions} == {"cell_subtyping"} and {qa.domain for qa in questions} == {"ood"}
    assert Counter(qa.question_type for qa in questions)["fill_blank"] == len(cells)
    _assert_balanced(questions)


def test_others_and_artifacts_are_not_asked() -> None:
    assert (
        cell_questions([Cell("a", "train", "Others", "human", b""), Cell("b", "train", "Artifact", "human", b"")]) == []
    )


def test_unknown_label_is_an_error_that_names_the_cell() -> None:
    with pytest.raises(DataError, match=r'cell a: label "Blast" is not one of'):
        cell_questions([Cell("a", "train", "Blast", "human", b"")])


def test_absent_values_are_no_options() -> None:
    cells = [cell for cell in made_cells(30) if cell.label != "Basophil"]
    options = {option for qa in cell_questions(cells) for option in qa.options}
    assert "Monocyte" in options and "Basophil" not in options


def test_canonical_answers_map_back_to_recorded_values() -> None:
    for fact in qa_bank.FACTS:
        answers = [qa_bank.answer(fact, value) for value in qa_bank.values(fact)]
        assert [qa_bank.value_of(fact, text.upper()) for text in answers] == list(qa_bank.values(fact))
    assert qa_bank.value_of("cell_size", "medium") is None


def test_open_answer_is_not_the_caption_of_most_cells(experts: tuple[list[Cell], list[QA]]) -> None:
    captions = {cell.cell_id: cell.caption for cell in experts[0]}
    same = [captions[qa.image_id] == qa.answer for qa in experts[1] if qa.question_type == "open"]
    assert 0.2 < sum(same) / len(same) < 0.5  # one wording of three


def test_cells_copied_with_other_ids_get_other_questions(cells: list[Cell], questions: list[QA]) -> None:
    renamed = [dataclasses.replace(cell, cell_id=f"x{cell.cell_id}") for cell in cells]
    assert {qa.id for qa in cell_questions(renamed)}.isdisjoint(qa.id for qa in questions)
