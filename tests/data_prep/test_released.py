"""The released files: read without loss, through the rules, and balanced without inventing anything."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest

from data_prep import cli_instruct, files, probe, qa_stats, quality, released
from data_prep.schema import OTHERS, QA, DataError
from pbs_jax import cli

TEST = "cell_id_test.jsonl"


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    return shared / "data" / "pbsbench"


@pytest.fixture(scope="module")
def cell_test(folder: Path) -> list[QA]:
    return files.read_jsonl(folder / TEST)


def test_reading_and_writing_loses_nothing(folder: Path, tmp_path: Path, cell_test: list[QA]) -> None:
    files.write_jsonl(tmp_path / TEST, cell_test)
    before, after = (
        [json.loads(line) for line in (root / TEST).read_text().splitlines()] for root in (folder, tmp_path)
    )
    assert after == before


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": "1"}\n')
    with pytest.raises(DataError, match=r"x.jsonl:1 is no question"):
        files.read_jsonl(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("id", "label"),
    [
        ("AML-Cytomorphology_LMU:NGS/NGS_5602.tiff", "Neutrophil"),
        ("AML-Cytomorphology_LMU:MYO/MYO_0001.tiff", OTHERS),
        ("APL:All/All/Patient_16/Signed slides/Lymphocyte, variant/VLY_1.jpg", "Lymphocyte"),
        ("APL:All/All/Patient_16/Signed slides/Promyelocyte/PR_1.jpg", OTHERS),
        ("WBC_LISC:Baso_1.bmp", "Basophil"),
        ("S-BIAD440:III_1:0_86016:0072", ""),
    ],
)
def test_labels_of_the_other_sets_follow_table_7(id: str, label: str) -> None:
    qa = QA("q", id, "cell", "ood", "test", "morphology", "open", "What is seen?", "A cell.")
    assert released.recorded_label(qa) == label


def test_every_out_of_domain_image_but_the_contradictory_ones_has_a_label(folder: Path) -> None:
    questions = files.read_jsonl(folder / "cell_ood_test.jsonl")
    facts = released.released_facts(questions)
    assert len({qa.image_id for qa in questions}) - len(facts) == 4  # two files, each under two labels
    assert OTHERS not in {known.label for known in facts.values()}
    planted = next(qa for qa in questions if "this neutrophil" in qa.question and qa.image_id in facts)
    other = dataclasses.replace(planted, question=planted.question.replace("neutrophil", "basophil"))
    assert [item.rule for item in quality.screen([planted, other], facts).rejected] == ["wrong"]


@pytest.mark.slow
def test_rules_on_released_slides(folder: Path) -> None:
    """Most diagnosis questions name the diagnosis; the one "All of the above" is a format fault."""
    screened = quality.screen(files.read_jsonl(folder / "slide_train.jsonl"), {})
    by_rule = {rule: [i for i in screened.rejected if i.rule == rule] for rule in quality.TITLES}
    named = [i for i in by_rule["leaks"] if "names" in i.detail]
    assert all(i.qa.task == "diagnosis" for i in named) and len(named) > 100
    assert any("All of the above" in i.qa.options for i in by_rule["format"])
    assert len(screened.kept) + len(screened.rejected) == 1142


def test_rebalanced_statements_and_positions_are_even(cell_test: list[QA]) -> None:
    made = released.rebalance(cell_test)
    truth = Counter(qa.answer for qa in made.questions if qa.question_type == "true_false")
    assert truth["True"] == truth["False"] == 252
    assert all(p > probe.POSITION_P for n, p in probe.position_p(made.questions, "as_released").items() if n == 4)
    assert made.counts["replaced"] + made.counts["dropped"] + made.counts["kept"] + made.counts["shuffled"] == 3289


def test_false_items_come_from_the_records_own_rejected_options(cell_test: list[QA]) -> None:
    made = released.rebalance(cell_test)
    by_id = {qa.id: qa for qa in cell_test}
    new = [qa for qa in made.questions if qa.id not in by_id]
    false = [qa for qa in new if qa.answer == "False"]
    for qa in new:
        source = by_id[qa.provenance["from"]]
        wrong = [o for o in source.options if o != source.answer]
        said = [source.answer] if qa.answer == "True" else wrong
        assert any(qa.question == f'(True/False) The answer to "{source.question}" is "{option}"' for option in said)
        assert qa.image_id == source.image_id
        assert ("unreviewed_negative" in qa.provenance) == (qa.answer == "False")
    assert len(false) == made.counts["unreviewed_negative"] > 200
    shuffled = [qa for qa in made.questions if qa.question_type == "multiple_choice"]
    assert all(sorted(qa.options) == sorted(by_id[qa.id].options) for qa in shuffled)
    assert {qa.provenance["version"] for qa in made.questions} == {made.version}


def test_rebalancing_is_reproducible_and_named_by_content_and_seed(cell_test: list[QA]) -> None:
    once, again, other = (released.rebalance(cell_test[:400], seed) for seed in (0, 0, 1))
    assert once == again and once.version != other.version and once.questions != other.questions
    assert once.version != released.rebalance(cell_test[:399]).version


def test_the_command_writes_derivatives_and_leaves_the_originals(folder: Path, tmp_path: Path) -> None:
    content = (folder / "slide_id_test.jsonl").read_bytes()
    source = tmp_path / "in" / "slide_id_test.jsonl"
    source.parent.mkdir()
    source.write_bytes(content)
    assert cli.main(["data", "quality", str(source), "--rebalance", str(tmp_path / "out")]) == 0
    assert cli.main(["data", "quality", str(source), "--rebalance", str(source.parent)]) == 1
    assert source.read_bytes() == content
    card = json.loads((tmp_path / "out" / "rebalanced.json").read_text())["slide_id_test.jsonl"]
    assert card["true_false"]["True"] == card["true_false"]["False"]
    assert len(files.read_jsonl(tmp_path / "out" / source.name)) == 138 - card["counts"].get("dropped", 0)


def test_the_command_counts_rejects_by_rule(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rejects = tmp_path / "rejects.jsonl"
    assert cli.main(["data", "quality", str(folder / "slide_id_test.jsonl"), "--rejects", str(rejects)]) == 3
    out = capsys.readouterr().out
    lines = [json.loads(line) for line in rejects.read_text().splitlines()]
    kept = int(next(line.split()[-1] for line in out.splitlines() if line.startswith("kept")))
    assert kept + len(lines) == 138 and all(line["reject_detail"] for line in lines)


def test_tables_are_the_papers_where_the_release_is(folder: Path) -> None:
    """Slide test: 138 questions in both; the release moved two fill-in answers to open."""
    by_task, by_type = qa_stats.tables(files.read_jsonl(folder / "slide_id_test.jsonl"))
    ours, paper = by_task.rows
    assert ours[2:8] == paper[2:8] == (70, 10, 31, 13, 14, 138)
    assert by_type.rows[-1] == ("slide ID test", "subtotal", 35, 35, 55, 55, 20, 22, 28, 26, 138, 138)
    for part in qa_stats.PAPER.values():
        assert set(part) <= {*qa_stats.CELL_TASKS, *qa_stats.SLIDE_TASKS}
    assert sum(map(sum, qa_stats.PAPER["cell", "id", "train"].values())) == 27301
    assert "35 & 35 & 55 & 55" in qa_stats.render([by_type], "latex")
    assert qa_stats.render([by_type], "csv").splitlines()[-2].startswith("slide ID test,subtotal,35,35")


def test_questions_are_found_in_a_folder_or_named_as_missing(folder: Path, tmp_path: Path) -> None:
    assert len(cli_instruct.questions_at(folder / "slide_val.jsonl")) == 144
    with pytest.raises(DataError, match="holds neither questions"):
        cli_instruct.questions_at(tmp_path)
