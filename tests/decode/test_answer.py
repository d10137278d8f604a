"""Asking a finished phase 3: whole chain, answer modes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from data_prep.datasets import read_questions
from data_prep.io import open_dataset
from data_prep.schema import DataError, shown_options
from pbs_jax.decode.answer import Answerer, asked_int8, load_answerer
from pbs_jax.train import handover, loop
from tests.train.conftest import cell_qa_config, one_device


@pytest.fixture(scope="module")
def workdir(drawn: Path, phases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cell_qa")
    loop.train(cell_qa_config(drawn, phases), path, one_device())
    return path


@pytest.fixture(scope="module")
def answerer(workdir: Path) -> Answerer:
    return load_answerer(workdir, batch_size=8)


def test_images_become_one_row_of_visual_tokens_each(drawn: Path, answerer: Answerer):
    cells = open_dataset(drawn / "cells", "test")
    images = [cells[i]["image"] for i in range(3)]
    visual = answerer.encode(images)
    assert visual.shape == (3, 32, 192)
    np.testing.assert_allclose(answerer.encode(images[::-1])[::-1], visual, atol=1e-5)


def test_closed_questions_get_an_allowed_answer_by_likelihood(drawn: Path, answerer: Answerer):
    questions = [qa for qa in read_questions(drawn, "test") if qa.options or qa.question_type == "true_false"][:20]
    options = [shown_options(qa) for qa in questions]
    answers = answerer.answer(None, questions, options, "letter_likelihood")
    for qa, shown, answer in zip(questions, options, answers, strict=True):
        assert answer in (("true", "false") if not shown else "ABCDE"[: len(shown)]), qa.id


def test_a_language_model_split_over_eight_devices_answers_the_same(drawn: Path, workdir: Path, answerer: Answerer):
    split = load_answerer(workdir, batch_size=8, devices=jax.devices())
    kernel = split.params["language_model"]["layers"]["q"]["kernel"]
    assert answerer.mesh is None and dict(split.mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 2}
    assert kernel.sharding.shard_shape(kernel.shape)[-1] == kernel.shape[-1] // 2
    questions = list(read_questions(drawn, "test"))[:16]
    options = [shown_options(qa) for qa in questions]
    cells = open_dataset(drawn / "cells", "test")
    visual = answerer.encode([cells[i]["image"] for i in range(2)])
    np.testing.assert_allclose(split.encode([cells[i]["image"] for i in range(2)]), visual, atol=1e-5)
    asked = [0, 1] * 8, questions, options
    assert split.answer_about(split.read(visual), *asked) == answerer.answer_about(answerer.read(visual), *asked)


def test_int8_kernels_answer_on_one_device_and_on_eight(drawn: Path, workdir: Path, answerer: Answerer):
    alone = load_answerer(workdir, batch_size=8, int8=True)
    split = load_answerer(workdir, batch_size=8, int8=True, devices=jax.devices())
    kernel = alone.params["language_model"]["layers"][0]["q"]["kernel"]
    assert kernel.dtype == np.int8 and kernel.devices() == {jax.devices()[0]}
    assert split.params["language_model"]["layers"]["q"]["kernel"].dtype == np.int8
    questions = [qa for qa in read_questions(drawn, "test") if qa.options][:8]
    options = [shown_options(qa) for qa in questions]
    cells = open_dataset(drawn / "cells", "test")
    visual = answerer.encode([cells[i]["image"] for i in range(2)])
    asked = [0, 1] * 4, questions, options
    answers = alone.answer_about(alone.read(visual), *asked)
    assert split.answer_about(split.read(visual), *asked) == answers
    # What a phase was trained with is what answers unless another is asked for.
    content = handover.read(workdir)
    assert asked_int8(content | {"config": {**content["config"], "int8": True}}, None)
    assert not asked_int8(content, None) and not asked_int8(content | {"config": {"int8": True}}, False)


@pytest.mark.slow  # of generate, tests/decode/test_generate.py says the same
def test_an_answer_does_not_depend_on_its_neighbours(drawn: Path, answerer: Answerer):
    questions = list(read_questions(drawn, "test"))[:12]
    options = [shown_options(qa) for qa in questions]
    visual = np.random.default_rng(0).standard_normal((12, 32, 192)).astype(np.float32)
    together = answerer.answer(visual, questions, options)
    backwards = answerer.answer(visual[::-1].copy(), questions[::-1], options[::-1])
    assert together == backwards[::-1]


def test_what_does_not_belong_together_is_refused(workdir: Path, phases: dict[str, Path], tmp_path: Path):
    with pytest.raises(DataError, match=r"expected cell_qa"):
        load_answerer(phases["qformer"])
    content = json.loads((workdir / handover.FILE).read_text())
    content["facts"]["backbone_sha256"] = "0" * 64
    (tmp_path / "checkpoints").symlink_to(workdir / "checkpoints")
    (tmp_path / handover.FILE).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"no longer holds the backbone"):
        load_answerer(tmp_path)


def test_an_unknown_mode_is_named(answerer: Answerer):
    with pytest.raises(DataError, match='"guess" is unknown'):
        answerer.answer(None, [], [], "guess")
