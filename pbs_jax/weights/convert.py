"""Applies the tables of `weights.tables`: torch tensors -> flax parameters and back, with nothing lost or invented.

Every source is consumed once and every target filled once; anything else is a DataError that names what is wrong.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from data_prep.schema import DataError
from pbs_jax.weights.tables import Row, Table

Array = np.ndarray


def _flatten_conv(kernel: Array) -> Array:
    """OIHW -> (H*W*I, O), the matrix that the patches' pixels are multiplied with."""
    return kernel.transpose(2, 3, 1, 0).reshape(-1, kernel.shape[0])


def _unflatten_conv(matrix: Array, side: int) -> Array:
    return matrix.reshape(side, side, -1, matrix.shape[1]).transpose(3, 2, 0, 1)


# name -> (torch to flax, flax to torch), on one layer's array
TRANSFORMS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "same": (lambda a: a, lambda a: a),
    "linear": (lambda a: a.T, lambda a: a.T),  # (out, in) <-> (in, out)
    "row": (lambda a: a[0], lambda a: a[None]),
    "two_rows": (lambda a: a[0, 0], lambda a: a[None, None]),
    "zero_row": (lambda a: a[0], lambda a: np.zeros_like(a)[None]),
    "patch": (_flatten_conv, lambda a: _unflatten_conv(a, math.isqrt(a.shape[0] // 3))),  # any kernel, 3 input channels
    "conv3": (_flatten_conv, lambda a: _unflatten_conv(a, 3)),  # 3x3 kernel, any channels
}


def to_flax(torch_tensors: Mapping[str, Array], table: Table, module_state: Any) -> dict[str, Any]:
    """Nested dict of arrays shaped and typed like `module_state` (nnx state or nested dict, real or abstract).

    Raises DataError for a tensor without row, a parameter without tensor, a shape that differs.
    """
    targets = _flat(module_state)
    _check_rows(table, targets)
    unused, filled = set(torch_tensors), {}
    for row in table.rows:
        names = _torch_names(row, targets[row.flax])
        unused.difference_update(names)
        if row.export_only:
            continue
        missing = [name for name in names if name not in torch_tensors]
        if missing:
            raise DataError(
                f"parameter {row.flax} {tuple(targets[row.flax].shape)} needs tensor {missing[0]}, which the file lacks"
                f"{_nearest(missing[0], torch_tensors)}."
            )
        layers = [TRANSFORMS[row.how][0](np.asarray(torch_tensors[name])) for name in names]
        value = np.stack(layers) if "{}" in row.torch else layers[0]
        if value.shape != tuple(targets[row.flax].shape):
            raise DataError(
                f"tensor {names[0]} {torch_tensors[names[0]].shape} gives {row.flax} the shape {value.shape}, but the "
                f"model has {tuple(targets[row.flax].shape)}; check the size and configuration."
            )
        filled[row.flax] = np.asarray(value, dtype=targets[row.flax].dtype, order="C")
    unused = {name for name in unused if not any(re.fullmatch(pattern, name) for pattern in table.ignored)}
    if unused:
        name = min(unused)
        known = [name for row in table.rows for name in _torch_names(row, targets[row.flax])]
        raise DataError(
            f"{len(unused)} tensors have no place in the model, first {name} {torch_tensors[name].shape}"
            f"{_nearest(name, known)}."
        )
    return unflatten_dict(filled, sep="/")


def to_torch(flax_state: Any, table: Table) -> dict[str, Array]:
    """torch name -> contiguous array, layers unstacked, dtype kept. Raises DataError for a parameter without row."""
    sources, tensors = _flat(flax_state), {}
    _check_rows(table, sources)
    for row in table.rows:
        value = np.asarray(sources[row.flax])
        for k, name in enumerate(_torch_names(row, value)):
            tensors[name] = np.asarray(TRANSFORMS[row.how][1](value[k] if "{}" in row.torch else value), order="C")
    return tensors


def _check_rows(table: Table, leaves: Mapping[str, Any]) -> None:
    """Each leaf has exactly one row, each row a leaf."""
    rows = [row.flax for row in table.rows if not row.export_only]
    for name in leaves:
        if rows.count(name) != 1:
            raise DataError(
                f"parameter {name} {tuple(leaves[name].shape)} has {rows.count(name)} rows in the table"
                f"{_nearest(name, rows)}."
            )
    for name in rows:
        if name not in leaves:
            raise DataError(f"the table names parameter {name}, which the model lacks{_nearest(name, leaves)}.")


def _torch_names(row: Row, leaf: Any) -> list[str]:
    return [row.torch.format(k * row.every) for k in range(leaf.shape[0] if "{}" in row.torch else 1)]


def _nearest(name: str, candidates: Any) -> str:
    near = difflib.get_close_matches(name, list(candidates), n=3, cutoff=0.6)
    return f"; nearest are {', '.join(near)}" if near else ""


def _flat(state: Any) -> dict[str, Any]:
    return flatten_dict(nnx.to_pure_dict(state) if isinstance(state, nnx.State) else state, sep="/")
