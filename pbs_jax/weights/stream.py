"""Weights straight from their files to where they are computed: tensor by tensor, in the order of the files.

At no time is more on the host than one tensor beside the resident result: a stacked leaf is allocated once, laid out as
the model wants it, and updated in place layer by layer.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from data_prep.progress import progress
from pbs_jax.weights.convert import TRANSFORMS, plan
from pbs_jax.weights.source import Source
from pbs_jax.weights.tables import Table


def stream(source: Source, table: Table, target: Any, what: str = "weights") -> dict[str, Any]:
    """Nested dict of jax arrays like `target` (nested ShapeDtypeStructs whose shardings are set).

    Values are cast to the target's dtypes. For tables whose rows fill whole leaves or layers. Raises DataError as
    `convert.plan`, before anything is read.
    """
    leaves = flatten_dict(target, sep="/")
    places = plan(source.shapes, table, target)
    done: dict[str, jax.Array] = {}
    order = [name for file in source.files for name in source if name in places and source.file_of[name] == file]
    for name in progress(order, len(order), f"loading {what}"):
        for place in places[name]:
            leaf = leaves[place.row.flax]
            value = np.asarray(TRANSFORMS[place.row.how][0](source[name]), dtype=leaf.dtype, order="C")
            if place.layer is None:
                done[place.row.flax] = _put(value, leaf.sharding)
                continue
            if place.row.flax not in done:
                done[place.row.flax] = _empty(leaf.shape, leaf.dtype, leaf.sharding)
            piece = _put(value, _of_layer(leaf.sharding))
            done[place.row.flax] = _set_layer(done[place.row.flax], piece, place.layer)
    return unflatten_dict(done, sep="/")


def _put(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Each process hands over the parts that its devices hold."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _of_layer(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return sharding


def _empty(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()


@functools.partial(jax.jit, donate_argnums=0)
def _set_layer(stacked: jax.Array, piece: jax.Array, layer: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, piece, layer, 0)
