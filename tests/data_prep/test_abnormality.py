"""What sets a cell apart: counted among the training cells of its type, asked only where one feature does."""

from __future__ import annotations

from collections import Counter

import pytest

from data_prep import quality
from data_prep.abnormality import NOTHING, abnormality_questions, findings
from data_prep.claims import cell_facts
from data_prep.schema import Cell
from tests.data_prep.wbcatt import made_cells

USUAL = next(cell.attributes for cell in made_cells(1) if cell.label == "Neutrophil") | {
    "cytoplasm_vacuole": "no", "cell_shape": "round", "nucleus_shape": "segmented-bilobed", "cell_size": "big",
}  # fmt: skip
ODD = ({"cytoplasm_vacuole": "yes"}, {"cell_shape": "irregular"}, {"nucleus_shape": "unsegmented-band"})


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    """180 training cells: 150 alike, eight for each of three rarities, six with two of them."""
    changes = [*[{}] * 150, *(change for change in ODD for _ in range(8)), *[ODD[0] | ODD[1]] * 6]
    return [
        Cell(f"c{k}", "train", "Neutrophil", "human", b"", attributes=USUAL | change)
        for k, change in enumerate(changes)
    ]


def test_only_one_rare_feature_is_a_finding(cells: list[Cell]) -> None:
    found = Counter(findings(cells).values())
    assert found == {NOTHING: 150, "cytoplasmic vacuoles": 8, "irregular shape": 8, "band nucleus": 8}
    assert findings(cells[:40]) == {}  # too few of the type to say what is rare


def test_questions_are_right_balanced_and_pass_the_rules(cells: list[Cell]) -> None:
    found, asked = findings(cells), abnormality_questions(cells)
    assert {qa.question_type for qa in asked} == {"true_false", "multiple_choice", "fill_blank", "open"}
    for qa in asked:
        finding = found[qa.image_id]
        stated = finding in qa.question or (finding == NOTHING and "none of its features" in qa.question)
        right = {"true_false": str(stated), "multiple_choice": finding, "fill_blank": finding}
        assert qa.answer == right.get(qa.question_type, qa.answer) and qa.task == "abnormality"
    for kind in ("true_false", "multiple_choice"):
        counts = Counter((qa.question, qa.answer) for qa in asked if qa.question_type == kind)
        assert len(counts) >= 4 and max(counts.values()) - min(counts.values()) <= 1
    assert not quality.screen(asked, {cell.cell_id: cell_facts(cell) for cell in cells}).rejected
