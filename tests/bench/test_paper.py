"""The paper's numbers: printed where the paper prints them, in no test, and what their standard deviations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.schema import QUESTION_TYPES, DataError
from pbs_jax.bench import compare, paper, radar, score, tables
from tests.bench.test_score import FAST, as_run, closed

PRINTED = {"Claude-4.5": "Claude-4.5-Sonnet", "Ours - PBS-VL": "PBS-VL", "PBS-VL-Slide": "PBS-VL"}


@pytest.fixture(scope="module")
def text(shared: Path) -> list[str]:
    return (shared / "reference/paper.txt").read_text().splitlines()


def lines_of(text: list[str], number: int) -> list[list[str]]:
    start = next(k for k, line in enumerate(text) if line.startswith(f"Table {number}:")) + 2
    stop = next((k for k in range(start, len(text)) if not text[k].strip()), len(text))
    return [line.split("\t") for line in text[start:stop]]


def rows_of(number: int) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for entry in paper.entries():
        if entry.table == number:
            out.setdefault(entry.model, []).append(f"{entry.value:.2f}({entry.sd:.3f})")
    return out


@pytest.mark.parametrize("number", [2, 6, 8, 9, 10, 11])
def test_rows_are_the_papers(number: int, text: list[str]) -> None:
    printed = {PRINTED.get(line[0], line[0]): line[1:] for line in lines_of(text, number) if "(" in line[-1]}
    assert rows_of(number) == printed


@pytest.mark.parametrize(("number", "lead"), [(3, 2), (12, 3)])
def test_columns_are_the_papers(number: int, lead: int, text: list[str]) -> None:
    head, *body = lines_of(text, number)
    for k, name in enumerate(head[lead:], lead):
        assert rows_of(number)[PRINTED.get(name, name)] == [line[k] for line in body]


def test_patch_counts_are_the_papers(text: list[str]) -> None:
    model, printed = "", {}
    for line in lines_of(text, 5)[1:]:
        model = line[0] or model
        printed[f"{model}, {line[1]} patches"] = line[2:]
    assert rows_of(5) == printed


def test_table_4_adds_up() -> None:
    for track in ("cell_id", "cell_ood", "slide_id"):
        *parts, everything = paper.tasks(track)
        whole = paper.counts(track, everything) or {}
        for kind in QUESTION_TYPES:
            assert sum((paper.counts(track, task) or {})[kind] for task in parts) == whole[kind]


def test_the_papers_sd_is_that_of_single_questions() -> None:
    """Ratio 1.00 +- 0.02 over all accuracies whose n is known: clusters were not resampled."""
    found = {item["name"]: item for item in paper.std_check()}
    assert found["all accuracies"]["entries"] == 367
    assert found["all accuracies"]["ratio"] == pytest.approx(1, abs=0.02)
    assert (found["Table 2"]["entries"], round(found["Table 2"]["ratio"], 3)) == (121, 1.0)  # benchmark.md E


def test_own_rows_stand_above_copies_with_both_n() -> None:
    items = closed(40)
    scores = score.score_runs([as_run(items, [qa.answer for qa in items], "mine")], FAST)
    table = paper.table(2, scores.cells)
    names = [row[0] for row in table.rows]
    assert names.index("mine") == table.rule_after < len(names) - table.copied == names.index("GPT-4o †‡")
    assert all(paper.DAGGER in name for name in names[-table.copied :]) and table.copied == 17
    assert paper.DAGGER not in "".join(names[: -table.copied])
    assert "ID MCQ Acc (n=40, †1088)" in table.header and "OOD T/F Acc (n=†727)" in table.header
    mine = dict(zip(table.header, table.rows[table.rule_after], strict=True))
    assert mine["ID MCQ Acc (n=40, †1088)"] == "1.000(0.000)"
    assert any("closed loop" in note for note in table.notes)
    latex = tables.to_latex(table)
    assert latex.count(r"\midrule") == 3 and r"GPT-4o \dag{}\ddag{}" in latex
    assert tables.to_markdown(table).count("\n| ") == len(table.rows) + 2


def test_copied_rows_are_in_no_comparison() -> None:
    items = closed(40)
    scores = score.score_runs([as_run(items, ["A"] * 40, "mine")], FAST)
    assert not any(paper.DAGGER in cell.row for cell in scores.cells)
    with pytest.raises(DataError, match="no row"):
        compare.compare(scores, [("mine", paper.marked("PBS-VL"))], FAST)


def test_all_tables_of_the_paper_are_there() -> None:
    made = paper.all_tables()
    assert [table.title.split(":")[0] for table in made] == [f"Table {n}" for n in (2, 3, 5, 6, 8, 9, 10, 11, 12)]
    assert [len(table.rows) for table in made] == [17, 6, 9, 2, 17, 17, 17, 17, 6]


def test_radar_shows_shares_of_the_reference() -> None:
    figure = radar.radar({"a": [0.5, 0.8, 0.4], "b": [0.25, 0.8, None]}, ["x", "y", "z"], "t", "a")
    assert figure.count("<polygon points") == 1  # b has two of three axes
    assert "1 = 0.80" in figure and "1 more in the tables" in figure
    assert "too few metrics" in radar.radar({"a": [0.5, 0.0, None]}, ["x", "y", "z"], "t", "a")
    slide = radar.of_paper("slide_id")
    assert slide.count("<polygon points") == 6 and "PBS-VL †" in slide and "GPT-4o †‡" in slide
