"""Causal decoder of the Llama / Qwen2.5 family: RMSNorm, RoPE or M-RoPE, grouped-query attention, SwiGLU.

One network serves Qwen2.5-VL's language model, SmolLM2 and the nano one; only `DecoderConfig` differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.models.layers import (
    BlockMask,
    Linear,
    RMSNorm,
    attention,
    block_attention,
    causal_attention,
    cudnn_attention,
    merge_heads,
    one_query_attention,
    scan_layers,
    split_heads,
    stack,
)
from pbs_jax.sharding.mesh import BATCH, constrain

KVCache = dict[str, Any]  # k, v: [layers, B, S, K, hd], or a tuple of the layers' [B, S, K, hd]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of the decoder. `mrope_section` splits the hd/2 rotary frequencies between the t, h and w positions of
    Qwen2.5-VL (arXiv 2502.13923); None is plain RoPE."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int] | None = None
    rms_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = True
    dtype: str = "float32"
    remat: str = ""
    attention: str = ""  # of training, or "cudnn"
    int8: bool = False  # frozen kernels as int8 with a scale an output channel

    @classmethod
    def qwen2_5_7b(cls, **changes: Any) -> DecoderConfig:
        """Qwen2.5-VL-7B-Instruct's language model."""
        shape = {"vocab": 152064, "dim": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "head_dim": 128}
        return cls(**{**shape, "ffn_dim": 18944, "rope_theta": 1e6, "mrope_section": (16, 24, 24), **changes})

    @classmethod
    def qwen2_5_3b(cls, **changes: Any) -> DecoderConfig:
        """Qwen2.5-VL-3B-Instruct's language model."""
        shape = {"vocab": 151936, "dim": 2048, "layers": 36, "heads": 16, "kv_heads": 2, "head_dim": 128, "tied": True}
        return cls(**{**shape, "ffn_dim": 11008, "rope_theta": 1e6, "mrope_section": (16, 24, 24), **changes})

    @classmethod
    def smollm2_135m(cls, **changes: Any) -> DecoderConfig:
        shape = {"vocab": 49152, "dim": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "ffn_dim": 1536}
        return cls(**{**shape, "rope_theta": 1e5, "rms_eps": 1e-5, "tied": True, "qkv_bias": False, **changes})

    @classmethod
    def nano(cls, **changes: Any) -> DecoderConfig:
        shape = {"vocab": 4096, "dim": 192, "layers": 4, "heads": 6, "kv_heads": 2, "head_dim": 32, "ffn_dim": 512}
        return cls(**{**shape, "rope_theta": 1e6, "mrope_section": (4, 6, 6), "tied": True, **changes})


class DecoderLayer(nnx.Module):
    """x += o(attention(norm(x))); x += down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        dim, hd, bias = config.dim, config.head_dim, config.qkv_bias
        linear = functools.partial(Linear, rngs=rngs, int8=config.int8)
        self.input_norm = RMSNorm(dim, config.rms_eps)
        self.q = linear(dim, config.heads * hd, bias=bias)
        self.k = linear(dim, config.kv_heads * hd, bias=bias)
        self.v = linear(dim, config.kv_heads * hd, bias=bias)
        self.o = linear(config.heads * hd, dim, bias=False)
        self.post_norm = RMSNorm(dim, config.rms_eps)
        self.gate = linear(dim, config.ffn_dim, bias=False)
        self.up = linear(dim, config.ffn_dim, bias=False)
        self.down = linear(config.ffn_dim, dim, bias=False)


class Decoder(nnx.Module):
    """The language model; see `DecoderConfig` for its shape."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        sections = config.mrope_section
        if sections is not None and sum(sections) != config.head_dim // 2:
            raise ValueError(f"mrope_section {sections} must sum to head_dim / 2 = {config.head_dim // 2}.")
        self.config = config
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab, config.dim)))
        self.layers = stack(lambda rngs: DecoderLayer(config, rngs=rngs), config.layers, rngs)
        self.norm = RMSNorm(config.dim, config.rms_eps)
        head = functools.partial(Linear, config.dim, config.vocab, bias=False, rngs=rngs, int8=config.int8)
        self.lm_head = None if config.tied else head()

    def embed(self, ids: jax.Array) -> jax.Array:
        """ids int32[B, T] -> [B, T, D] in the compute dtype."""
        return constrain(self.embedding[...][ids].astype(self.config.dtype), BATCH)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 logits [..., V]."""
        if self.lm_head is None and hidden.size == self.config.dim:
            # One row: with the embedding transposed, XLA reads it column by column on a CPU, six times as long.
            kernel, row = self.embedding[...].astype(hidden.dtype), hidden.reshape(-1)
            return jnp.dot(kernel, row, preferred_element_type=jnp.float32).reshape(*hidden.shape[:-1], -1)
        kernel = self.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]
        logits = jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
        if self.lm_head is None or self.lm_head.scale is None:
            return logits
        return logits * self.lm_head.scale[...]

    def __call__(
        self,
        embeds: jax.Array,
        positions: jax.Array,
        mask: jax.Array | BlockMask,
        cache: KVCache | None = None,
        cache_index: jax.Array | int | None = None,
        layers: Sequence[DecoderLayer] | None = None,
    ) -> tuple[jax.Array, Any]:
        """Hidden states [B, T, D] after the last norm, and the updated cache.

        embeds [B, T, D]; positions int32[3, B, T] (or [B, T]); mask bool[B, T, S] or [B, 1|K, T, S], True = visible.
        Without a cache S = T, and the mask, which may then be a BlockMask, hides at least what comes later. With one, the T
        new keys and values are written at `cache_index` (one index for all rows, so pad prompts on the left) and S is the
        cache's length; the mask must hide the slots not yet written.
        layers: of `merge_apart`, in place of the stacked ones; the cache is then a tuple too.
        """
        config = self.config
        cos, sin = rotary_tables(positions, config)
        start = 0 if cache_index is None else cache_index
        attend: Any = attention
        if cache is None:
            attend = cudnn_attention if config.attention == "cudnn" else causal_attention
        if isinstance(mask, BlockMask):
            attend = block_attention
        elif layers is not None and embeds.shape[1] == 1:
            attend = one_query_attention

        def body(layer: DecoderLayer, carry: tuple[jax.Array, KVCache | None], index: jax.Array) -> Any:
            x, cache = carry
            h = layer.input_norm(x)
            q = rotate(split_heads(layer.q(h), config.heads), cos, sin)
            k = rotate(split_heads(layer.k(h), config.kv_heads), cos, sin)
            v = split_heads(layer.v(h), config.kv_heads)
            if cache is not None:
                cache = {name: _written(cache[name], new, index, start) for name, new in (("k", k), ("v", v))}
                k, v = cache["k"][index].astype(x.dtype), cache["v"][index].astype(x.dtype)
            x = x + layer.o(merge_heads(attend(q, k, v, mask)))
            h = layer.post_norm(x)
            x = x + layer.down(jax.nn.silu(layer.gate(h)) * layer.up(h))
            return (constrain(x, BATCH), cache), None

        carry = (embeds.astype(config.dtype), cache)
        if layers is not None:
            for index, layer in enumerate(layers):
                carry, _ = body(layer, carry, index)
        else:
            numbers, few = jnp.arange(config.layers), config.layers <= 4
            carry, _ = scan_layers(self.layers, body, carry, numbers, remat=config.remat, unroll=few)
        x, cache = carry
        return self.norm(x), cache


def init_cache(config: DecoderConfig, batch: int, length: int, *, apart: bool = False) -> KVCache:
    """Empty cache for `length` tokens in the compute dtype: k, v zeros [layers, B, length, K, hd]; `apart`: a tuple of the
    layers' instead."""
    shape = (batch, length, config.kv_heads, config.head_dim)
    if not apart:
        return {name: jnp.zeros((config.layers, *shape), config.dtype) for name in ("k", "v")}
    return {name: tuple(jnp.zeros(shape, config.dtype) for _ in range(config.layers)) for name in ("k", "v")}


def layers_apart(params: Mapping[str, Any]) -> dict[str, Any]:
    """The same parameters with the layers' as a tuple of trees. On a CPU, a scan over stacked layers copies each one's
    weights at every step; a TPU reads them where they lie, and compiles a scan in a fraction of the time."""
    stacked = params["layers"]
    count = len(jax.tree.leaves(stacked)[0])
    return {**params, "layers": tuple(jax.tree.map(lambda leaf, k=k: leaf[k], stacked) for k in range(count))}


def merge_apart(graph: nnx.GraphDef[Decoder], params: Any) -> tuple[Any, list[DecoderLayer] | None]:
    """The decoder, and its layers when they are apart (`layers_apart`), to be called with them."""
    if not isinstance(params["layers"], tuple):
        return nnx.merge(graph, params), None
    model = nnx.merge(graph, {**params, "layers": params["layers"][0]})
    one = nnx.graphdef(model.layers)
    return model, [nnx.merge(one, tree) for tree in params["layers"]]


def _written(cache: Any, new: jax.Array, index: Any, start: Any) -> Any:
    """The cache of keys or values with a layer's new ones [B, T, K, hd] at `start`."""
    if isinstance(cache, tuple):
        layer = jax.lax.dynamic_update_slice(cache[index], new.astype(cache[index].dtype), (0, start, 0, 0))
        return (*cache[:index], layer, *cache[index + 1 :])
    # Carried whole and updated in place; as a scanned input it would be copied every step.
    return jax.lax.dynamic_update_slice(cache, new[None].astype(cache.dtype), (index, 0, start, 0, 0))


def rotary_tables(positions: jax.Array, config: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """cos, sin float32[B, T, 1, hd/2] from positions int32[3, B, T] or [B, T].

    With M-RoPE, frequency j turns with the position of its section's axis (t, h or w).
    """
    half = config.head_dim // 2
    frequencies = (config.rope_theta ** -(np.arange(half) / half)).astype(np.float32)  # powers in float64
    if positions.ndim == 3:
        sections = config.mrope_section or (half, 0, 0)
        axis = np.repeat(np.arange(3), sections)
        angles = jnp.moveaxis(positions.astype(jnp.float32)[axis], 0, -1)
    else:
        angles = positions.astype(jnp.float32)[..., None]
    angles = (angles * frequencies)[:, :, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding of x [B, T, H, hd], first half paired with second half, in float32; returns the dtype of x."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
