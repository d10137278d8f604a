"""The demo's chain of steps: what is reused, continued and redone; and the parts of its report that compute."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.schema import DataError
from pbs_jax import cli, demo, report

ONE = demo.Step("one", "first", ("data", "verify", "a"), ("made/one",))
TWO = demo.Step("two", "second", ("data", "verify", "b"), ("made/two",))


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Commands that were started; each makes the path it is named after. `fail` as last argument fails."""
    log: list[str] = []

    def start(command: list[str], **kwargs: Any) -> SimpleNamespace:
        log.append(command[-1])
        place = {"a": "one", "b": "two", "c": "two"}.get(command[-1])
        if place:
            (tmp_path / "made" / place).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(returncode=0 if place else 1)

    monkeypatch.setattr(subprocess, "run", start)
    return log


def chain(out: Path, *plan: demo.Step) -> None:
    before = ""
    for step in plan:
        before = key = demo.step_key(step, out, before)
        if demo.finished(step, out, key) is None:
            demo.execute(step, out, key)


def test_finished_steps_are_reused(tmp_path: Path, ran: list[str]) -> None:
    chain(tmp_path, ONE, TWO)
    chain(tmp_path, ONE, TWO)
    assert ran == ["a", "b"]


def test_a_changed_step_is_redone_from_nothing_and_so_is_what_follows(tmp_path: Path, ran: list[str]) -> None:
    chain(tmp_path, ONE, TWO)
    (tmp_path / "made" / "two" / "old").touch()
    changed = demo.Step("two", "second", ("data", "verify", "c"), TWO.makes)
    chain(tmp_path, ONE, changed)
    assert ran == ["a", "b", "c"] and not (tmp_path / "made" / "two" / "old").exists()
    other_first = demo.Step("one", "first", ("data", "verify", "--deep", "a"), ONE.makes)
    chain(tmp_path, other_first, changed)
    assert ran[3:] == ["a", "c"]


def test_an_interrupted_step_continues_with_what_it_had(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    key = demo.step_key(ONE, tmp_path, "")
    demo.execute(ONE, tmp_path, key)
    marker = tmp_path / "steps" / "one.json"
    marker.write_text(json.dumps({"key": key}))  # as a kill leaves it
    (tmp_path / "made" / "one" / "partial").touch()
    chain(tmp_path, ONE)
    assert ran == ["a", "a"] and (tmp_path / "made" / "one" / "partial").exists()
    assert "continues" in capsys.readouterr().out


def test_lost_output_is_made_again(tmp_path: Path, ran: list[str]) -> None:
    chain(tmp_path, ONE)
    (tmp_path / "made" / "one").rmdir()
    chain(tmp_path, ONE)
    assert ran == ["a", "a"]


def test_a_failed_step_names_the_command(tmp_path: Path, ran: list[str]) -> None:
    broken = demo.Step("one", "first", ("data", "verify", "two words"), ())
    with pytest.raises(DataError, match="exit code 1; to see it alone: pbs data verify 'two words'"):
        chain(tmp_path, broken)
    with pytest.raises(DataError):
        chain(tmp_path, broken)


def test_the_key_sees_the_config_but_not_the_folder(tmp_path: Path) -> None:
    def key(out: Path, *overrides: str) -> str:
        argv = ("train", "--config=phase3_cell_qa", f"--config.data.root={out}", *overrides, f"--workdir={out / 'w'}")
        return demo.step_key(demo.Step("t", "t", argv, ()), out, "")

    assert key(tmp_path / "a") == key(tmp_path / "b")
    assert key(tmp_path / "a") != key(tmp_path / "a", "--config.steps=7")


def test_the_demos_commands_are_valid(tmp_path: Path) -> None:
    from pbs_jax import config

    parser = cli.build_parser()
    for step in demo.steps(tmp_path, seed=3):
        config_args, rest = config.split_argv(step.argv)
        assert isinstance(parser.parse_args(rest), argparse.Namespace), step.name
        if config_args:
            assert config.from_args(config_args).seed == 3


def answer(question_type: str, prediction: str, gold: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"question_type": question_type, "prediction": prediction, "answer": gold, "options": options}


@pytest.mark.parametrize(
    ("line", "right"),
    [
        (answer("true_false", "True", "True"), True),
        (answer("true_false", "False", "True"), False),
        (answer("multiple_choice", "B", "Monocyte", ("Basophil", "Monocyte")), True),
        (answer("multiple_choice", "A", "Monocyte", ("Basophil", "Monocyte")), False),
        (answer("fill_blank", "monocyte", "Monocyte"), True),
        (answer("open", "A round nucleus.", "A round nucleus."), True),
        (answer("open", "A nucleus.", "A round nucleus."), False),
    ],
)
def test_right_and_wrong(line: dict[str, Any], right: bool) -> None:
    assert report.is_right(line) is right


def test_result_puts_the_model_beside_the_blind_rows() -> None:
    def cell(row: str, kind: str, value: float | None) -> dict[str, Any]:
        low = None if value is None else value - 0.05
        return {
            "row": row, "kind": kind, "track": "cell_id", "question_type": "multiple_choice", "task": "all",
            "profile": "robust", "metric": "accuracy", "value": value, "low": low, "high": value, "n": 40,
        }  # fmt: skip

    text = report.result([cell('always "A"', "blind", 0.25), cell("nano", "model", 0.9), cell("none", "blind", None)])
    assert "<b>0.900</b>" in text and "95 % 0.850–0.900" in text and "chance 0.25" in text
    assert text.index("always &quot;A&quot;") < text.index("All numbers")
    assert '<tr class="strong"><td>nano' in text
