"""Damaged and unfinished checkpoints (cases.md C28): the newest usable one is found, the others are named and kept. Trees
that do not fit (C25), other devices (C24) and steps that are too old (C26)."""

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
from pbs_jax.sharding.mesh import make_mesh, place
from pbs_jax.train.checkpoint import Checkpoints, load_params
from pbs_jax.train.state import TrainState
from pbs_jax.train.step import abstract, init_state
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
    left = folder / "5.orbax-checkpoint-tmp-1764500000000"  # by a writer that was killed
    shutil.copytree(folder / "2", left)
    checkpoints = Checkpoints(workdir, keep=5)
    state = checkpoints.restore_newest(fresh, data())
    assert int(state.step) == 2
    np.testing.assert_array_equal(state.trainable["net"]["kernel"], np.arange(6.0).reshape(2, 3) + 2.0)
    said = capsys.readouterr().out
    assert (
        "checkpoints/9 is skipped: it was not finished" in said
        and "checkpoints/3 is skipped: it cannot be read" in said
    )
    assert not left.exists(), "what a killed save left is no step, and is cleared"
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


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_that_is_not_above_the_newest_is_refused(saved, step):
    """C26: and step 0 is a step like others."""
    workdir, fresh, data = saved
    checkpoints = Checkpoints(workdir)
    with pytest.raises(DataError, match=rf"holds step 2, so step {step} is not saved"):
        checkpoints.save(TrainState(jnp.asarray(step, jnp.int32), fresh.trainable, fresh.opt_state), data())


def test_step_0_is_resumed(saved, tmp_path):
    """C26."""
    _, fresh, data = saved
    moved = TrainState(fresh.step, jax.tree.map(lambda leaf: leaf + 7.0, fresh.trainable), fresh.opt_state)
    checkpoints = Checkpoints(tmp_path / "zero")
    checkpoints.save(moved, data())
    checkpoints.wait()
    assert checkpoints.latest() == 0
    restored = Checkpoints(tmp_path / "zero").restore_newest(fresh, data())
    np.testing.assert_array_equal(restored.trainable["net"]["kernel"], moved.trainable["net"]["kernel"])


@pytest.mark.parametrize(
    ("net", "match"),
    [
        ({"kernel": (2, 3), "bias": (3,)}, r"missing net/bias \(3,\)"),
        ({}, r"extra net/kernel \(2, 3\)"),
        ({"weight": (2, 3)}, r"missing net/weight \(2, 3\); extra net/kernel \(2, 3\)"),
        ({"kernel": (2, 4)}, r"net/kernel is \(2, 3\), not \(2, 4\)"),
    ],
)
def test_a_model_of_other_leaves_is_refused_and_each_is_named(saved, net, match):
    """C25: neither resumed, nor read for the next phase."""
    workdir, _, data = saved
    mesh = one_device()
    params = {"net": {name: jnp.zeros(shape) for name, shape in net.items()}}
    state = init_state(place(params, jax.tree.map(lambda _: jax.P(), params), mesh), optax.adam(1e-3), mesh)
    with pytest.raises(DataError, match=match):
        Checkpoints(workdir).restore_newest(state, data())
    assert (workdir / "checkpoints" / "2").is_dir(), "a readable step of another model stays where it is"
    with pytest.raises(DataError, match=match):
        load_params(workdir / "checkpoints" / "2", abstract(state.trainable))


@pytest.mark.parametrize("count", [2, 1])
def test_a_checkpoint_of_eight_devices_opens_on_fewer(tmp_path, count):
    """C24: and on another mesh, bit for bit, to resume and for the next phase."""

    def state(mesh: jax.sharding.Mesh, start: float) -> TrainState:
        params = {"net": {"kernel": jnp.arange(64.0).reshape(8, 8) + start}}
        return init_state(place(params, {"net": {"kernel": jax.P("fsdp", "tensor")}}, mesh), optax.adam(1e-3), mesh)

    def data():
        return iter(grain.MapDataset.range(32).to_iter_dataset())

    written = state(make_mesh(fsdp=4, tensor=2), 0.1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(written, data())
    checkpoints.close()
    fewer = state(make_mesh(fsdp=count, devices=jax.devices()[:count]), 5.0)
    restored = Checkpoints(tmp_path).restore_newest(fewer, data())
    loaded = load_params(tmp_path / "checkpoints" / "0", abstract(fewer.trainable))
    for left, right in ((restored, written), (loaded, written.trainable)):
        jax.tree.map(np.testing.assert_array_equal, left, right)
    assert restored.trainable["net"]["kernel"].sharding == fewer.trainable["net"]["kernel"].sharding
