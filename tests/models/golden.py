"""Reading the golden tensors of the official PyTorch code, and the comparison their README advises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.tables import Table


class Golden:
    """One golden file: `w` weights, `inp` inputs, `out` outputs, `grad` gradients, each without its key prefix."""

    def __init__(self, shared: Path, name: str) -> None:
        tensors = load_file(shared / "data" / "goldens" / f"{name}.safetensors")
        self.w, self.inp, self.out, self.grad = (
            {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            for prefix in ("w.", "in.", "out.", "grad.")
        )


def cases(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "data" / "goldens" / "cases.json").read_text())


def abstract(make: Callable[[], nnx.Module]) -> tuple[nnx.GraphDef, Any]:
    """A module's definition and parameter shapes, without computing an initialisation."""
    return nnx.split(nnx.eval_shape(make))


def fresh(make: Callable[[], nnx.Module]) -> nnx.Module:
    """A newly initialised module; as one program, which takes a quarter of the time that `make()` does."""
    graph, _ = abstract(make)
    return nnx.merge(graph, run(lambda: nnx.state(make())))


def compiled(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The function as one program for arguments like these, hardly optimised: tests spend their time on compiling."""
    return jax.jit(function).lower(*args).compile({"xla_backend_optimization_level": 0})


def run(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value on these arguments, computed by `compiled`."""
    return compiled(function, *args)(*args)


def close(actual: Any, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    """max|difference| within `tolerance` of the reference's max|value|."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    error, scale = np.abs(actual - expected).max(), np.abs(expected).max()
    assert error <= tolerance * scale, f"off by {error:.2e} on a scale of {scale:.2e}"


def grads_close(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Gradients by torch name, on the README's tolerance; analytically zero ones fall under its absolute part."""
    missing = sorted(set(actual) - set(expected))
    assert not missing, f"no golden gradient for {missing}"
    for name, value in actual.items():
        assert value.shape == expected[name].shape
        error = np.abs(value - expected[name]).max()
        assert error <= 1e-4 * np.abs(expected[name]).max() + 5e-6, f"{name} is off by {error:.2e}"


def tree_close(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = 1e-4) -> None:
    """Gradients of one loss: max|difference| within `tolerance` of the largest entry of the whole tree."""
    assert actual.keys() <= expected.keys(), f"no gradient for {sorted(actual.keys() - expected.keys())}"
    scale = max(float(np.abs(expected[name]).max()) for name in actual)
    errors = {name: float(np.abs(value - expected[name]).max()) for name, value in actual.items()}
    worst = max(errors, key=errors.__getitem__)
    print(f"{len(errors)} gradients: {worst} is off by {errors[worst] / scale:.1e} of the largest, {scale:.3g}")
    assert scale > 1e-3 and errors[worst] <= tolerance * scale, f"{worst} is off by {errors[worst] / scale:.2e}"


def torch_grads(grads: Any, table: Table) -> dict[str, np.ndarray]:
    """Gradients under their torch names, without the tensors that no pass reads."""
    exported = {row.torch for row in table.rows if row.export_only}
    return {name: value for name, value in to_torch(grads, table).items() if name not in exported}
