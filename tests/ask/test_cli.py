"""`pbs ask` from picture to answer, report and JSON, on a small trained chain; what cannot be asked ends with exit code 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.io import open_dataset
from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.ask.picture import as_question, released_question
from pbs_jax.train import loop
from tests.train.conftest import cell_qa_config, one_device


@pytest.mark.slow
def test_a_cell_is_answered_reported_and_shown(drawn: Path, phases: dict[str, Path], tmp_path: Path, capsys):
    loop.train(cell_qa_config(drawn, phases), tmp_path / "run", one_device())
    (tmp_path / "cell.jpg").write_bytes(open_dataset(drawn / "cells", "test")[0]["image"])
    command = ["ask", str(tmp_path / "cell.jpg"), "What type is it?", "(True/False) It is big."]
    command += [f"--checkpoint={tmp_path / 'run'}", f"--report={tmp_path / 'page.html'}", "--json", "--as=crop"]
    capsys.readouterr()
    assert cli.main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "crop" and len(told["cells"]) == 1 and told["cells"][0]["label"]
    assert [answer["type"] for answer in told["answers"]] == ["fill_blank", "true_false"]
    assert told["answers"][1]["answer"] in ("true", "false")
    assert len(told["evidence"]["top"]) == 8
    page = (tmp_path / "page.html").read_text()
    assert "What type is it?" in page and "not PBS-VL" in page and "Not a diagnostic device" in page
    (tmp_path / "one.txt").write_text("hello")
    assert cli.main([*command[:1], str(tmp_path / "one.txt"), "What?", command[4]]) == 1
    assert "one.txt is not an image" in capsys.readouterr().err


def test_the_type_of_a_question_is_read_from_its_words():
    assert as_question("(True/False) It is big.").question_type == "true_false"
    assert as_question("Describe the cell.").question_type == "open"
    assert as_question("Which?", ("a", "b")).question_type == "multiple_choice"
    assert as_question("What colour is it?").question_type == "fill_blank"
    for bad in ({"text": " "}, {"text": "x", "options": ("a", "A")}, {"text": "x", "kind": "guess"}):
        with pytest.raises(DataError):
            as_question(**bad)


def test_a_prompt_of_the_paper_set_is_taken_apart():
    from data_prep.prompts import question_text

    for qa in (as_question("Which?", ("a b", "c")), as_question("(True/False) Big."), as_question("Size?")):
        read = released_question(question_text(qa, qa.options))
        assert (read.question, read.question_type, read.options) == (qa.question, qa.question_type, qa.options)


def test_usage_errors_and_missing_checkpoints_are_sentences(tmp_path: Path, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["ask", "x.png"])
    assert cli.main(["ask", "x.png", "What?", f"--checkpoint={tmp_path}"]) == 1
    assert "that phase is not finished" in capsys.readouterr().err
