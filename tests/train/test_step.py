"""A step's gradient added up over parts of its batch is that of the whole batch, whatever the parts weigh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from data_prep.schema import DataError
from pbs_jax.sharding.mesh import make_mesh, put_batch
from pbs_jax.train.state import TrainState
from pbs_jax.train.step import init_state, make_step


def loss(trainable: Any, frozen: Any, batch: Any, key: Any) -> Any:
    errors = jnp.square(batch["x"] @ trainable["w"] - batch["y"])
    value = (batch["counts"] * errors).sum() / jnp.maximum(batch["counts"].sum(), 1e-6)
    return value, {"errors": value}


def weight(batch: Any) -> jax.Array:
    return batch["counts"].sum()


def after_two_steps(parts: int, devices: int) -> tuple[np.ndarray, float]:
    draw = np.random.default_rng(0)
    rows = {
        "x": draw.standard_normal((16, 4), np.float32),
        "y": draw.standard_normal(16, np.float32),
        # As answers of a bin: none, few or many; one part has none at all.
        "counts": np.where(np.arange(16) % 4 == 1, 0, draw.integers(0, 9, 16)).astype(np.float32),
    }
    mesh = make_mesh(devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        tx = optax.sgd(0.1)
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        state = init_state(jax.device_put({"w": jnp.ones(4)}, replicated), tx, mesh)
        step = make_step(loss, tx, 0, state, parts=parts, weight=weight)
        batch = put_batch(rows, mesh)
        for _ in range(2):
            state, metrics = step(state, {}, batch)
    return np.asarray(state.trainable["w"]), float(metrics["errors"])


def test_several_parts_need_what_they_weigh() -> None:
    with pytest.raises(DataError, match=r"config\.accumulate=2"):
        make_step(loss, optax.sgd(0.1), 0, TrainState(jnp.zeros((), jnp.int32), {}, ()), parts=2)


@pytest.mark.parametrize(("parts", "devices"), [(2, 1), (4, 1), (16, 1), (4, 4)])
def test_parts_add_up_to_the_batch(parts: int, devices: int) -> None:
    whole, error = after_two_steps(1, 1)
    added, other = after_two_steps(parts, devices)
    np.testing.assert_allclose(added, whole, rtol=1e-6)
    assert other == pytest.approx(error, rel=1e-6)
    assert not np.allclose(whole, 1.0)
