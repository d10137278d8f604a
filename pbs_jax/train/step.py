"""The training step: one jitted function for all phases, differentiating the trainable tree only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pbs_jax.train.state import Params, TrainState

Metrics = dict[str, jax.Array]
LossFn = Callable[[Params, Params, dict[str, jax.Array], jax.Array | None], tuple[jax.Array, Metrics]]


def make_step(loss: LossFn, tx: optax.GradientTransformation, seed: int) -> Callable[..., tuple[TrainState, Metrics]]:
    """step(state, frozen, batch) -> (state, metrics); `state` is donated, `frozen` is not.

    The key of a step is fold_in(key(seed), step): a resumed run draws the same numbers.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, frozen: Params, batch: dict[str, jax.Array]) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.trainable, frozen, batch, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        metrics = {"loss": value, **metrics, "grad_norm": optax.global_norm(grads)}
        return TrainState(state.step + 1, trainable, opt_state), metrics

    return step


def init_state(trainable: Params, tx: optax.GradientTransformation) -> TrainState:
    """Step 0. The optimiser's moments are laid out like the parameters they belong to."""
    return TrainState(jnp.zeros((), jnp.int32), trainable, jax.jit(tx.init)(trainable))


def abstract(tree: Any) -> Any:
    """ShapeDtypeStructs with the shardings of the given arrays: the target of a restore."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
