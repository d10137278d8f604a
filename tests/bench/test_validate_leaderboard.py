"""Submissions: what is refused and why, what a leaderboard may say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from data_prep.files import write_jsonl
from data_prep.schema import QA, DataError
from pbs_jax import cli
from pbs_jax.bench import leaderboard, run
from pbs_jax.bench.records import Questions, load_questions, prediction_record
from pbs_jax.bench.validate import validate
from tests.bench.test_score import FAST, closed

CARD = {"model": {"model": "m"}, "modality": "image", "prompt_set": "paper", "protocol": "shuffle"}


@pytest.fixture
def asked(tmp_path: Path) -> Questions:
    file = tmp_path / "questions.jsonl"
    write_jsonl(file, closed(80))
    return load_questions(file)


def submit(folder: Path, asked: Questions, reply: Callable[[QA], str], protocol: str = "shuffle", **card: Any) -> Path:
    items = [item for qa in asked.items for item in run.presentations(qa, protocol)]
    lines = [prediction_record(item) | {"prediction": reply(item.qa)} for item in items]
    return store(
        folder, lines, CARD | {"name": folder.name, "dataset_id": asked.dataset_id, "protocol": protocol} | card
    )


def store(folder: Path, lines: Sequence[Any], card: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(card))
    return folder


@pytest.mark.parametrize("protocol", ["shuffle", "as_released", "circular"])
def test_a_whole_run_is_valid(protocol: str, asked: Questions, tmp_path: Path) -> None:
    found = validate(submit(tmp_path / "mine", asked, lambda qa: qa.answer, protocol), asked)
    assert found.valid and found.facts["coverage"] == 1 and found.facts["protocol"] == protocol


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda lines: lines[:-1], "1 are missing"),
        (lambda lines: [*lines, lines[0]], "1 are answered twice"),
        (lambda lines: [*lines, lines[0] | {"id": "other"}], "1 are no question's id: other"),
        (lambda lines: [lines[0] | {"perm": lines[0]["perm"][::-1]}, *lines[1:]], "1 have an option order that is not"),
        (lambda lines: [lines[0] | {"options": ["x", "y", "z"]}, *lines[1:]], "1 show other options"),
        (lambda lines: [lines[0] | {"prediction": None}, *lines[1:]], 'no "prediction" that is a text'),
        (lambda lines: [*lines, 3], 'no JSON object with an "id"'),
        (lambda lines: [lines[0] | {"status": "error"}, *lines[1:]], "79 of 80 questions have an answer"),
        (lambda lines: [lines[0] | {"answer_mode": "letter_likelihood"}, *lines[1:]], "mix the modes"),
    ],
)
def test_each_fault_is_named(
    spoil: Callable[[list[Any]], list[Any]], problem: str, asked: Questions, tmp_path: Path
) -> None:
    folder = submit(tmp_path / "mine", asked, lambda qa: qa.answer)
    lines = spoil(lines_of(folder))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = validate(folder, asked)
    assert any(problem in text for text in found.problems), found.problems


def test_the_card_must_match(asked: Questions, tmp_path: Path) -> None:
    other = validate(submit(tmp_path / "a", asked, lambda qa: qa.answer, dataset_id="f" * 64), asked)
    assert any("other questions were asked" in text for text in other.problems)
    wrong = submit(tmp_path / "b", asked, lambda qa: qa.answer, "as_released")
    assert not validate(wrong, asked, "shuffle").valid
    (wrong / "run.json").unlink()
    assert any("run.json is missing" in text for text in validate(wrong, asked, "as_released").problems)


def test_odd_answers_are_warned_of(asked: Questions, tmp_path: Path) -> None:
    found = validate(submit(tmp_path / "mine", asked, lambda qa: "no idea", model={"remarks": ["a stand-in"]}), asked)
    assert found.valid and found.warnings[0] == "a stand-in"
    assert "80 of 80 multiple_choice replies can't be read (robust profile)" in found.warnings
    assert any('are "no idea"' in text for text in found.warnings)


def half(qa: QA) -> str:
    return qa.answer if int(qa.id[1:]) % 2 else next(o for o in qa.options if o != qa.answer)


def test_the_board_ranks_what_can_be_told_apart(asked: Questions, tmp_path: Path) -> None:
    runs = [
        submit(tmp_path / "good", asked, lambda qa: qa.answer),
        submit(tmp_path / "alike", asked, lambda qa: qa.answer if qa.id != "q3" else half(qa)),
        submit(tmp_path / "poor", asked, half),
        submit(tmp_path / "broken", asked, half, dataset_id="f" * 64),
    ]
    found = leaderboard.write(tmp_path / "out", runs, asked, FAST)
    assert [item.valid for item in found] == [True, True, True, False]
    board = json.loads((tmp_path / "out/leaderboard.json").read_text())
    assert board["order"] == ["good", "alike", "poor"]
    assert {item["row"]: item["mark"] for item in board["marks"]} == {"good": "best", "alike": "tied"}
    text = (tmp_path / "out/leaderboard.md").read_text()
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert names.index('always "A"') < names.index("good") < names.index("poor")
    page = (tmp_path / "out/leaderboard.html").read_text()
    assert "Refused" in page and "other questions were asked" in page and "http" not in page


def test_unlike_submissions_are_refused(asked: Questions, tmp_path: Path) -> None:
    a = submit(tmp_path / "a", asked, lambda qa: qa.answer)
    b = submit(tmp_path / "b", asked, lambda qa: qa.answer, "as_released")
    with pytest.raises(DataError, match="option orders"):
        leaderboard.write(tmp_path / "out", [a, b], asked, FAST)
    broken = submit(tmp_path / "c", asked, half, dataset_id="f" * 64)
    with pytest.raises(DataError, match="no submission is valid"):
        leaderboard.write(tmp_path / "out", [broken], asked, FAST)


def test_the_commands_say_it_by_exit_code(asked: Questions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "questions.jsonl")
    good = submit(tmp_path / "good", asked, lambda qa: qa.answer)
    bad = store(tmp_path / "bad", lines_of(good)[:10], json.loads((good / "run.json").read_text()))
    assert cli.main(["bench", "validate", str(good), "--data", data]) == 0
    assert cli.main(["bench", "validate", str(bad), "--data", data, "--out", str(tmp_path / "bad.json")]) == 1
    assert "problem: 70 are missing" in capsys.readouterr().out
    assert json.loads((tmp_path / "bad.json").read_text())["valid"] is False
    board = ["bench", "leaderboard", str(good), str(bad), "--data", data, "--no-sim", "--draws", "200"]
    assert cli.main([*board, "--out", str(tmp_path / "board")]) == 3
    assert (tmp_path / "board/leaderboard.html").is_file()
