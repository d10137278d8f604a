"""The Perceiver resampler and the slide encoder's mask rule against the official PyTorch numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.models.perceiver import PerceiverConfig, PerceiverResampler, encode_slide
from pbs_jax.weights.convert import to_flax
from pbs_jax.weights.tables import perceiver_table
from tests.models.golden import Golden, abstract, close, grads_close, run, torch_grads


def build(golden: Golden, config: PerceiverConfig, prefix: str = "") -> tuple[nnx.GraphDef, Any, Any]:
    graph, state = abstract(lambda: PerceiverResampler(config, rngs=nnx.Rngs(0)))
    table = perceiver_table(prefix)
    return graph, to_flax(golden.w, table, state), table


def test_resampler(shared: Path) -> None:
    golden = Golden(shared, "perceiver_cell")
    graph, params, table = build(golden, PerceiverConfig(input_dim=40, dim=48, latents=8, heads=4))

    def loss(params: Any, x: jax.Array, x4d: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The golden loss of x, plus that of x4d as far as x4d itself is concerned."""
        model, fixed = nnx.merge(graph, params), nnx.merge(graph, jax.lax.stop_gradient(params))
        mask, mask4d = golden.inp["mask"], golden.inp["mask4d"]
        outputs = {
            "masked": model(x, mask),
            "nomask": fixed(x),
            "x4d_masked": fixed(x4d, mask4d),
            "x4d_nomask": fixed(x4d),
        }
        total = jnp.sum((outputs["masked"] + outputs["x4d_masked"]) * golden.inp["R"])
        return total, outputs

    grads, outputs = run(
        jax.grad(loss, argnums=(0, 1, 2), has_aux=True), params, jnp.asarray(golden.inp["x"]), golden.inp["x4d"]
    )
    for name, value in outputs.items():
        close(value, golden.out[name])
    weights, x, x4d = jax.tree.map(np.asarray, grads)
    grads_close(torch_grads(weights, table) | {"input_x": x, "input_x4d": x4d}, golden.grad)


def test_a_row_that_sees_nothing_gets_finite_content_free_latents(shared: Path) -> None:
    """torch's safe softmax: attention is exactly zero, so the input does not matter."""
    golden = Golden(shared, "perceiver_cell")
    graph, params, _ = build(golden, PerceiverConfig(input_dim=40, dim=48, latents=8, heads=4))
    run = jax.jit(lambda x: nnx.merge(graph, params)(x, jnp.zeros(x.shape[:2], bool)))
    x = jnp.asarray(golden.inp["x"])
    assert np.isfinite(run(x)).all()
    assert np.array_equal(run(x), run(100 * x))


def test_slide_encoder(shared: Path) -> None:
    golden = Golden(shared, "slide_encoder")
    graph, params, table = build(golden, PerceiverConfig(input_dim=40, dim=48, latents=8, heads=8), "resampler.")

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = encode_slide(nnx.merge(graph, params), x)
        return jnp.sum(out * golden.inp["R"]), out

    compute = jax.grad(loss, argnums=(0, 1), has_aux=True)
    (weights, x4d), out = run(compute, params, golden.inp["x4d"])
    close(out, golden.out["x4d"])
    (_, x3d), out = run(compute, params, golden.inp["x3d"])
    close(out, golden.out["x3d"])
    grads_close(torch_grads(weights, table) | {"input_x4d": np.asarray(x4d), "input_x3d": np.asarray(x3d)}, golden.grad)
    assert not np.asarray(x3d)[1, 7:].any()
