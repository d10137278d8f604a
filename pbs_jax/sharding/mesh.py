"""The device mesh and how batches and parameters are laid out on it (DESIGN section 8).

Axes are always ("data", "fsdp", "tensor"): batches are split over data x fsdp, parameters over fsdp and tensor by the
partition rules of `pbs_jax.sharding.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from data_prep.schema import DataError

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh over all devices (or the given ones); one of the three sizes may be -1 (what is left). Raises DataError when they do not fit."""
    devices = list(devices or jax.devices())
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1:
        raise DataError(f"mesh {dict(zip(AXES, sizes, strict=True))}: only one axis may be -1")
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = max(len(devices) // known, 1)
    if math.prod(sizes) != len(devices):
        raise DataError(
            f"mesh {dict(zip(AXES, sizes, strict=True))} needs {math.prod(sizes)} devices but {len(devices)} are visible: "
            "set config.mesh so that the product matches"
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def answering_mesh(kv_heads: int, devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """Over this process's accelerators (or the given devices): as many share a layer as there are key and value heads to
    split, the rest answer other rows, so that no weight moves while tokens are written. None for one device, and on a
    CPU, whose devices share its cores."""
    if devices is None:
        devices = jax.local_devices()
        devices = devices if devices[0].platform != "cpu" else devices[:1]
    return make_mesh(tensor=math.gcd(len(devices), kv_heads), devices=devices) if len(devices) > 1 else None


def within(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """`jax.set_mesh`, or nothing without a mesh."""
    return jax.set_mesh(mesh) if mesh else nullcontext()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over data x fsdp, the rest replicated."""
    return NamedSharding(mesh, BATCH)


def put_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """This process's rows -> global arrays sharded over data x fsdp."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, value) for name, value in batch.items()}


def fetch(x: jax.Array) -> np.ndarray:
    """The whole of an array that several hosts may share, on each of them."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Puts every leaf on the mesh by its PartitionSpec; axes that a shape cannot be divided by stay replicated."""
    return jax.tree.map(lambda leaf, spec: _put(leaf, NamedSharding(mesh, fit(leaf.shape, spec, mesh))), tree, specs)


def _put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    if jax.process_count() > 1 and leaf.is_fully_addressable:
        # Committed to a device of this host, which cannot send it to others: each host lays out its own copy's parts.
        copy = np.asarray(leaf)
        return jax.make_array_from_callback(copy.shape, sharding, copy.__getitem__)
    return jax.device_put(leaf, sharding)


def constrain(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside a jitted function, pins an activation's layout on the mesh that `jax.set_mesh` set; without one, nothing.

    Weights are then gathered where they are used; left alone, the compiler may move activations instead.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit(x.shape, spec, mesh))


def fit(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """`spec` with the entries dropped whose axis size does not divide the dimension (small models on large meshes)."""
    kept = []
    for size, entry in zip(shape, tuple(spec) + (None,) * (len(shape) - len(spec)), strict=True):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        parts = math.prod(mesh.shape[name] for name in names)
        kept.append(entry if names and size % parts == 0 else None)
    return PartitionSpec(*kept)
