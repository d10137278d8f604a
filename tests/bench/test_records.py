"""Questions and predictions on disk: loading, joining, repeats, torn lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from data_prep.schema import QA, DataError
from pbs_jax.bench import records

QUESTION = {
    "id": "q1",
    "image_id": "i1",
    "level": "cell",
    "domain": "id",
    "split": "test",
    "task": "morphology",
    "question_type": "multiple_choice",
    "question": "Which shape?",
    "answer": "Round",
    "options": ["Round", "Bilobed", "Band"],
}


def lines(path: Path, *items: dict) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_released_files_load(shared: Path) -> None:
    found = records.load_questions(shared / "data/pbsbench", "test")
    assert len(found.items) == 3289 + 4495 + 138
    assert found.items[0].source["slide_id"] == "III_1"


def test_our_dataset_loads_with_its_content_id(dataset: Path) -> None:
    found = records.load_questions(dataset, "test")
    again = records.load_questions(dataset / "cell_qa", "test")
    assert found == again and found.items
    assert {qa.split for qa in found.items} == {"test"}
    assert found.items[0].provenance["writer"] == "template"
    assert found.dataset_id == json.loads((dataset / "cell_qa/1.0.0/manifest.json").read_text())["content_id"]
    with pytest.raises(DataError, match='has no split "extra"'):
        records.load_questions(dataset, "extra")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": ""}, "empty question or answer"),
        ({"options": ["Round", "round"]}, "two equal options"),
        ({"options": ["Band", "Bilobed"]}, "not among its options"),
        ({"task": "haiku"}, 'task "haiku" is not one of'),
        ({"question": None}, "lacks a field"),
    ],
)
def test_bad_questions_are_refused_by_name(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        records.load_questions(lines(tmp_path / "q.jsonl", QUESTION | change))


def test_repeated_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds q1 twice"):
        records.load_questions(lines(tmp_path / "q.jsonl", QUESTION, QUESTION))
    answered = QUESTION | {"prediction": "A", "perm": [0, 1, 2]}
    with pytest.raises(DataError, match=r"answers q1 .* a second time"):
        records.load_predictions(lines(tmp_path / "p.jsonl", answered, answered))


def test_bare_lines_take_the_question_from_the_data(tmp_path: Path) -> None:
    questions = records.load_questions(lines(tmp_path / "q.jsonl", QUESTION))
    (item,) = records.load_predictions(lines(tmp_path / "p.jsonl", {"id": "q1", "prediction": "A"}), questions)
    assert item.qa.options == ("Round", "Bilobed", "Band") and item.perm == (0, 1, 2)
    shown = {"id": "q1", "prediction": "A", "perm": [2, 0, 1]}
    (item,) = records.load_predictions(lines(tmp_path / "p.jsonl", shown), questions)
    assert item.qa.options == ("Band", "Round", "Bilobed")
    for bad, message in (
        (shown | {"options": ["Round", "Band", "Bilobed"]}, "not the question's options in the order of perm"),
        (shown | {"perm": [0, 0, 1]}, "does not order 3 options"),
        (shown | {"id": "q2"}, "q2 is not in the question set"),
        ({"id": "q1"}, 'no "prediction"'),
        (shown | {"status": "tired"}, '"tired"'),
    ):
        with pytest.raises(DataError, match=message):
            records.load_predictions(lines(tmp_path / "p.jsonl", bad), questions)


def test_a_torn_last_line_is_dropped_and_the_log_goes_on(tmp_path: Path) -> None:
    qa = QA(**(QUESTION | {"options": tuple(QUESTION["options"])}))
    first, second = records.Prediction(qa, (0, 1, 2), "A"), records.Prediction(qa, (1, 2, 0), "B")
    path = tmp_path / "predictions.jsonl"
    with records.PredictionLog(path) as log:
        log.append([first, second])
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(whole) // 2, -1):  # every place where a crash may have stopped the second line
        path.write_bytes(whole[:cut])
        complete = cut == len(whole) - 1
        assert [item.perm for item in records.load_predictions(path)] == [(0, 1, 2), (1, 2, 0)][: 1 + complete]
        with records.PredictionLog(path) as log:
            assert log.done == {first.key, second.key} if complete else {first.key}
            if not complete:
                log.append([second])
        assert records.load_predictions(path) == [first, second]
    path.write_bytes(whole.replace(b'"id"', b'"i', 1))
    with pytest.raises(DataError, match=r"predictions.jsonl:1 is not valid JSON"):
        records.load_predictions(path)


def test_errors_are_asked_again_and_superseded(tmp_path: Path) -> None:
    qa = QA(**(QUESTION | {"options": tuple(QUESTION["options"])}))
    failed = records.Prediction(qa, (0, 1, 2), "", status="error")
    path = tmp_path / "p.jsonl"
    with records.PredictionLog(path) as log:
        log.append([failed])
    with records.PredictionLog(path) as log:
        assert log.done == set()
        log.append([dataclasses.replace(failed, prediction="A", status="ok")])
    assert [item.status for item in records.load_predictions(path)] == ["ok"]


def test_protocols_are_told_by_their_orders() -> None:
    qa = QA(**(QUESTION | {"options": tuple(QUESTION["options"])}))
    other = dataclasses.replace(qa, id="q2")
    stored, turned = records.Prediction(qa, (0, 1, 2), ""), records.Prediction(qa, (1, 2, 0), "")
    assert records.protocol_of([stored, records.Prediction(other, (0, 1, 2), "")]) == "as_released"
    assert records.protocol_of([turned, records.Prediction(other, (0, 1, 2), "")]) == "shuffle"
    assert records.protocol_of([stored, turned]) == "circular"
