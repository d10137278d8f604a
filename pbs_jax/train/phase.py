"""What a phase is: its parameter trees, its loss, its examples. Each phase*.py builds one; the loop runs any of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from pbs_jax.train.state import Params
from pbs_jax.train.step import LossFn, WeightFn

Example = dict[str, np.ndarray]
Networks = dict[str, Callable[[nnx.Rngs], nnx.Module]]  # tree name -> what makes its module


@dataclasses.dataclass(frozen=True)
class Phase:
    """One training phase.

    trainable, frozen: tree name -> nested dict of parameters; `loss(trainable, frozen, batch, key)` returns the scalar
    to minimise and a flat dict of metrics (key None = evaluation: no dropout, no augmentation).
    examples: random access, fixed shapes, numbers only. `evaluate` returns the validation metrics of a parameter set.
    facts: what the next phase must know and check (sizes, dataset ids, geometry, colour, source hashes).
    rules: tree name -> partition rules of `pbs_jax.sharding.rules`.
    """

    name: str
    trainable: Params
    frozen: Params
    rules: dict[str, Any]
    loss: LossFn
    examples: Sequence[Example]
    evaluate: Callable[[Params, Params], dict[str, float]]
    facts: dict[str, Any]
    example_id: Callable[[int], str] = str  # what an example's index stands for, for messages
    weight: WeightFn | None = None  # of a batch; None: the loss is no weighted mean, and cannot be added up in parts
    loaded: tuple[str, ...] = ()  # trainable trees that started from another phase; the others are fresh


def parameters(make: Callable[[nnx.Rngs], nnx.Module], seed: int) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """A module's static definition and its freshly drawn parameters as a plain dict; drawn in one compiled call."""
    graph = definition(make)
    draw = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)))))
    return graph, draw(jax.random.key(seed))


def definition(make: Callable[[nnx.Rngs], nnx.Module]) -> nnx.GraphDef:
    """A module's static definition alone: nothing is allocated."""
    return nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


def batches(examples: Sequence[Example], size: int) -> list[tuple[Example, np.ndarray]]:
    """Evaluation batches in order, the last one padded by its first example; with each a bool[size] of what is real."""
    out = []
    for start in range(0, len(examples), size):
        rows = [examples[i] for i in range(start, min(start + size, len(examples)))]
        real = np.arange(size) < len(rows)
        rows += [rows[0]] * (size - len(rows))
        out.append(({name: np.stack([row[name] for row in rows]) for name in rows[0]}, real))
    return out
