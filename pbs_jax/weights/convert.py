"""Applies the tables of `weights.tables`: torch tensors -> flax parameters and back, with nothing lost or invented.

Every source is consumed once and every target filled once; anything else is a DataError that names what is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
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
    "conv": (lambda a: a.transpose(2, 3, 1, 0), lambda a: a.transpose(3, 2, 0, 1)),  # OIHW <-> HWIO
    "conv3": (_flatten_conv, lambda a: _unflatten_conv(a, 3)),  # 3x3 kernel, any channels
}


@dataclasses.dataclass(frozen=True)
class Target:
    """Where a torch tensor goes: flax leaf `row.flax`, its layer (None: the whole leaf), a part of its last axis or all."""

    row: Row
    layer: int | None

    def cut(self, leaf: Any) -> tuple[Any, ...]:
        """The index into the leaf that the tensor fills."""
        index: tuple[Any, ...] = () if self.layer is None else (self.layer,)
        if self.row.part is None:
            return index
        i, n = self.row.part
        width = leaf.shape[-1] // n
        return (*index, ..., slice(i * width, (i + 1) * width))


def plan(shapes: Mapping[str, tuple[int, ...]], table: Table, module_state: Any) -> dict[str, list[Target]]:
    """torch name -> the places it fills, everything checked by names and shapes before anything is read.

    Raises DataError for a tensor without row, a parameter without tensor, a shape that differs.
    """
    targets = _flat(module_state)
    check_rows(table, targets)
    unused = set(shapes)
    places: dict[str, list[Target]] = {}
    for row in table.rows:
        leaf = targets[row.flax]
        for k, name in enumerate(_torch_names(row, leaf)):
            unused.discard(name)
            if row.export_only:
                continue
            if name not in shapes:
                raise DataError(
                    f"parameter {row.flax} {tuple(leaf.shape)} needs tensor {name}, which the file lacks"
                    f"{_nearest(name, shapes)}."
                )
            target = Target(row, k if "{}" in row.torch else None)
            want = np.broadcast_to(False, leaf.shape)[target.cut(leaf)].shape
            try:
                have = TRANSFORMS[row.how][0](np.broadcast_to(False, shapes[name])).shape
            except (ValueError, IndexError):  # of another rank than the transform is for
                have = shapes[name]
            if have != want:
                stacked = (leaf.shape[0], *have) if target.layer is not None and row.part is None else have
                raise DataError(
                    f"tensor {name} {tuple(shapes[name])} gives {row.flax} the shape {stacked}, but the "
                    f"model has {tuple(leaf.shape)}; check the size and configuration."
                )
            places.setdefault(name, []).append(target)
    unused = {name for name in unused if not any(re.fullmatch(pattern, name) for pattern in table.ignored)}
    if unused:
        name = min(unused)
        known = [name for row in table.rows for name in _torch_names(row, targets[row.flax])]
        raise DataError(
            f"{len(unused)} tensors have no place in the model, first {name} {tuple(shapes[name])}"
            f"{_nearest(name, known)}."
        )
    return places


def to_flax(torch_tensors: Mapping[str, Array], table: Table, module_state: Any) -> dict[str, Any]:
    """Nested dict of arrays shaped and typed like `module_state` (nnx state or nested dict, real or abstract).

    Leaves that `table.fresh` names keep their value, so there `module_state` must be real. Raises DataError as `plan`.
    """
    targets = _flat(module_state)
    shapes = getattr(torch_tensors, "shapes", None) or {name: np.shape(value) for name, value in torch_tensors.items()}
    rows = {row.flax for row in table.rows}
    filled = {
        name: np.empty(leaf.shape, leaf.dtype) if name in rows else np.array(leaf) for name, leaf in targets.items()
    }
    for name, places in plan(shapes, table, module_state).items():
        for target in places:
            leaf = filled[target.row.flax]
            leaf[target.cut(leaf)] = TRANSFORMS[target.row.how][0](torch_tensors[name])
    return unflatten_dict(filled, sep="/")


def to_torch(flax_state: Any, table: Table) -> dict[str, Array]:
    """torch name -> contiguous array, layers unstacked, dtype kept. Raises DataError for a parameter without row."""
    sources, tensors = _flat(flax_state), {}
    check_rows(table, sources)
    for row in table.rows:
        if row.import_only:
            continue
        value = np.asarray(sources[row.flax])
        for k, name in enumerate(_torch_names(row, value)):
            piece = value[Target(row, k if "{}" in row.torch else None).cut(value)]
            tensors[name] = np.asarray(TRANSFORMS[row.how][1](piece), order="C")
    return tensors


def check_rows(table: Table, leaves: Mapping[str, Any]) -> None:
    """Each leaf has exactly one row (or all the parts of one), or is fresh; each row has a leaf. Raises DataError."""
    rows: dict[str, Fraction] = {}
    for row in table.rows:
        if not row.export_only:
            rows[row.flax] = rows.get(row.flax, Fraction(0)) + Fraction(1, row.part[1] if row.part else 1)
    for name in leaves:
        fresh = any(re.fullmatch(pattern, name) for pattern in table.fresh)
        if rows.get(name, 0) != (0 if fresh else 1):
            raise DataError(
                f"parameter {name} {tuple(leaves[name].shape)} has {rows.get(name, 0)} rows in the table"
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
