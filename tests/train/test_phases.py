"""What each phase reads and trains: the gate on the train split, batches that fit, optimiser rules."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_prep.io import open_dataset
from data_prep.schema import DataError, shown_options
from pbs_jax.bench.records import load_questions
from pbs_jax.decode.answer import load_answerer
from pbs_jax.sharding.mesh import make_mesh
from pbs_jax.train import loop, phase0_backbone, phase0_language_model
from pbs_jax.train.optimizer import decay_mask, make_optimizer, schedule
from pbs_jax.train.state import leaves_by_name
from tests.train.conftest import cell_qa_config, one_device, small_config, untrained_qformer


def test_phase_0a_learns_from_the_train_split_only(drawn: Path):
    phase = phase0_backbone.build(small_config("phase0_backbone", drawn))
    held_out = {open_dataset(drawn / "cells", split)[i]["image"] for split in ("val", "test") for i in range(3)}
    train = open_dataset(drawn / "cells", "train")
    assert len(phase.examples) == len(train)
    assert not held_out & {record["image"] for record in train}


def test_phase_0b_learns_from_the_train_split_only(drawn: Path):
    phase = phase0_language_model.build(small_config("phase0_language_model", drawn))
    assert len(phase.examples) == len(open_dataset(drawn / "cell_qa_tokens", "train"))
    images = {record["image_id"] for record in open_dataset(drawn / "cell_qa_tokens", "train")}
    assert images <= set(open_dataset(drawn / "cells", "train").ids)


def test_another_number_of_query_tokens_goes_from_phase_1_to_the_answer_in_pytorch(
    drawn: Path, phases: dict[str, Path], tmp_path: Path
):
    export, torch_answer = (
        pytest.importorskip("pbs_jax.weights.export"),
        pytest.importorskip("pbs_jax.weights.torch_answer"),
    )
    untrained_qformer(drawn, tmp_path / "qformer", queries=8)
    starts = phases | {"qformer": tmp_path / "qformer"}
    loop.train(cell_qa_config(drawn, starts, steps=1), tmp_path / "run", one_device())
    answerer = load_answerer(tmp_path / "run", 2)
    asked = load_questions(drawn, "test").items[:2]
    cells = {record["cell_id"]: record["image"] for record in open_dataset(drawn / "cells", "test")}
    images, options = [cells[qa.image_id] for qa in asked], [shown_options(qa) for qa in asked]
    visual = answerer.encode(images)
    assert visual.shape[1] == 8
    answers = answerer.answer(visual, asked, options)
    assert answerer.answer_about(answerer.read(visual), [0, 1], asked, options) == answers
    export.export(tmp_path / "run", tmp_path / "torch")
    theirs = torch_answer.load_export(tmp_path / "torch")
    assert theirs.answer(theirs.encode(images), asked, options) == answers


def test_an_uneven_batch_is_refused_before_the_model_is_built(drawn: Path, tmp_path: Path):
    with pytest.raises(DataError, match=r"batch_size=6 is not divisible by .* = 8"):
        loop.train(small_config("phase0_backbone", drawn, batch_size=6), tmp_path / "run")


def test_the_schedule_warms_up_and_ends_at_zero():
    rate = schedule(1e-3, 100, 0.1)
    assert float(rate(0)) == 0.0
    assert float(rate(10)) == pytest.approx(1e-3)
    assert float(rate(100)) == pytest.approx(0.0, abs=1e-9)


def test_norms_and_biases_do_not_decay_and_queries_do():
    params = {
        "qformer": {
            "query_tokens": jnp.ones((1, 2, 3)),
            "layers": {
                "attention": {
                    "norm": {"scale": jnp.ones(3)},
                    "query": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)},
                }
            },
        }
    }
    mask = {name: bool(value) for name, value in leaves_by_name(decay_mask(params)).items()}
    assert mask == {
        "qformer/query_tokens": True,
        "qformer/layers/attention/norm/scale": False,
        "qformer/layers/attention/query/kernel": True,
        "qformer/layers/attention/query/bias": False,
    }


def test_muon_steps_have_the_size_of_adams(drawn: Path):
    """So that one learning rate serves matrices and the rest."""
    config = small_config(
        "phase0_backbone", drawn, optimizer__weight_decay=0.0, optimizer__warmup_fraction=0.0
    ).optimizer
    params = {"net": {"kernel": jnp.zeros((64, 256))}}
    grads = {"net": {"kernel": jax.random.normal(jax.random.key(0), (64, 256))}}
    for name in ("muon", "adamw"):
        with config.unlocked():
            config.name = name
        tx = make_optimizer(config, 100)
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params)
        rms = float(np.sqrt(np.mean(np.square(updates["net"]["kernel"]))))
        assert 0.1 * config.lr < rms <= 1.2 * config.lr, (name, rms)


def test_an_unknown_optimizer_is_named(drawn: Path):
    with pytest.raises(DataError, match='"sgd" is unknown'):
        make_optimizer(small_config("phase0_backbone", drawn, optimizer__name="sgd").optimizer, 10)


def test_meshes_take_the_devices_left():
    assert dict(make_mesh(fsdp=2).shape) == {"data": 4, "fsdp": 2, "tensor": 1}
