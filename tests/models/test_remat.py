"""`config.remat`: the same gradient, from less memory and more work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.config import load
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.qformer_losses import phase1_losses
from pbs_jax.models.sizes import get_size, with_remat
from pbs_jax.perf.count import flops_and_saved_bytes
from pbs_jax.train.abstract import ROWS, abstract_phase
from pbs_jax.train.check import REMATS


def test_the_gradient_is_the_same_whatever_is_computed_again():
    draw = np.random.default_rng(0)
    visual = jnp.asarray(draw.standard_normal((3, 17, 192)), jnp.float32)
    ids = jnp.asarray(draw.integers(3, 90, (3, 12)), jnp.int32)

    def gradient(remat: str):
        config = with_remat(get_size("nano"), remat).qformer
        graph, state = nnx.split(QFormer(config, rngs=nnx.Rngs(0)))
        loss = lambda state: phase1_losses(nnx.merge(graph, state), visual, ids, jax.random.key(0))["loss"]  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss))(state))

    whole = gradient("none")
    for remat in ("dots", "full"):
        for mine, other in zip(gradient(remat), whole, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["phase1_cell_representation", "phase3_cell_qa"])
def test_less_is_kept_and_more_computed_from_none_to_full(name: str):
    """7B's own shapes, traced alone."""
    config = load(f"{name}:size=7b", ["--config.batch_size=1"])
    flops, saved = [], []
    for remat in REMATS:
        phase = abstract_phase(config, ROWS.get(config.phase), remat=remat)
        arguments = (phase.trainable, phase.frozen, phase.batch, jax.random.key(0))
        counted = flops_and_saved_bytes(jax.value_and_grad(phase.loss, has_aux=True), *arguments)
        flops.append(counted[0])
        saved.append(counted[1])
    assert flops[0] <= flops[1] < flops[2]
    assert saved[0] > saved[1] > saved[2] > 0
