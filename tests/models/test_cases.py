"""Faults of other people's ports and trainings (`reference/cases.md`, jobs 1 and 2), each with the test that plants it.

C01 position resize            test_vit_parity (official numbers), here (torch, from 37 x 37)
C02 LayerScale dropped         test_wrong_ports, test_layers; weights/test_import (three spellings, or refused)
C03 shape or naming            weights/test_import (trainer, chunked, wrapped, timm; 257 and 1,370 rows), test_source (nested)
C04 fused qkv                  test_vit_parity (3 heads of 16), test_wrong_ports (K and V swapped), weights/test_import
C05 grouped heads tiled        test_layers (4/2 and 28/4), test_wrong_ports
C08 tied or separate head      weights/test_import, test_hf_parity (logits), weights/test_export_verify (tied: one copy)
C11 default hyper-parameters   here (epsilon, GELU); test_densenet (7 x 7 convolution of stride 2), test_wrong_ports
C12 half precision             here; train/test_loop (a loss that is not finite names step and examples, nothing is saved)
C14 repeated captions          test_qformer_losses (the batch A A A B B C D E; a batch without negatives)
C15 masks of the three losses  test_qformer_masks
C17 truncation                 data_prep/test_tokens (reported by id, none is cut), here (nothing supervised), test_layers (slots)
C18 mean per token             train/test_answers, train/test_rows (any packing), train/test_loop (eight and four devices)
C19 batched decoding           decode/test_generate, decode/test_generate_parity, decode/test_answer
C20 positions of image slots   test_pbs_vl_parity, test_hf_parity, test_layers, weights/test_export_torch
C23 Q-Former initialisation    weights/test_import (copies, fresh parts, [DEC]), weights/test_export (crossing layers)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.densenet import DenseNetConfig
from pbs_jax.models.layers import LayerNorm, RMSNorm, gelu
from pbs_jax.models.perceiver import PerceiverConfig
from pbs_jax.models.qformer import VISION_EPS, QFormer, QFormerConfig
from pbs_jax.models.qformer_losses import phase1_losses
from pbs_jax.models.vit import ViTConfig, position_table
from pbs_jax.train.answers import answer_loss
from tests.models.golden import close, fresh, run


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_position_tables_resize_as_in_torch(antialias: bool, offset: float) -> None:
    """C01: from 518 pixels to smaller, larger and oblong grids; 39, 43, 78 and 86 are where a float factor lost a row."""
    import torch

    table = np.random.default_rng(0).standard_normal((1 + 37 * 37, 8)).astype(np.float32)
    config = ViTConfig.dinov2_l(position_grid=(37, 37), interpolate_offset=offset, antialias=antialias)
    square = torch.from_numpy(table[1:]).reshape(1, 37, 37, 8).permute(0, 3, 1, 2)
    for grid in ((16, 16), (36, 36), (16, 20), (73, 73), (39, 43), (78, 86)):
        size: dict[str, Any] = {"size": grid}
        if offset:
            size = {"scale_factor": tuple((n + offset) / 37 for n in grid)}
        theirs = torch.nn.functional.interpolate(square, mode="bicubic", antialias=antialias, **size)
        assert theirs.shape[2:] == grid
        close(position_table(jnp.asarray(table), config, grid)[1:], theirs[0].flatten(1).T.numpy(), 1e-5)


def test_epsilons_and_the_gelu_are_the_publishers() -> None:
    """C11: small inputs, where another epsilon shows, and the exact GELU between -4 and 4."""
    published = {
        "DINOv2": (ViTConfig.dinov2_l().eps, 1e-6),
        "Q-Former": (QFormerConfig.blip2().eps, 1e-12),
        "ln_vision": (VISION_EPS, 1e-5),
        "Perceiver": (PerceiverConfig.patch().eps, 1e-5),
        "Qwen2.5": (DecoderConfig.qwen2_5_7b().rms_eps, 1e-6),
        "SmolLM2": (DecoderConfig.smollm2_135m().rms_eps, 1e-5),
        "DenseNet121 of Keras": (DenseNetConfig(hidden=1).eps, 1.001e-5),
    }
    assert {name: eps for name, (eps, _) in published.items()} == {name: eps for name, (_, eps) in published.items()}
    x = 1e-3 * np.random.default_rng(0).standard_normal((5, 32))
    for eps in (1e-6, 1e-5):
        layer = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        root = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
        close(LayerNorm(32, eps)(jnp.asarray(x, jnp.float32)), layer.astype(np.float32), 1e-5)
        close(RMSNorm(32, eps)(jnp.asarray(x, jnp.float32)), root.astype(np.float32), 1e-5)
    z = np.linspace(-4, 4, 801, dtype=np.float32)
    exact = z * (1 + erf(z / np.sqrt(2.0))) / 2
    assert np.abs(np.asarray(gelu(jnp.asarray(z))) - exact).max() < 1e-6
    assert np.abs(np.asarray(jax.nn.gelu(jnp.asarray(z))) - exact).max() > 4e-4  # jax's default is the tanh form


SMALL = QFormerConfig.nano(
    dim=32, layers=2, heads=2, ffn_dim=48, encoder_width=24, queries=4, vocab=50, pad_id=0, cls_id=1, dec_id=3
)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.07, 0.0, -1.0])
def test_phase_1_in_bfloat16_stays_finite(temperature: float) -> None:
    """C12: features of 1e4, and a temperature that has run away: losses in float32, gradients finite."""
    graph, params = nnx.split(fresh(lambda: QFormer(dataclasses.replace(SMALL, dtype="bfloat16"), rngs=nnx.Rngs(0))))
    tree = nnx.to_pure_dict(params) | {"temperature": jnp.asarray(temperature)}
    visual = 1e4 * jax.random.normal(jax.random.key(0), (4, 9, 24))
    ids = jnp.arange(4, 28, dtype=jnp.int32).reshape(4, 6).at[:, 0].set(1)

    def loss(tree: Any, visual: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        found = phase1_losses(nnx.merge(graph, tree), visual, ids, jax.random.key(1))
        return found["loss"], found

    grads, found = run(jax.grad(loss, has_aux=True), tree, visual)
    assert {value.dtype for value in found.values()} == {jnp.dtype("float32")}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((grads, found)))


@pytest.mark.slow
def test_a_batch_without_supervised_tokens_has_no_loss_and_no_gradient() -> None:
    """C17: zero, not NaN."""
    config = DecoderConfig.nano(vocab=64, dim=32, heads=4, head_dim=8, ffn_dim=48, mrope_section=(2, 1, 1), layers=1)
    decoder = fresh(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12)
    count = jnp.broadcast_to(jnp.arange(12), (2, 3, 12))
    batch = {"tokens": tokens, "targets": tokens, "segments": jnp.zeros_like(tokens), "positions": count}
    batch |= {"answers": jnp.full((2, 5), -1), "shares": jnp.ones((2, 5)), "firsts": jnp.zeros((2, 5), bool)}

    def loss(visual: jax.Array) -> jax.Array:
        return answer_loss(decoder, batch, visual, 3, "token")[0]

    value, grads = run(jax.value_and_grad(loss), jnp.ones((2, 1, 32)))
    assert float(value) == 0.0 and not np.asarray(grads).any()
