"""`pbs paper`: every table of the paper is there, ours beside the published rows only where the questions are the same."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pbs_jax import cli, paper
from pbs_jax.bench import paper as published
from pbs_jax.bench import score
from pbs_jax.bench.compare import compare
from pbs_jax.bench.remarks import released
from tests.bench.test_score import FAST, as_run, closed


def group(is_released: bool) -> paper.Group:
    items = closed(60)
    source = {"dataset": "S-BIAD440", "slide_id": "I_1"} if is_released else {}
    items = [dataclasses.replace(qa, source=source) for qa in items]
    runs = [as_run(items, [qa.answer for qa in items], name="nano")]
    runs.append(as_run(items, [items[0].answer] * len(items), name="nano, 3 patches"))
    scores = score.score_runs(runs, FAST)
    pairs = paper.variants([row.name for row in scores.rows])
    return paper.Group(scores, all(map(released, scores.asked)), (), tuple(compare(scores, pairs, FAST, "paper")))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("paper")
    paper.write(out, [group(False)])
    return out


def test_every_table_and_model_of_the_paper_is_there(written: Path) -> None:
    text = (written / "paper.md").read_text()
    assert [int(n) for n in sorted(set(re.findall(r"^### Table (\d+):", text, re.M)), key=int)] == list(
        published.NUMBERS
    )
    models = {entry.model for entry in published.entries()}
    assert all(f"| {published.marked(model)} |" in text for model in models)


def test_other_questions_are_marked_row_by_row_and_never_ranked(written: Path) -> None:
    (table,) = [table for table in paper.shown(group(False)) if table.title.startswith("Table 2:")]
    own, copied = table.rows[: -table.copied], table.rows[-table.copied :]
    assert own and all(row[0].endswith(f"({paper.STAND_IN})") for row in own)
    assert not any(paper.STAND_IN in row[0] for row in copied)
    assert "no row of ours can be compared" in (written / "paper.html").read_text()


def test_our_rows_have_intervals_and_models_stand_against_their_variants(written: Path) -> None:
    text = (written / "paper.md").read_text()
    rows = re.findall(r"^\| nano \|(.*)$", text, re.M)
    assert any(re.search(r"\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]", row) for row in rows)
    assert paper.variants(["nano", "nano, blind", "nanobot", "nano, 3 patches"]) == [
        ("nano", "nano, blind"), ("nano", "nano, 3 patches")
    ]  # fmt: skip
    gaps = re.search(r"### Models minus their variants.*?\n\n(.*?)\n\n", text, re.S)
    assert gaps and re.search(r"^\| nano - nano, 3 patches \|.* [+-]\d\.\d{3} \[", gaps[1], re.M)


def test_released_questions_stand_beside_the_paper_unmarked() -> None:
    (table,) = [table for table in paper.shown(group(True)) if table.title.startswith("Table 2:")]
    assert "nano" in [row[0] for row in table.rows] and paper.STAND_IN not in table.title
    assert not any("no row of ours" in line for line in paper.not_comparable([group(True)]))


def test_runs_of_other_questions_never_share_a_table() -> None:
    items = closed(10)
    one = as_run(items, ["A"] * 10)
    other = dataclasses.replace(one, dataset_id="other")
    seed = dataclasses.replace(one, seed=1)
    assert [len(runs) for runs in paper.together([one, other, seed])] == [2, 1]


def test_the_published_alignment_gaps_are_within_their_noise() -> None:
    gaps = [float(row[-1]) for row in paper.alignment_gaps().rows]
    assert len(gaps) == 4 and all(abs(gap) < 1 for gap in gaps)


def test_latex_rows_have_their_columns(written: Path) -> None:
    text = (written / "paper.tex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") and text.isascii()
    assert r"\dag{} copied from the paper" in text and r"Signature generate\textbar{}" in text
    for columns, body in re.findall(r"\\begin\{tabular\}\{(lc+)\}(.*?)\\end\{tabular\}", text, re.S):
        for line in body.splitlines():
            if line.endswith(r"\\"):
                assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1, line


@pytest.mark.slow
def test_latex_compiles_and_fits_the_page(written: Path, tmp_path: Path) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("pdflatex is not installed")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", str(written / "paper.tex")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout and (tmp_path / "paper.pdf").stat().st_size > 10_000


def test_a_folder_without_runs_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["paper", str(tmp_path)]) == 1
    assert "holds no runs" in capsys.readouterr().err
