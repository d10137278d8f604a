"""FLOPs of a function as written, scans multiplied out, from its jaxpr: nothing is compiled or allocated.

Counted are matrix products and convolutions (2 per multiply-add), as MFU and scaling papers do; element-wise work is not.
XLA's own cost analysis counts the body of a scan once, whatever its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def count_flops(function: Callable[..., Any], *args: Any) -> float:
    """FLOPs of `function(*args)`; the arguments may be ShapeDtypeStructs."""
    return _jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr)


def flops_and_saved_bytes(function: Callable[..., Any], *args: Any) -> tuple[float, float]:
    """`count_flops`, and the bytes that the forward scans of a gradient keep for its backward scans: their stacked outputs."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return _jaxpr_flops(jaxpr), _saved(jaxpr)


def _jaxpr_flops(jaxpr: Jaxpr) -> float:
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: Any) -> float:
    params, name = equation.params, equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[outputs]
    inner = [_jaxpr_flops(jaxpr) for jaxpr in _inner(params)]
    if name == "scan":
        return params["length"] * sum(inner)
    return max(inner, default=0.0) if name == "cond" else sum(inner)


def _inner(params: dict[str, Any]) -> list[Jaxpr]:
    found: list[Jaxpr] = []
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _saved(jaxpr: Jaxpr) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body = _inner(equation.params)[0]
            pairs = zip(equation.outvars, body.outvars, strict=True)
            stacked = [out.aval for out, one in pairs if out.aval.shape != one.aval.shape]
            if not equation.params["reverse"]:
                total += sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in stacked)
        else:
            total += sum(_saved(inner) for inner in _inner(equation.params))
    return total
