"""The slide track: the table of the dominant cell, its rows, and slides as what the bench shows."""

from __future__ import annotations

import dataclasses

import pytest

from data_prep.schema import QA, WHITE_CELL_CLASSES
from pbs_jax.bench.evaluate import Origin, Row, Settings
from pbs_jax.bench.score import Answers
from pbs_jax.bench.slide_rows import always_neutrophil, dominant_tables

SETTINGS = Settings(draws=500)


def questions() -> tuple[QA, ...]:
    """Twenty slides, four of each dominant class, asked in words and as multiple choice, and one other question."""
    asked = []
    for number in range(20):
        answer = WHITE_CELL_CLASSES[number % 5]
        common = QA(
            id=f"f{number}",
            image_id=f"S{number}",
            level="slide",
            domain="id",
            split="test",
            task="cell_differential",
            question_type="fill_blank",
            question="Most frequent?",
            answer=answer,
            provenance={"facts": [f"dominant={answer}"], "source": "truth"},
        )
        asked.append(common)
        asked.append(
            dataclasses.replace(common, id=f"c{number}", question_type="multiple_choice", options=WHITE_CELL_CLASSES)
        )
    other = dataclasses.replace(asked[0], id="o", question="Pattern?", answer="A", provenance={"facts": ["pattern=A"]})
    return (*asked, other)


def test_always_neutrophil_answers_questions_for_a_class_only() -> None:
    asked = questions()
    replies = always_neutrophil(asked)
    assert set(replies[:-1]) == {"Neutrophil"} and replies[-1] is None
    assert always_neutrophil([dataclasses.replace(asked[0], level="cell")]) == (None,)


def test_the_dominant_table_sets_the_model_against_every_row() -> None:
    asked = questions()
    right = tuple(qa.answer for qa in asked)
    never = tuple("Platelet" for _ in asked)
    rows = (
        Row("pbs", "model", (right, right)),
        Row("pbs, blind", "blind", (never,)),
        Row("silent", "blind", ((None,) * len(asked),)),
    )
    tables = dominant_tables(Answers(Origin({}, "shuffle", "id"), rows, asked), "pbs", SETTINGS)
    assert [table.title for table in tables] == ["Dominant white cell, FB - pbs", "Dominant white cell, MCQ - pbs"]
    for table in tables:
        found = {row[0]: row[1:] for row in table.rows}
        assert list(found) == ["pbs, blind", "always Neutrophil", "pbs"]
        assert found["pbs"][:3] == ("20", "20", "1.000 [1.000, 1.000]")
        assert found["pbs, blind"][3] == "+1.000 [+1.000, +1.000]"
        assert found["always Neutrophil"][2].startswith("0.200 [")
        assert "given this cell pool" in table.notes[0]


def test_there_is_no_table_without_its_question() -> None:
    asked = questions()[-1:]
    answers = Answers(Origin({}, "shuffle", "id"), (Row("pbs", "model", (("A",),)),), asked)
    assert dominant_tables(answers, "pbs", SETTINGS) == []


@pytest.mark.parametrize("name", ["mismatched", "blank"])
def test_slide_features_stand_where_pictures_stand(name: str, tmp_path) -> None:
    from data_prep.schema import DataError
    from pbs_jax.bench.pictures import load_pictures

    class Bags:
        """Two encoded slides."""

        content_id = "content"

        def __init__(self) -> None:
            self.places = {f"S{k}": (self, k) for k in range(2)}

        def __getitem__(self, number: int) -> dict[str, bytes]:
            return {"image": bytes([number])}

    asked = [qa for qa in questions() if qa.image_id in ("S0", "S1")]
    if name == "blank":
        with pytest.raises(DataError, match="no blank picture"):
            load_pictures(tmp_path, name, asked, bags=Bags())
        return
    shown = load_pictures(tmp_path, "image", asked, bags=Bags())
    swapped = load_pictures(tmp_path, name, asked, bags=Bags())
    assert [shown(qa)[0][0] for qa in asked[:4:2]] == [0, 1]
    assert [swapped(qa)[0][0] for qa in asked[:4:2]] == [1, 0]
    assert shown.dataset_id == "content"
