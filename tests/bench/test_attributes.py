"""Attributes beyond cell type, and accuracy by class, on answers whose right verdict is known by construction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.schema import ATTRIBUTES, QA, DataError, stable_hash
from pbs_jax.bench import attributes, classes
from pbs_jax.bench.evaluate import Settings
from pbs_jax.bench.records import load_questions

FAST = Settings(draws=1000)


@pytest.fixture(scope="module")
def experts(shared: Path) -> tuple[list[QA], list[QA]]:
    """Template questions on the experts' 1,500 training and 750 test cells."""
    from data_prep.qa import cell_questions
    from tests.data_prep.wbcatt import expert_cells

    questions = [qa for qa in cell_questions(expert_cells(shared)) if qa.question_type == "fill_blank"]
    return [qa for qa in questions if qa.split == "train"], [qa for qa in questions if qa.split == "test"]


def answering(train: list[QA], test: list[QA], sees: Callable[[QA], bool], right_class: float = 1.0) -> list[str]:
    """A model that knows each cell's class, says its majority value, and sees the true value where `sees`."""
    learned = attributes._learn(train)
    own = {}
    for qa in test:
        if attributes.fact_of(qa) == "label":
            lucky = stable_hash("class", qa.id) % 1000 < 1000 * right_class
            own[qa.image_id] = qa.answer if lucky else "Monocyte"
    return [
        own[qa.image_id]
        if attributes.fact_of(qa) == "label"
        else (qa.answer if sees(qa) else learned.answer(str(attributes.fact_of(qa)), own[qa.image_id]))
        for qa in test
    ]


def test_class_alone_is_no_evidence(experts: tuple[list[QA], list[QA]]) -> None:
    train, test = experts
    found = attributes.attribute_rows(train, test, [answering(train, test, lambda qa: False, 0.98)], FAST)
    assert [item.name for item in found] == list(ATTRIBUTES) and {item.n for item in found} == {750}
    assert {item.verdict for item in found} == {attributes.NO_EVIDENCE}
    by_class = [item.rows["true class"].value for item in found]
    assert np.mean(by_class) == pytest.approx(0.88, abs=0.01)  # issue 2: class alone nearly solves most
    assert all(item.rows["image"].value == item.rows["own class"].value for item in found)


def test_seeing_the_nucleus_is_evidence_for_the_nucleus_only(experts: tuple[list[QA], list[QA]]) -> None:
    train, test = experts

    def sees(qa: QA) -> bool:
        return attributes.fact_of(qa) == "nucleus_shape" and stable_hash("see", qa.id) % 10 < 3

    seeds = [answering(train, test, sees, share) for share in (0.99, 0.98)]
    found = {item.name: item for item in attributes.attribute_rows(train, test, seeds, FAST)}
    nucleus = found.pop("nucleus_shape")
    assert nucleus.verdict == attributes.EVIDENCE and nucleus.difference.low > 0.05 and nucleus.p_holm < 0.05
    assert {item.verdict for item in found.values()} == {attributes.NO_EVIDENCE}
    table = attributes.to_table([nucleus, *found.values()], "nano")
    assert table.rows[0][-1] == "evidence beyond cell type"


def test_training_questions_without_attributes_are_refused() -> None:
    with pytest.raises(DataError, match="ask no attribute"):
        attributes.attribute_rows([], [], [[]], FAST)


def test_classes_beside_always_neutrophil() -> None:
    counts = {"Neutrophil": 59, "Lymphocyte": 30, "Basophil": 3}
    asked = [
        QA(f"{name}{k}", f"i{name}{k}", "cell", "ood", "test", "cell_subtyping", "fill_blank", "What type?", name,
           provenance={"facts": [f"label={name}"]})
        for name, count in counts.items()
        for k in range(count)
    ]  # fmt: skip
    replies = [
        "Neutrophil" if qa.answer != "Lymphocyte" else ("lymphocyte." if int(qa.id[10:]) < 15 else "Monocyte")
        for qa in asked
    ]
    (found,) = classes.by_class(asked, [replies], FAST)
    assert {name: value.value for name, value in found.classes.items()} == {
        "Neutrophil": 1,
        "Lymphocyte": 0.5,
        "Basophil": 0,
    }
    assert found.macro == 0.75 and found.overall.value == pytest.approx(
        74 / 92
    )  # basophils are too few for the macro mean
    assert (found.constant, found.constant_macro) == (pytest.approx(59 / 92), 0.5)
    table = classes.to_table([found], "nano")
    assert table.rows[-1] == ("Cell, out of domain: macro, classes with n >= 20", "0.750", "0.500")


def test_facts_come_from_provenance(dataset: Path) -> None:
    items = load_questions(dataset, "test").items
    blanks = {attributes.fact_of(qa) for qa in items if qa.question_type == "fill_blank"}
    assert blanks == {"label", *ATTRIBUTES}
    assert all(attributes.fact_of(qa) is None for qa in items if qa.question_type == "open")
