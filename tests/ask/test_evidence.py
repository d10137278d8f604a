"""Evidence: attention is the model's own (its outputs are reproduced on the way), sums to one, and follows the input."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.ask.evidence import perceiver_attention, qformer_attention
from pbs_jax.data.augment import normalise
from pbs_jax.models.perceiver import PerceiverConfig, PerceiverResampler
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.vit import ViT, ViTConfig
from tests.models.golden import fresh, run


def test_the_perceivers_attention_ignores_padding_and_finds_the_odd_patch():
    model = fresh(lambda: PerceiverResampler(PerceiverConfig(8, dim=16, latents=4, heads=2), rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    params = jax.tree.map(lambda leaf: 8 * leaf if leaf.ndim > 2 else leaf, nnx.to_pure_dict(state))
    x = jnp.zeros((1, 6, 8)).at[0, 2].set(jax.random.normal(jax.random.key(1), (8,)))
    mask = jnp.asarray([[True] * 5 + [False]])
    weights = np.asarray(run(lambda p, x, mask: perceiver_attention(graph, p, x, mask), params, x, mask))[0]
    assert weights[5] == 0 and np.isclose(weights.sum(), 1)
    alike = weights[[0, 1, 3, 4]]
    np.testing.assert_allclose(alike, alike[0], rtol=1e-5)
    assert abs(weights[2] - alike[0]) > 1e-3


@pytest.mark.slow
def test_the_qformers_attention_comes_from_its_own_pass():
    small = ViTConfig(image_size=28, patch_size=14, dim=16, depth=1, heads=2, mlp_dim=16)
    vit = fresh(lambda: ViT(small, rngs=nnx.Rngs(0)))
    shape = QFormerConfig.nano(
        dim=16, layers=4, heads=2, ffn_dim=16, encoder_width=16, vocab=8, queries=3, pad_id=0, cls_id=1, dec_id=2
    )
    qformer = fresh(lambda: QFormer(shape, rngs=nnx.Rngs(1)))
    graphs, states = zip(*(nnx.split(m) for m in (vit, qformer)), strict=True)
    pixels = jax.random.randint(jax.random.key(0), (2, 28, 28, 3), 0, 255).astype(jnp.uint8)

    def both(params, pixels):
        own = qformer_attention(graphs, params, pixels)
        vit, qformer = (nnx.merge(graph, tree) for graph, tree in zip(graphs, params, strict=True))
        return *own, qformer.encode(vit(normalise(pixels))["x_prenorm"].astype(jnp.bfloat16).astype(jnp.float32))

    weights, queries, expected = run(both, tuple(map(nnx.to_pure_dict, states)), pixels)
    np.testing.assert_allclose(queries, expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, atol=1e-5)
