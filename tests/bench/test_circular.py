"""Circular scoring and the visual gain, on answerers whose right scores are known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data_prep.schema import QA, DataError, stable_hash
from pbs_jax import cli
from pbs_jax.bench import circular, gain, score
from pbs_jax.bench.adapters import Request, Response
from pbs_jax.bench.evaluate import ALL, Settings, evaluate
from pbs_jax.bench.records import Prediction, load_questions
from pbs_jax.bench.run import presentations
from tests.bench.conftest import Table

FAST = Settings(draws=200)
OPTIONS = ("Round", "Bilobed", "Band", "Irregular")


def questions(count: int = 200) -> list[QA]:
    return [
        QA(f"q{k}", f"i{k // 4}", "cell", "id", "test", "morphology", "multiple_choice", f"Which, {k}?", OPTIONS[k % 4], OPTIONS)
        for k in range(count)
    ]  # fmt: skip


def answered(name: str, say: Callable[[Prediction], str], items: Sequence[QA], seed: int = 0) -> score.Run:
    import dataclasses

    asked = [item for qa in items for item in presentations(qa, "circular")]
    given = tuple(dataclasses.replace(item, prediction=say(item)) for item in asked)
    return score.Run(name, seed, "image", "circular", "d" * 64, given)


def sees(item: Prediction) -> str:
    """Knows the answer to every second question, keeps to one wrong option in the others."""
    known = stable_hash("known", item.qa.id) % 2
    wrong = next(option for option in sorted(item.qa.options) if option != item.qa.answer)
    return "ABCD"[item.qa.options.index(item.qa.answer if known else wrong)]


def hedges(item: Prediction) -> str:
    """Right in the first three orders of four, unreadable in the last."""
    rotation = item.qa.options.index(item.qa.answer)
    return "I can't tell." if rotation == 3 else "ABCD"[rotation]


def test_soft_strict_and_positions() -> None:
    items = questions()
    runs = [answered(n, f, items) for n, f in (("sees", sees), ("hedges", hedges), ("letter", lambda item: "B"))]
    found = {item.row: item for item in circular.circular(score.gather(runs), FAST)}
    share = sum(stable_hash("known", qa.id) % 2 for qa in items) / len(items)
    one = found["sees"]
    assert (one.soft.value, one.strict.value) == (pytest.approx(share), pytest.approx(share)) and one.same == 1
    assert [value for value, _ in one.by_position] == pytest.approx([share] * 4)
    assert one.soft.n == 200 and one.soft.clusters == 50  # questions and images, not rotations
    one = found["hedges"]
    assert (one.soft.value, one.strict.value, one.same) == (0.75, 0, 0) and 0.01 < one.strict.high < 0.03
    assert one.by_position == ((1, 200), (1, 200), (1, 200), (0, 200)) and one.chosen == (0.25, 0.25, 0.25, 0, 0.25)
    for one in (found["letter"], found['always "B"']):
        assert (one.soft.value, one.strict.value, one.same) == (0.25, 0, 0) and one.chosen == (0, 1, 0, 0, 0)
    assert found["letter"].chance == 0.25


def test_it_is_what_the_tables_hold_and_seeds_are_averaged() -> None:
    items = questions(40)
    runs = [answered("m", sees, items, 0), answered("m", hedges, items, 1)]
    scores = score.score_runs(runs, FAST)
    one = next(item for item in circular.circular(scores, FAST) if item.row == "m")
    cells = {c.metric: c for c in evaluate(scores.asked, scores.rows, scores.origin, FAST)
             if (c.row, c.task, c.profile) == ("m", ALL, "robust")}  # fmt: skip
    assert cells["accuracy"].value == pytest.approx(one.soft.value)
    assert cells["accuracy_strict"].value == pytest.approx(one.strict.value) and 0 < one.strict.value < one.soft.value
    assert cells["accuracy"].n == 40


def test_questions_that_lack_a_rotation_are_left_out() -> None:
    items = questions(40)
    whole = answered("m", sees, items)
    torn = score.Run("m", 0, "image", "circular", "d" * 64, whole.predictions[:-1])
    gathered = score.gather([answered("all", sees, items), torn])
    found = {item.row: item for item in circular.circular(gathered, FAST)}
    assert (found["all"].soft.n, found["m"].soft.n) == (40, 39)
    shuffled = score.Run("m", 0, "image", "shuffle", "d" * 64, tuple(p for p in whole.predictions[::4]))
    with pytest.raises(DataError, match="run with --protocol circular"):
        circular.circular(score.gather([shuffled]), FAST)


def test_score_command_adds_the_table(
    dataset: Path, tmp_path: Path, use_model: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use_model(Table(load_questions(dataset, "test").items, wrong=3))
    here = f"--out={tmp_path / 'r'}"
    assert cli.main(["bench", "run", "--model=x", f"--data={dataset}", here, "--protocol=circular", "--limit=300"]) == 0
    assert cli.main(["bench", "score", str(tmp_path / "r"), "--no-sim", "--draws=100"]) == 0
    assert "Cell, in domain: option order (circular)" in capsys.readouterr().out
    assert "option order (circular)" in (tmp_path / "r/tables.md").read_text()


class Sighted(Table):
    """Right about the true/false questions only when a picture is shown; about the others always."""

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        said = super().generate(requests, mode)
        blind = [not r.images and r.question_type == "true_false" for r in requests]
        return [Response("true") if lost else answer for lost, answer in zip(blind, said, strict=True)]


def test_gain_is_found_where_the_image_is_used(
    dataset: Path, tmp_path: Path, use_model: Callable[[object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use_model(Sighted(load_questions(dataset, "test").items, wrong=1))
    folders = [str(tmp_path / modality) for modality in ("image", "blind", "mismatched")]
    for folder in folders:
        assert (
            cli.main(
                [
                    "bench",
                    "run",
                    "--model=x",
                    f"--data={dataset}",
                    f"--out={folder}",
                    f"--modality={Path(folder).name}",
                    "--limit=300",
                ]
            )
            == 0
        )
    assert cli.main(["bench", "gain", *folders, "--draws=300", f"--out={tmp_path}"]) == 0
    assert "| table - table, blind | Cell, in domain | T/F Bal. acc" in capsys.readouterr().out
    found = {(x["b"], x["question_type"]): x for x in json.loads((tmp_path / "gain.json").read_text())}
    assert len(found) == 8
    helped = found["table, blind", "true_false"]
    assert helped["verdict"] == "the image helps" and helped["without"] == pytest.approx(0.5)
    assert helped["difference"]["value"] == pytest.approx(helped["image"] - helped["without"])
    assert {x["verdict"] for key, x in found.items() if key != ("table, blind", "true_false")} == {"no gain to be seen"}
    assert cli.main(["bench", "gain", folders[0], "--draws=100"]) == 1
    assert "no model was run with and without its image" in capsys.readouterr().err


def test_runs_over_patches_are_paired_with_blind_and_with_as_many_patches() -> None:
    def one(name: str, modality: str, patches: int | None) -> score.Run:
        return score.Run(name, 0, modality, "shuffle", "d", (), patches=patches)

    runs = [
        one("m", "image", 15),
        one("m", "image", 30),
        one("m", "blind", None),
        one("m", "blank", 30),
        one("o", "image", 30),
    ]
    assert gain.pairs(runs) == [
        ("m, 15 patches", "m, blind"),
        ("m, 30 patches", "m, blind"),
        ("m, 30 patches", "m, 30 patches, blank"),
    ]
