"""What text alone gives: the released files' figures, and the blind rows on data where the right answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_prep.schema import QA
from pbs_jax import cli
from pbs_jax.bench import audit, audit_tables, blind, tables
from pbs_jax.bench.records import load_questions


@pytest.fixture(scope="module")
def released(shared: Path) -> dict[str, Any]:
    return audit.audit(shared / "data/pbsbench")


@pytest.mark.parametrize(
    ("name", "true", "closed", "first", "choices"),
    [
        ("cell/id/test", 496, 505, 992, 1074),
        ("cell/ood/test", 711, 727, 1323, 1493),
        ("slide/id/test", 28, 35, 25, 55),
        ("cell/id/val", 493, 504, 966, 1047),
        ("slide/id/train", 233, 285, 211, 453),
    ],
)
def test_positions_and_balance_of_the_release(
    released: dict[str, Any], name: str, true: int, closed: int, first: int, choices: int
) -> None:
    (group,) = (g for g in released["groups"] if f"{g['level']}/{g['domain']}/{g['split']}" == name)
    assert (group["true"], group["by_type"]["true_false"]) == (true, closed)
    assert (group["answer_positions"][0], group["by_type"]["multiple_choice"]) == (first, choices)
    row = next(row for row in audit_tables.to_tables(released)[0].rows if row[0] == name)
    assert f"{true} of {closed}" in row and f"{first:,} of {choices:,}" in row


def test_lengths_leakage_and_validity_of_the_release(released: dict[str, Any]) -> None:
    groups = {f"{g['level']}/{g['domain']}/{g['split']}": g for g in released["groups"]}
    tests = [groups[name] for name in ("cell/id/test", "cell/ood/test", "slide/id/test")]
    assert [round(g["first_longest_option"], 2) for g in tests] == [0.65, 0.58, 0.58]
    assert [round(g["longest_option"], 3) for g in tests] == [0.630, 0.568, 0.533]
    assert all(g["repeated_ids"] == g["repeated_questions_of_an_image"] == 0 for g in groups.values())
    leaks = {(x["first"], x["second"]): x for x in released["leakage"]}
    assert leaks["cell/id/val", "cell/id/test"]["texts"] == [450, 3289]
    assert leaks["cell/id/test", "slide/id/test"]["slides"] == [18, 23]
    assert leaks["slide/id/train", "slide/id/test"]["texts"] == [46, 138]
    checks = {(x["group"], x["check"]): x for x in released["validity"] if x["group"] == "slide/id/test"}
    assert {(x["found"], x["of"], x["valid"]) for x in checks.values()} == {
        (14, 14, False),
        (0, 5, False),
        (17, 26, False),
        (34, 138, False),
    }
    assert all(file["as_pinned"] for file in released["files"]) and len(released["files"]) == 6
    json.dumps(released, allow_nan=False)


def test_contract_and_duplicates_of_the_release(released: dict[str, Any]) -> None:
    """official_code.md 1.2 and 1.7: the odd questions are known one by one."""
    broken = {x["rule"]: x["ids"] for x in released["contract"] if x["broken"]}
    assert {rule: len(ids) for rule, ids in broken.items()} == {
        "multiple choice has at least 4 options": 1,
        "a short answer is not yes or no": 49,
        "the task is not the stray reasoning": 4,
    }
    assert broken["multiple choice has at least 4 options"] == ["570ff57ddeeca3c7e1a9"]
    assert sum(x["of"] for x in released["contract"] if "name the same" in x["rule"]) == 12448
    (twice,) = [x for x in released["duplicates"] if x["found"]]
    assert (twice["group"], twice["what"], twice["found"]) == ("cell/ood/test", "images under several ids", 2)
    assert {id.rpartition("/")[2] for ids in twice["ids"] for id in ids} == {"MO_6394626.jpg", "VLY_8779340.jpg"}


def test_a_changed_file_is_not_the_release(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "slide_id_test.jsonl"
    file.write_bytes((shared / "data/pbsbench/slide_id_test.jsonl").read_bytes())
    assert cli.main(["bench", "audit", str(tmp_path)]) == 0
    file.write_text(file.read_text().replace("?", "??", 1))
    assert cli.main(["bench", "audit", str(tmp_path)]) == 3
    assert "not as released: slide_id_test.jsonl" in capsys.readouterr().out


def test_the_release_against_the_paper(released: dict[str, Any]) -> None:
    counts = {(x["group"], x["task"]): (x["here"], x["paper"]) for x in released["paper"]["counts"]}
    here, printed = counts["cell/id/test", "abnormality"]
    assert (here["true_false"], printed["true_false"]) == (9, 231)
    here, printed = counts["cell/ood/test", "all"]
    assert (here["fill_blank"], printed["fill_blank"]) == (1065, 1075)
    shown = {table.title: table for table in audit_tables.to_tables(released)}
    rows = dict(row[:2] for row in shown["Release / paper (Table 4), questions"].rows)
    assert rows["cell/id/test: all"] == "505 / 957"
    assert ("Table 2", "121", "1.000", "0.044") in shown["The paper's standard deviations over sqrt(p(1-p)/n)"].rows


def test_our_questions_give_nothing_away(dataset: Path) -> None:
    found = audit.audit(dataset)
    for group in found["groups"]:
        assert group["true"] * 2 == group["by_type"]["true_false"] > 0
        assert abs(group["longest_option"] - group["chance"]) < 0.1
    assert "Task validity" in "".join(map(tables.to_markdown, audit_tables.to_tables(found)))


def qa(id: str, kind: str, question: str, answer: str, options: tuple[str, ...] = ()) -> QA:
    return QA(id, f"image-{id}", "cell", "id", "test", "morphology", kind, question, answer, options)


def test_each_blind_row_answers_its_types() -> None:
    asked = [
        qa("1", "true_false", "The cell is big.", "False"),
        qa("2", "multiple_choice", "Which?", "no", ("no", "certainly", "yes")),
        qa("3", "fill_blank", "What shape is the nucleus?", "band"),
    ]
    train = [
        qa("t1", "fill_blank", "What shape is the nucleus?", "round"),
        qa("t2", "fill_blank", "What shape is the nucleus?", "round"),
        qa("t3", "fill_blank", "What is the colour?", "blue"),
        qa("t4", "fill_blank", "What is the colour, say?", "blue"),
        qa("t5", "fill_blank", "And the colour?", "blue"),
        qa("t6", "true_false", "The cell is big.", "False"),
        qa("t7", "true_false", "The cell is small.", "True"),
        qa("t8", "true_false", "The cell is round.", "True"),
        qa("t9", "multiple_choice", "Which?", "Yes.", ("Yes.", "no")),
    ]
    rows = {row.name: row.replies for row in blind.blind_rows(asked, train)}
    assert rows['always "True"'] == ("True", None, None)
    assert rows['always "C"'] == (None, "C", None)
    assert rows["longest option"] == (None, "certainly", None)
    assert rows["most frequent answer"] == ("True", "yes", "blue")
    assert rows["most frequent answer, same question"] == ("False", "yes", "round")
    assert rows["text-only nearest question"] == ("False", "yes", "round")
    assert not any('"D"' in name for name in rows)


def test_rows_that_need_training_questions_say_so() -> None:
    rows = blind.blind_rows([qa("1", "open", "Why?", "Because")], None)
    assert {row.name for row in rows if "--train" in row.note} == {
        "most frequent answer",
        "most frequent answer, same question",
        "text-only nearest question",
    }


def test_the_nearest_question_of_the_release(shared: Path) -> None:
    """The reference's figure for fill-in-the-blank, from the validation questions (benchmark.md section 0: .152)."""
    data = shared / "data/pbsbench"
    asked = load_questions(data / "cell_id_test.jsonl").items
    replies = blind.nearest_question(asked, load_questions(data / "cell_val.jsonl").items)
    blanks = [(a, b.answer) for a, b in zip(replies, asked, strict=True) if b.question_type == "fill_blank"]
    assert sum(a == b for a, b in blanks) / len(blanks) == pytest.approx(0.152, abs=0.01)
