"""Damaged and unfinished checkpoints (cases.md C28): the newest usable one is found, the others are named and kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data_prep.schema import DataError
from pbs_jax.sharding.mesh import place
from pbs_jax.train.checkpoint import Checkpoints
from pbs_jax.train.state import TrainState
from pbs_jax.train.step import init_state
from tests.train.conftest import one_device


@pytest.fixture
def saved(tmp_path: Path):
    """Steps 1 and 2 of a small state in tmp_path, and what a restore starts from."""
    mesh = one_device()
    params = {"net": {"kernel": jnp.arange(6.0).reshape(2, 3)}}
    state = init_state(place(params, jax.tree.map(lambda _: jax.P(), params), mesh), optax.adam(1e-3), mesh)
    data = iter(grain.MapDataset.range(32).seed(0).shuffle().to_iter_dataset())
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (1, 2):
        next(data)
        trainable = jax.tree.map(lambda leaf: leaf + 1.0, state.trainable)
        state = TrainState(jnp.asarray(step, jnp.int32), trainable, state.opt_state)
        checkpoints.save(state, data)
    checkpoints.close()
    fresh = init_state(place(params, jax.tree.map(lambda _: jax.P(), params), mesh), optax.adam(1e-3), mesh)
    return tmp_path, fresh, lambda: iter(grain.MapDataset.range(32).seed(0).shuffle().to_iter_dataset())


def test_bad_steps_are_skipped_by_name_and_kept(saved, capsys):
    workdir, fresh, data = saved
    folder = workdir / "checkpoints"
    shutil.copytree(folder / "2", folder / "3")
    for path in (folder / "3").rglob("*"):
        if (
            path.is_file()
            and path.stat().st_size > 64
            and path.name not in ("commit_success.txt", "_CHECKPOINT_METADATA")
        ):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "9").mkdir()
    checkpoints = Checkpoints(workdir, keep=5)
    state = checkpoints.restore_newest(fresh, data())
    assert int(state.step) == 2
    np.testing.assert_array_equal(state.trainable["net"]["kernel"], np.arange(6.0).reshape(2, 3) + 2.0)
    said = capsys.readouterr().out
    assert (
        "checkpoints/9 is skipped: it was not finished" in said
        and "checkpoints/3 is skipped: it cannot be read" in said
    )
    assert (folder / "unusable-9").is_dir() and (folder / "unusable-3").is_dir()
    checkpoints.save(TrainState(jnp.asarray(3, jnp.int32), state.trainable, state.opt_state), data())
    checkpoints.close()
    assert Checkpoints(workdir).latest() == 3


def test_no_usable_step_is_an_error_and_none_at_all_a_fresh_start(saved, tmp_path):
    workdir, fresh, data = saved
    for step in (1, 2):
        (workdir / "checkpoints" / str(step) / "commit_success.txt").unlink()
    with pytest.raises(DataError, match="has no usable checkpoint"):
        Checkpoints(workdir).restore_newest(fresh, data())
    assert Checkpoints(tmp_path / "new").restore_newest(fresh, data()) is None
