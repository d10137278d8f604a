"""`pbs ask` from picture to answer, report and JSON, on a small trained chain; what cannot be asked ends with exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from data_prep import picture
from data_prep.io import open_dataset
from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.ask import picture as asking
from pbs_jax.ask.picture import as_question, released_question
from pbs_jax.train import loop
from pbs_jax.train.state import tree_sha256
from tests.train.conftest import cell_qa_config, one_device, save_finished


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
    half = chr(0xDCFF)  # what a byte that is no UTF-8 becomes on a command line
    bad_ones = [{"text": " "}, {"text": "x", "options": ("a", "A")}, {"text": "x", "kind": "guess"}]
    for bad in (*bad_ones, {"text": half}, {"text": "x", "options": ("a", half)}):
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


@pytest.mark.parametrize("wrong", ["", "backbone", "cell_patch_alignment"])
def test_other_phases_than_the_features_came_through_are_refused_before_the_slide_is_worked_on(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    learnt = {"kind": "phase2"}
    trees = {"backbone": ("backbone", "backbone_sha256"), "cell_patch_alignment": ("patch_perceiver", "phase2_sha256")}
    for phase, (tree, hashed) in trees.items():
        weights = {"kernel": jnp.arange(4.0)}
        learnt[hashed] = tree_sha256(weights)
        other = {"kernel": jnp.ones(4)} if phase == wrong else weights
        save_finished(tmp_path / phase, {tree: other}, {"size": "nano"}, phase)
    save_finished(tmp_path / "slide_qa", {"projector": {"kernel": jnp.ones(2)}}, {"size": "nano"}, "slide_qa")
    monkeypatch.setattr(asking, "load_slide_answerer", lambda *more, int8: SimpleNamespace(features=learnt))

    def opened(*more, **options):
        raise DataError("the slide is worked on")

    monkeypatch.setattr(picture, "open_picture", opened)
    workdirs = [f"--checkpoint={tmp_path / phase}" for phase in (*trees, "slide_qa")]
    assert cli.main(["ask", "slide.svs", "What?", *workdirs]) == 1
    told = capsys.readouterr().err
    if wrong:
        assert f"{tmp_path / wrong} is not the phase" in told and str(tmp_path / "slide_qa") in told
        assert "pbs-ask-" not in told
    else:
        assert "the slide is worked on" in told
