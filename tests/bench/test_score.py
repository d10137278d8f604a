"""Whole scorings: numbers, intervals, coverage, protocols, seeds, tables and their refusals, the command line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from data_prep import stats
from data_prep.schema import QA, DataError
from pbs_jax import cli
from pbs_jax.bench import compare, evaluate, run, score, tables
from pbs_jax.bench.records import Prediction, load_questions

FAST = evaluate.Settings(draws=300)


def closed(n: int, kind: str = "multiple_choice") -> list[QA]:
    """Two questions per image; golds cycle."""
    options = ("red", "green", "blue") if kind == "multiple_choice" else ()
    golds = options or ("True", "False")
    return [
        QA(f"q{k}", f"i{k // 2}", "cell", "id", "test", "morphology", kind, "Which?", golds[k % len(golds)], options)
        for k in range(n)
    ]


def as_run(
    items: Sequence[QA], replies: Sequence[str | None], name: str = "model", seed: int = 0, modality: str = "image"
) -> score.Run:
    """None is an error."""
    predictions = tuple(
        Prediction(qa, tuple(range(len(qa.options))), reply or "", "ok" if reply is not None else "error")
        for qa, reply in zip(items, replies, strict=True)
    )
    return score.Run(name, seed, modality, "as_released", "d" * 64, predictions)


def cell_of(scores: score.Scores, row: str, metric: str, profile: str = "robust", task: str = "all") -> evaluate.Cell:
    (found,) = (c for c in scores.cells if (c.row, c.metric, c.profile, c.task) == (row, metric, profile, task))
    return found


def test_numbers_are_those_of_a_direct_count() -> None:
    items = closed(90)
    replies = ["A" if k % 4 else "B" for k in range(90)]
    scores = score.score_runs([as_run(items, replies)], FAST)
    right = [qa.answer == {"A": "red", "B": "green"}[reply] for qa, reply in zip(items, replies, strict=True)]
    cell = cell_of(scores, "model", "accuracy")
    assert (cell.value, cell.n, cell.clusters, cell.coverage) == (np.mean(right), 90, 45, 1)
    assert cell.sd == pytest.approx(math.sqrt(np.mean(right) * (1 - np.mean(right)) / 90))
    interval = stats.clustered_ci(right, [qa.image_id for qa in items], draws=300)
    assert (cell.low, cell.high) == pytest.approx((interval.low, interval.high), abs=1e-12)
    assert cell_of(scores, 'always "B"', "accuracy").value == 1 / 3
    assert scores.positions == {"model": {p: {"A": 67, "B": 23} for p in FAST.profiles}}
    assert cell.signature == "acc-stated-letter-text-robust-tokens-1|generate|as_released|ds:dddddddddddd"


def test_errors_lower_coverage_not_the_score() -> None:
    items = closed(60, "true_false")
    replies = [None if k < 6 else qa.answer for k, qa in enumerate(items)]
    scores = score.score_runs([as_run(items, replies)], FAST)
    cell = cell_of(scores, "model", "accuracy")
    assert (cell.value, cell.n, cell.coverage) == (1, 54, 0.9)
    assert tables.show(cell) == "refused (90.0% answered)"
    assert cell_of(scores, 'always "True"', "balanced_accuracy").value == 0.5
    wrong = score.score_runs([as_run(items, replies)], FAST, errors_as_wrong=True)
    assert cell_of(wrong, "model", "accuracy").value == 0.9
    assert cell_of(wrong, "model", "invalid").value == 0.1
    from pbs_jax.bench.records import Questions

    more = Questions(tuple(closed(80, "true_false")), "d" * 64)
    unasked = score.score_runs([as_run(items, [qa.answer for qa in items])], FAST, expected=more)
    assert cell_of(unasked, "model", "accuracy").coverage == 0.75


def test_intervals_of_a_perfect_score_admit_doubt() -> None:
    items = closed(40)
    scores = score.score_runs([as_run(items, [qa.answer for qa in items])], FAST)
    cell = cell_of(scores, "model", "accuracy")
    assert (cell.value, cell.high) == (1, 1) and cell.low == pytest.approx(stats.wilson(40, 40)[0])


def test_seeds_are_averaged_and_shown() -> None:
    items = closed(90)
    runs = [as_run(items, [qa.answer if k % 10 >= s else "E" for k, qa in enumerate(items)], seed=s) for s in range(3)]
    cell = cell_of(score.score_runs(runs, FAST), "model", "accuracy")
    assert cell.seeds == (1.0, 0.9, 0.8) and cell.value == pytest.approx(0.9)
    assert "0.900 ±0.100 [" in tables.show(cell)
    with pytest.raises(DataError, match="have the same seed"):
        score.score_runs([runs[0], runs[0]], FAST)


def test_few_false_statements_are_marked_not_rankable() -> None:
    items = [
        dataclasses.replace(qa, answer="True" if k > 8 else "False") for k, qa in enumerate(closed(300, "true_false"))
    ]
    scores = score.score_runs([as_run(items, ["True"] * 300)], FAST)
    table = tables.overview(scores.cells, "cell_id", "robust")
    assert "T/F: not rankable: 9 of the rarer truth value" in table.notes
    assert cell_of(scores, "model", "accuracy").value == 0.97 and cell_of(scores, "model", "mcc").value == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "shuffle"}, "option orders"),
        ({"dataset_id": "e" * 64}, "question sets"),
    ],
)
def test_unlike_runs_are_refused(change: dict, message: str) -> None:
    items = closed(10)
    one = as_run(items, ["A"] * 10)
    with pytest.raises(DataError, match=message):
        score.score_runs([one, dataclasses.replace(one, name="other", **change)], FAST)
    mixed = dataclasses.replace(
        one,
        name="other",
        predictions=tuple(dataclasses.replace(p, answer_mode="letter_likelihood") for p in one.predictions),
    )
    with pytest.raises(DataError, match="mix the modes generate, letter_likelihood"):
        score.score_runs([one, mixed], FAST)


def test_a_column_of_mixed_signatures_is_refused() -> None:
    items = closed(20)
    cells = score.score_runs([as_run(items, ["A"] * 20)], FAST).cells
    other = [
        dataclasses.replace(c, row="else", rank=99, signature=c.signature.replace("as_rel", "circ")) for c in cells
    ]
    assert tables.overview(cells, "cell_id", "paper").rows
    with pytest.raises(DataError, match="mixes signatures"):
        tables.overview([*cells, *other], "cell_id", "paper")


def test_circular_counts_a_question_once() -> None:
    items = [item for qa in closed(30) for item in run.presentations(qa, "circular")]
    assert len(items) == 90
    first = tuple(dataclasses.replace(item, prediction="A") for item in items)
    base = score.Run("model", 0, "image", "circular", "d" * 64, first)
    scores = score.score_runs([base], FAST)
    soft, strict = (cell_of(scores, "model", name) for name in ("accuracy", "accuracy_strict"))
    assert (soft.value, soft.n, soft.low, soft.high) == (pytest.approx(1 / 3), 30, *[pytest.approx(1 / 3)] * 2)
    assert (strict.value, strict.n) == (0, 30)
    by_text = tuple(dataclasses.replace(item, prediction=item.qa.answer) for item in items)
    right = score.score_runs([dataclasses.replace(base, predictions=by_text)], FAST)
    assert cell_of(right, "model", "accuracy_strict").value == 1


def test_an_oracle_by_text_is_right_in_every_order() -> None:
    for protocol in ("as_released", "shuffle", "circular"):
        items = [item for qa in closed(30) for item in run.presentations(qa, protocol)]
        letters = [dataclasses.replace(p, prediction="ABC"[p.qa.options.index(p.qa.answer)]) for p in items]
        made = score.Run("m", 0, "image", protocol, "d" * 64, tuple(letters))
        assert cell_of(score.score_runs([made], FAST), "m", "accuracy").value == 1


def test_comparison_is_paired_and_weighted_as_its_metric() -> None:
    items = closed(80, "true_false")
    good, poor = [qa.answer for qa in items], ["True"] * 80
    scores = score.score_runs([as_run(items, good, "a"), as_run(items, poor, "b", modality="blind")], FAST)
    (found,) = compare.compare(scores, [("a", "b, blind")], FAST)
    assert (found.metric, found.difference.value) == ("balanced_accuracy", pytest.approx(0.5))
    assert found.difference.low > 0.3 and found.p_holm < 0.01
    with pytest.raises(DataError, match='no row "c"'):
        compare.compare(scores, [("a", "c")], FAST)


def test_rows_without_image_stand_above_models() -> None:
    items = closed(30)
    runs = [as_run(items, ["A"] * 30, "net"), as_run(items, ["B"] * 30, "net", modality="blind")]
    table = tables.overview(score.score_runs(runs, FAST).cells, "cell_id", "robust")
    names = [row[0] for row in table.rows]
    assert names[-2:] == ["net, blind", "net"] and table.rule_after == len(names) - 1
    latex = tables.to_latex(table)
    assert latex.count(r"\midrule") == 2 and r"always ``" not in latex
    assert latex.count("&") == latex.count(r" \\") * (len(table.header) - 1)


@pytest.mark.slow
def test_released_files_in_five_seconds(shared: Path, tmp_path: Path) -> None:
    """7,922 rows, both profiles, B = 10,000, with the constant rows; generous to a busy machine, strict on CPU time."""
    data = shared / "data/pbsbench"
    start = time.process_time()
    questions = load_questions(data, "test")
    made = score.load_run(data / "scorer_cases/verbose.jsonl", questions)
    scores = score.score_runs([made], evaluate.Settings(), expected=questions)
    assert time.process_time() - start < 8
    assert len(scores.asked) == 7922
    ood = [c for c in scores.cells if c.track == "cell_ood" and c.row == 'always "True"' and c.metric == "accuracy"]
    assert {round(c.value or 0, 3) for c in ood if c.task == "all"} == {0.978}
    record = list(csv.DictReader(io.StringIO(tables.to_csv(scores.cells))))
    assert len(record) == len(scores.cells) and float(record[0]["value"]) == scores.cells[0].value
    json.dumps(scores.to_json(), allow_nan=False)


def test_the_command_writes_all_tables(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = shared / "data/pbsbench"
    predictions = tmp_path / "mine.jsonl"
    ids = {qa.id for qa in load_questions(data / "slide_id_test.jsonl").items}
    lines = (data / "scorer_cases/letters.jsonl").read_text().splitlines()
    predictions.write_text("\n".join(line for line in lines if json.loads(line)["id"] in ids))
    command = ["bench", "score", str(predictions), "--data", str(data / "slide_id_test.jsonl"), "--no-sim"]
    assert cli.main([*command, "--train", str(data / "slide_train.jsonl"), "--draws", "200"]) == 0
    shown = capsys.readouterr().out
    assert "| mine | 1.000" in shown and '| always "A" |' in shown and "text-only nearest question" in shown
    for name in ("scores.json", "scores.csv", "tables.md", "tables.tex"):
        assert (tmp_path / name).stat().st_size > 1000
    assert cli.main([*command, "--profile", "lenient"]) == 1
    assert "--profile lenient is unknown" in capsys.readouterr().err
