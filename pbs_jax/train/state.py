"""TrainState: what a step changes and a checkpoint holds. Frozen weights are never in it (DESIGN section 8)."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
import optax

Params = dict[str, Any]  # nested plain dicts of arrays; the first level names the tree ("qformer", "projector", ...)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: int32[] updates done; trainable: float32 parameters; opt_state: optax state of the trainable tree only."""

    step: jax.Array
    trainable: Params
    opt_state: optax.OptState


def path_name(path: tuple[Any, ...]) -> str:
    """ "qformer/layers/attention/kernel": the name that rules, handovers and error messages use."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Flat name -> leaf mapping of a parameter tree."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def tree_sha256(tree: Any) -> str:
    """Hash of names, shapes, dtypes and bytes of all leaves: the identity of a set of weights."""
    digest = hashlib.sha256()
    for name, leaf in sorted(leaves_by_name(tree).items()):
        array = np.asarray(leaf)
        digest.update(f"{name} {array.shape} {array.dtype}\n".encode())
        digest.update(
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        )  # without a copy: leaves may be large
    return digest.hexdigest()
