"""The training step: one jitted function for all phases, differentiating the trainable tree only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from data_prep.schema import DataError
from pbs_jax.train.state import Params, TrainState, leaves_by_name, path_name

# One of libtpu 0.0.50.1's ways to sum small arrays over chips fails a check of its own in some steps of phases 1 and 3 on v5e
# and v5p slices, which ends the process.
TPU_OPTIONS = {"xla_tpu_enable_pincer_short_emitter": "false"}
Metrics = dict[str, jax.Array]
Batch = dict[str, jax.Array]
LossFn = Callable[[Params, Params, Batch, jax.Array | None], tuple[jax.Array, Metrics]]
WeightFn = Callable[[Batch], jax.Array]  # what a batch counts for in a mean over batches: its supervised tokens


def make_step(
    loss: LossFn,
    tx: optax.GradientTransformation,
    seed: int,
    state: TrainState,
    *,
    parts: int = 1,
    weight: WeightFn | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """step(state, frozen, batch) -> (state, metrics), laid out like the given state; `state` is donated, `frozen` is not.

    The key of a step is fold_in(key(seed), step): a resumed run draws the same numbers. parts: the gradient is added up
    over so many parts of the batch, each counting by `weight`, so that only one part's activations are held at a time;
    raises DataError for several parts without one.
    """

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    gradient = jax.value_and_grad(loss, has_aux=True)
    if parts > 1:
        if weight is None:
            raise DataError(f"config.accumulate={parts}: this phase's loss is no mean over answers; use 1")
        gradient = in_parts(gradient, weight, parts)

    platform = next(iter(jax.tree.leaves(shardings)[0].device_set)).platform
    options = TPU_OPTIONS if platform == "tpu" else None

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options)
    def step(state: TrainState, frozen: Params, batch: Batch, base: jax.Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(base, state.step)
        (value, metrics), grads = gradient(state.trainable, frozen, batch, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, updates)
        norms = {"grad_norm": grads, "param_norm": trainable, "update_norm": updates}
        metrics = {"loss": value, **metrics, **{name: optax.tree.norm(tree) for name, tree in norms.items()}}
        return TrainState(state.step + 1, trainable, opt_state), metrics

    # The key is an argument, not a constant: all seeds share one compiled step.
    return functools.partial(step, base=jax.random.key(seed))


def in_parts(gradient: Callable[..., Any], weight: WeightFn, parts: int) -> Callable[..., Any]:
    """The gradient of a batch as the weighted mean of its parts' (all metrics alike), one after the other."""

    def summed(trainable: Params, frozen: Params, batch: Batch, key: jax.Array) -> Any:
        # Every `parts`-th row goes to the same part: rows stay on the device that holds them.
        split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)
        whole = jnp.maximum(jax.vmap(weight)(split).sum(), 1e-6)

        def add(total: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
            number, part = numbered
            found = gradient(trainable, frozen, part, jax.random.fold_in(key, number))
            share = weight(part) / whole
            return jax.tree.map(lambda old, new: old + share * new, total, found), None

        first = jax.tree.map(lambda x: x[0], split)
        start = jax.tree.map(jnp.zeros_like, jax.eval_shape(gradient, trainable, frozen, first, key))
        return jax.lax.scan(add, start, (jnp.arange(parts), split))[0]

    return summed


def init_state(trainable: Params, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> TrainState:
    """Step 0, laid out as `abstract_state` says."""
    shapes = abstract_state(trainable, tx, mesh)
    opt_state = jax.jit(tx.init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes.opt_state))(trainable)
    return TrainState(jax.device_put(jnp.zeros((), jnp.int32), shapes.step.sharding), trainable, opt_state)


def abstract_state(trainable: Params, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> TrainState:
    """ShapeDtypeStructs of a state over `trainable` (arrays or ShapeDtypeStructs, with shardings).

    The optimiser's moments are laid out like the parameters they belong to, all else is replicated.
    """
    layouts = {name: leaf.sharding for name, leaf in leaves_by_name(trainable).items()}
    replicated = NamedSharding(mesh, PartitionSpec())

    def laid_out(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        name = path_name(path)
        sharding = next((layouts[p] for p in layouts if leaf.ndim and name.endswith("/" + p)), replicated)
        return leaf.update(sharding=sharding)

    opt_state = jax.tree_util.tree_map_with_path(laid_out, jax.eval_shape(tx.init, trainable))
    return TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated), abstract(trainable), opt_state)


def abstract(tree: Any) -> Any:
    """ShapeDtypeStructs with the shardings of the given arrays: the target of a restore."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)
