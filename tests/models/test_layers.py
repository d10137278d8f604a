"""Pieces whose wrong versions look plausible: grouped heads, dropout, cached decoding, LayerScale, image slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_prep.schema import DataError
from pbs_jax.models.decoder import Decoder, DecoderConfig, KVCache, init_cache
from pbs_jax.models.layers import attention, causal_attention, cudnn_attention, dropout, one_query_attention
from pbs_jax.models.pbs_vl import check_slots, insert_visual, rope_positions
from pbs_jax.models.sizes import get_size
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.train.answers import branch_mask, with_attention
from tests.models.golden import compiled, fresh, run

PAD = 9


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (28, 4), (6, 6)])
def test_query_head_reads_its_own_group(heads: int, kv_heads: int) -> None:
    """Head h reads key/value head h // (H/K): repeat, not tile (transformers issue 26943)."""
    q = jax.random.normal(jax.random.key(0), (1, 3, heads, 4))
    k = jax.random.normal(jax.random.key(1), (1, 5, kv_heads, 4))
    v = jnp.broadcast_to(jnp.arange(kv_heads, dtype=jnp.float32)[:, None], (1, 5, kv_heads, 4))
    out = attention(q, k, v)[0, 0, :, 0]
    np.testing.assert_allclose(out, np.arange(heads) // (heads // kv_heads), rtol=1e-6)


def test_cudnn_is_asked_for_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: JAX's own form of the same call, with packed rows' mask, in the kernel's place."""
    fused = jax.nn.dot_product_attention

    def here(*args, implementation: str, **kwargs):
        assert implementation == "cudnn"
        return fused(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", here)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 40, heads, 8)) for i, heads in enumerate((6, 2, 2)))
    segments = jnp.asarray([[0] * 16 + [1] * 12 + [2] * 8 + [-1] * 4] * 2)
    mask = branch_mask(segments)
    np.testing.assert_allclose(cudnn_attention(q, k, v, mask), causal_attention(q, k, v, mask), atol=1e-5)


def test_cudnn_attention_is_refused_without_a_gpu() -> None:
    with pytest.raises(DataError, match="for bfloat16 on an NVIDIA GPU, here is bfloat16 on cpu"):
        with_attention(get_size("7b"), "cudnn")


def test_attention_masks_and_blind_rows() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 2, 4)) for i in range(3))
    mask = jnp.array([[[True, False], [False, False]]])
    out = attention(q, k, v, mask)
    np.testing.assert_allclose(out[0, 0], v[0, 0], rtol=1e-6)
    assert not out[0, 1].any()
    grads = jax.grad(lambda q: attention(q, k, v, mask).sum())(q)
    assert np.isfinite(grads).all()


def test_dropout_keeps_the_mean_and_the_rate() -> None:
    dropped = dropout(jnp.ones((200, 333)), 0.1, jax.random.key(0))
    assert abs(float((dropped == 0).mean()) - 26 / 256) < 5e-3
    assert abs(float(dropped.mean()) - 1.0) < 5e-3
    assert np.array_equal(dropout(jnp.ones(7), 0.1, None), np.ones(7))


def test_cached_decoding_equals_one_pass() -> None:
    config = DecoderConfig.nano(vocab=64, dim=32, heads=4, head_dim=16, ffn_dim=48, mrope_section=(2, 3, 3))
    decoder = fresh(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    ids = jax.random.randint(jax.random.key(1), (2, 7), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(7), (3, 2, 7))
    causal = jnp.tril(jnp.ones((7, 7), bool))[None]

    def three_ways(decoder: Decoder, embeds: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def step(cache: KVCache, i: jax.Array) -> tuple[KVCache, jax.Array]:
            now, mask = jnp.full((3, 2, 1), i), (jnp.arange(9) <= i)[None, None]
            hidden, cache = decoder(jax.lax.dynamic_slice_in_dim(embeds, i, 1, axis=1), now, mask, cache, i)
            return cache, hidden[:, 0]

        _, cached = jax.lax.scan(step, init_cache(config, 2, 9), jnp.arange(7))
        whole, plain = (decoder(embeds, p, causal)[0] for p in (positions, positions[0]))
        return whole, cached.swapaxes(0, 1), plain

    whole, cached, plain = run(three_ways, decoder, decoder.embed(ids))
    np.testing.assert_allclose(cached, whole, atol=1e-5)
    np.testing.assert_allclose(plain, whole, atol=1e-5)  # equal axes: M-RoPE is RoPE


def test_layer_scale_of_zero_silences_a_block() -> None:
    config = ViTConfig.nano(image_size=32, dim=32, heads=2, mlp_dim=48, depth=2)
    vit = fresh(lambda: ViT(config, rngs=nnx.Rngs(0)))
    images = jax.random.normal(jax.random.key(0), (1, 32, 32, 3))
    tokens = compiled(lambda vit, images: (vit(images)["x_prenorm"][:, 1:], vit.stem(images)), vit, images)
    loud, _ = tokens(vit, images)
    vit.blocks.ls1[...], vit.blocks.ls2[...] = jnp.zeros((2, 32)), jnp.zeros((2, 32))
    silent, embedded = tokens(vit, images)
    np.testing.assert_allclose(silent, embedded.reshape(1, 4, 32) + vit.positions[1:], atol=1e-6)
    assert not np.allclose(loud, silent)
    with pytest.raises(ValueError, match="multiples of patch_size=16"):
        vit(images[:, :30])


def test_visual_tokens_go_into_their_slots_in_order() -> None:
    tokens = jnp.array([[1, PAD, PAD, 2], [PAD, 3, PAD, 4], [5, 6, 7, 8]])
    embeds = jnp.zeros((3, 4, 1))
    visual = jnp.array([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])
    out = insert_visual(embeds, tokens, visual, PAD)[..., 0]
    assert np.array_equal(out, [[0, 1, 2, 0], [3, 0, 4, 0], [0, 0, 0, 0]])
    check_slots(np.asarray(tokens), 2, PAD)
    with pytest.raises(DataError, match="row 0 has 2 image_pad tokens but the model gives 32"):
        check_slots(np.asarray(tokens), 32, PAD)


@pytest.mark.torch
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("images", [0, 1, 2])
def test_rope_positions_equal_hugging_face(images: int, side: str) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    start, end, pad, strip = 7, 8, 0, 5
    one = [start, *[PAD] * strip, end]
    rows = [[1, 2, *one * images, 3, 4, 5], [1, *one * images, 3]]
    length = max(map(len, rows))
    gaps = [length - len(row) for row in rows]
    ids = np.array([r + [pad] * g if side == "right" else [pad] * g + r for r, g in zip(rows, gaps, strict=True)])
    mask = (ids != pad).astype(int)
    config = Qwen2_5_VLConfig(image_token_id=PAD, vision_start_token_id=start, video_token_id=6)
    config.vision_config.spatial_merge_size = 1
    holder = type(
        "Holder", (), {"config": config, "get_vision_position_ids": Qwen2_5_VLModel.get_vision_position_ids}
    )()
    grid = torch.tensor([[1, 1, strip]] * (2 * images)) if images else None
    expected, _ = Qwen2_5_VLModel.get_rope_index(
        holder,
        torch.tensor(ids),
        mm_token_type_ids=torch.tensor(ids == PAD).int(),
        image_grid_thw=grid,
        attention_mask=torch.tensor(mask),
    )
    # Transformers 5 leaves 0 at padding, 4.53 (the official code's) wrote 1: nothing reads them.
    real = mask.astype(bool)
    assert np.array_equal(rope_positions(ids, mask, PAD)[:, real], expected.numpy()[:, real])


def test_one_querys_attention_is_attention() -> None:
    q, k, v = (
        jax.random.normal(jax.random.key(n), (2, length, heads, 8))
        for n, length, heads in ((0, 1, 6), (1, 9, 2), (2, 9, 2))
    )
    mask = jnp.arange(9) < jnp.asarray([[[4]], [[9]]])
    np.testing.assert_allclose(one_query_attention(q, k, v, mask), attention(q, k, v, mask), atol=1e-6)
