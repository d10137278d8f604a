"""TPU slices as libtpu describes them, without a TPU: chips, meshes, and the published peaks that a roofline needs."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from data_prep.schema import DataError
from pbs_jax.sharding.mesh import AXES, fit

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip kind: dense bfloat16 peak (FLOP/s), memory (bytes) and its bandwidth, all its links together (bytes/s).

    Google Cloud's system-architecture pages. `usable` is what libtpu lets a program have of the memory.
    """

    flops: float
    memory: float
    bandwidth: float
    links: float
    reserved: float = 0.25 * GIB

    @property
    def usable(self) -> float:
        return self.memory - self.reserved


CHIPS = {
    "v5e": Chip(flops=197e12, memory=16 * GIB, bandwidth=819e9, links=200e9),
    "v6e": Chip(flops=918e12, memory=32 * GIB, bandwidth=1640e9, links=448e9),
    "v5p": Chip(flops=459e12, memory=95 * GIB, bandwidth=2765e9, links=600e9),
}
# Smallest first: what `--smallest` tries. Chips of a slice are its sizes' product.
SLICES = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v6e:1x1", "v6e:2x2", "v6e:2x4", "v5p:2x2x1", "v5e:4x4", "v6e:4x4")


def chip_of(topology: str) -> Chip:
    """ "v5e:2x4" -> the v5e. Raises DataError for a kind that has no peaks here."""
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise DataError(f'--topology="{topology}": chip "{kind}" is unknown, use {", ".join(CHIPS)}, as in v5e:2x4')
    return CHIPS[kind]


@functools.cache
def slice_devices(topology: str) -> tuple[Any, ...]:
    """libtpu's description of the slice's chips. Raises DataError without libtpu, or for a slice that does not exist."""
    chip_of(topology)
    # One process at a time may hold libtpu; compiling needs no chip, so the lock and the look for one are off.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    one_chip = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    try:
        return tuple(topologies.get_topology_desc(topology, platform="tpu", **one_chip).devices)
    except Exception as error:  # jax and libtpu raise RuntimeError, ValueError and their own kinds
        if "libtpu" in str(error) and "not" in str(error).lower():
            raise DataError('the TPU compiler is missing: pip install "pbs-jax[aot]"') from error
        raise DataError(
            f'--topology="{topology}": the TPU compiler refuses it ({str(error).splitlines()[0]})'
        ) from error


def slice_mesh(topology: str, tensor: int = 1, data: int = 1) -> Mesh:
    """The slice as a ("data", "fsdp", "tensor") mesh, fsdp taking what data and tensor leave.

    Raises DataError when they do not divide it.
    """
    devices = slice_devices(topology)
    if len(devices) % (data * tensor):
        raise DataError(f"{topology} has {len(devices)} chips: data={data} x tensor={tensor} does not divide them")
    shape = (data, len(devices) // (data * tensor), tensor)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


def on(mesh: Mesh, tree: Any, specs: Any) -> Any:
    """ShapeDtypeStructs of `tree` laid out by PartitionSpecs (one for all, or a tree of them) that fit each shape."""
    if isinstance(specs, jax.sharding.PartitionSpec):
        specs = jax.tree.map(lambda _: specs, tree)
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, fit(leaf.shape, spec, mesh))
        ),
        tree,
        specs,
    )


def bytes_per_chip(tree: Any) -> int:
    """Bytes of one chip's share of laid-out ShapeDtypeStructs (or arrays)."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
