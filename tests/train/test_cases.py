"""Faults of other people's trainings (`reference/cases.md`, job 3): which tests plant each, and the few not planted elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pbs_jax.config import load
from pbs_jax.sharding.mesh import make_mesh
from pbs_jax.train import loop
from pbs_jax.train.abstract import TRAINABLE, abstract_phase
from pbs_jax.train.optimizer import make_optimizer
from pbs_jax.train.phase import batches
from tests.train import tiny_run

CASES = {  # under tests/: the test that meets the symptom first, then its neighbours
    "C24 fewer or other devices": (
        "train/test_checkpoint::test_a_checkpoint_of_eight_devices_opens_on_fewer",
        "train/test_loop::test_a_checkpoint_of_eight_devices_resumes_on_four",
    ),
    "C25 a model of other leaves": (
        "train/test_checkpoint::test_a_model_of_other_leaves_is_refused_and_each_is_named",
        "train/test_loop::test_a_changed_leaf_is_named",
    ),
    "C26 step 0, older steps": (
        "train/test_checkpoint::test_a_step_that_is_not_above_the_newest_is_refused",
        "train/test_checkpoint::test_step_0_is_resumed",
        "train/test_checkpoint::test_no_usable_step_is_an_error_and_none_at_all_a_fresh_start",
    ),
    "C28 unfinished or damaged": (
        "train/test_checkpoint::test_bad_steps_are_skipped_by_name_and_kept",
        "train/test_checkpoint::test_no_usable_step_is_an_error_and_none_at_all_a_fresh_start",
    ),
    "C30 iterator state, changed data": (
        "train/test_loop::test_a_run_does_not_go_on_with_other_data",
        "train/test_loop::test_a_finished_run_does_nothing_and_another_config_is_refused",
        "train/test_loop::test_other_threads_read_the_same_examples_on",
        "train/test_order::test_hosts_read_contiguous_parts",
        "train/test_sigkill::test_a_phase_killed_at_random_steps_ends_with_the_same_weights",
    ),
    "C32 empty or damaged shards": (
        "data_prep/test_io::test_damaged_shard_is_named",
        "data_prep/test_io::test_bad_records_and_lost_records_are_refused",
        "data_prep/test_io::test_a_crashed_writer_leaves_no_dataset",
    ),
    "C33 ragged batches, hosts that wait": (
        "train/test_cases::test_a_run_compiles_its_step_once_though_epochs_end_within_a_batch",
        "train/test_cases::test_the_last_batch_of_an_evaluation_is_padded_and_says_so",
        "train/test_phases::test_an_uneven_batch_is_refused_before_the_model_is_built",
        "train/test_hosts::test_two_processes_agree_with_one",
        "train/test_hosts::test_a_missing_process_is_named_by_every_other",
        "train/test_hosts::test_a_process_whose_partner_is_killed_says_so_and_may_be_started_again",
    ),
    "C35 parameters that do not move": (
        "train/test_cases::test_what_trains_is_float32_though_the_config_computes_in_bfloat16",
        "train/test_cases::test_a_parameter_moves_at_the_papers_learning_rate",
    ),
    "C36 a resumed run is the same run": (
        "train/test_loop::test_a_killed_small_run_continues_to_the_same_weights",
        "train/test_loop::test_a_killed_run_continues_to_the_same_weights",
    ),
}


def test_every_case_of_job_3_has_its_tests(repo: Path, shared: Path) -> None:
    cases = re.findall(r"^### (C\d+) · J3 ", (shared / "reference" / "cases.md").read_text(), re.MULTILINE)
    assert [name.split()[0] for name in CASES] == cases
    for name in sorted({name for names in CASES.values() for name in names}):
        file, _, test = name.partition("::")
        assert f"\ndef {test}(" in (repo / "tests" / f"{file}.py").read_text(), f"{name} is gone"


@pytest.mark.parametrize("count", [2, 8])
def test_a_run_compiles_its_step_once_though_epochs_end_within_a_batch(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C33: 64 examples in batches of 24."""
    made = []
    real = loop.make_step
    monkeypatch.setattr(loop, "build_phase", tiny_run.build)
    monkeypatch.setattr(loop, "require_usable", lambda config: None)
    monkeypatch.setattr(loop, "make_step", lambda *rest, **more: made.append(real(*rest, **more)) or made[-1])
    mesh = make_mesh(devices=jax.devices()[:count])
    assert loop.train(tiny_run.tiny_config(batch_size=24), tmp_path, mesh) == 0
    assert [step.func._cache_size() for step in made] == [1]


def test_the_last_batch_of_an_evaluation_is_padded_and_says_so() -> None:
    """C33: 10 examples, 4 a batch."""
    found = batches([{"x": np.full(3, k)} for k in range(10)], 4)
    assert [batch["x"].shape for batch, _ in found] == [(4, 3)] * 3
    assert [real.tolist() for _, real in found] == [[True] * 4, [True] * 4, [True, True, False, False]]


SHIPPED = ("phase1_cell_representation", "phase2_cell_patch_alignment", "phase3_cell_qa", "phase4_slide_qa")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", SHIPPED)
def test_what_trains_is_float32_though_the_config_computes_in_bfloat16(name: str, optimizer: str) -> None:
    """C35: parameters and moments of the largest size, whose frozen weights are halves."""
    config = load(f"{name}:size=7b", [f"--config.optimizer.name={optimizer}"])
    phase = abstract_phase(config)
    assert set(phase.trainable) == set(TRAINABLE[config.phase])
    state = jax.eval_shape(make_optimizer(config.optimizer, 100).init, phase.trainable)
    kinds = {
        leaf.dtype for leaf in jax.tree.leaves((phase.trainable, state)) if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert kinds == {jnp.dtype("float32")} and phase.size.decoder.dtype == "bfloat16"


def test_a_parameter_moves_at_the_papers_learning_rate() -> None:
    """C35: 50 steps of 5e-5 from 1.0; in bfloat16 it would stay there."""
    config = load("phase3_cell_qa", ["--config.optimizer.name=adamw", "--config.optimizer.lr=5e-5"]).optimizer

    def after(dtype: str) -> float:
        tx = make_optimizer(config, 50)
        params = {"linear": {"kernel": jnp.ones((2, 2), dtype)}}
        state = tx.init(params)
        update = jax.jit(tx.update)
        for _ in range(50):
            updates, state = update(params, state, params)  # a gradient that is always upwards
            params = optax.apply_updates(params, updates)
        return float(params["linear"]["kernel"].astype(jnp.float32).mean())

    assert after("bfloat16") == 1.0
    assert 1e-3 < 1.0 - after("float32") < 50 * 5e-5 * 1.1
