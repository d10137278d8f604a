"""Activations stay with their rows: weights are gathered to them, they are not summed over the chips."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import get_size
from pbs_jax.sharding import hlo
from pbs_jax.sharding.mesh import BATCH, make_mesh
from pbs_jax.sharding.rules import QFORMER_RULES, specs
from pbs_jax.sharding.topology import on

ROWS = 512  # activations then weigh far more than weights


def test_a_forward_pass_of_the_qformer_sums_no_activations() -> None:
    mesh = make_mesh(data=1, fsdp=8)
    graph, state = nnx.split(nnx.eval_shape(lambda: QFormer(get_size("nano").qformer, rngs=nnx.Rngs(0))))
    params = nnx.to_pure_dict(state)
    params = on(mesh, params, specs(params, QFORMER_RULES))
    tokens = on(mesh, jax.ShapeDtypeStruct((ROWS, 17, 192), jnp.float32), BATCH)
    forward = jax.jit(lambda params, tokens: nnx.merge(graph, params).encode(tokens))
    with jax.set_mesh(mesh):
        program = forward.lower(params, tokens).compile().as_text()
    moved = hlo.totals(program)["collectives"]
    assert moved.get("all-reduce", 0.0) + moved.get("reduce-scatter", 0.0) < 1e6 < moved["all-gather"]
