"""Pieces that several models share: linear and norm layers, attention, dropout, and stacks of layers under `lax.scan`.

Norms, softmax and its logits are computed in float32 whatever the activations' dtype; kernels are (in, out).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

LONG_ROW, LONG_BLOCK = 384, 192  # tokens; shorter rows take one block
trunc_normal = jax.nn.initializers.truncated_normal


def gelu(x: jax.Array) -> jax.Array:
    """Exact (erf) GELU, which BERT, DINOv2 and the Perceiver all use."""
    return jax.nn.gelu(x, approximate=False)


class Linear(nnx.Module):
    """x[..., in] @ kernel[in, out] + bias[out], in the dtype of x; `columns` computes a part of the outputs only.

    int8: a frozen kernel of whole numbers with one scale an output (`pbs_jax.models.int8`): they are exact in bfloat16,
    so no weight is ever expanded, the outputs are scaled instead.
    """

    def __init__(
        self, din: int, dout: int, *, rngs: nnx.Rngs, bias: bool = True, std: float = 0.02, int8: bool = False
    ) -> None:
        kernel = jnp.zeros((din, dout), jnp.int8) if int8 else trunc_normal(std)(rngs.params(), (din, dout))
        self.kernel = nnx.Param(kernel)
        self.scale = nnx.Param(jnp.ones((dout,))) if int8 else None
        self.bias = nnx.Param(jnp.zeros((dout,))) if bias else None

    def __call__(self, x: jax.Array, columns: slice = slice(None)) -> jax.Array:
        y = x @ self.kernel[:, columns].astype(x.dtype)
        if self.scale is not None:
            y = y * self.scale[columns].astype(x.dtype)
        return y if self.bias is None else y + self.bias[columns].astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm over the last axis with scale and bias, in float32; returns the dtype of x."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((dim,)))
        self.bias = nnx.Param(jnp.zeros((dim,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.float32)
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + self.eps)
        return (h * self.scale[...] + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, in float32; returns the dtype of x."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((dim,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.float32)
        h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + self.eps)
        return (h * self.scale[...]).astype(x.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity when `key` is None (evaluation) or the rate is 0.

    The rate is rounded to 1/256, so that one 32-bit draw serves four values: drawing is half of a small step's time.
    """
    if key is None or rate == 0.0:
        return x
    words = jax.random.bits(key, (*x.shape[:-1], -(-x.shape[-1] // 4)), jnp.uint32)
    draws = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    dropped = round(256 * rate)
    return jnp.where(draws >= dropped, x * (256 / (256 - dropped)), 0).astype(x.dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., H*hd] -> [..., H, hd]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def merge_heads(x: jax.Array) -> jax.Array:
    """[..., H, hd] -> [..., H*hd]."""
    return x.reshape(*x.shape[:-2], -1)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    rate: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """Scaled dot-product attention with grouped key/value heads.

    q [B, T, H, hd]; k, v [B, S, K, hd] with H a multiple of K: query head h reads key/value head h // (H/K).
    mask bool [B, T, S] or [B, 1|K, T, S], broadcastable, True = visible. A query that sees nothing returns zeros, as in
    torch's safe softmax. `rate` and `key` are dropout on the probabilities. Returns [B, T, H, hd] in the dtype of q.
    """
    batch, length, heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
    logits = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * width**-0.5
    if mask is not None:
        mask = mask[:, None, None] if mask.ndim == 3 else mask[:, :, None]  # [B, 1|K, 1, T, S]
        logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    weights = dropout(jax.nn.softmax(logits, axis=-1), rate, key).astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    if mask is not None:  # on the outputs: the weights are many more
        out = jnp.where(jnp.moveaxis(mask.any(-1, keepdims=True), 3, 1), out, 0.0)
    return out.reshape(batch, length, heads, -1).astype(q.dtype)


def one_query_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`attention` of a single query, q [B, 1, H, hd] and mask bool[B, 1, S] that shows something: as sums of products, which
    a CPU fuses into one pass over keys and values where it would multiply many tiny matrices."""
    batch, _, heads, width = q.shape
    grouped = q.reshape(batch, 1, k.shape[2], -1, width).astype(jnp.float32)
    logits = (grouped * k[:, :, :, None]).sum(-1) * width**-0.5  # [B, S, K, G]
    logits = jnp.where(mask[:, 0, :, None, None], logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=1)[..., None]
    return (weights * v[:, :, :, None]).sum(1).reshape(batch, 1, heads, width).astype(q.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`attention` where mask [B, T, T] hides all that comes later: long rows are cut into blocks of queries, so that
    neither the work nor the logits of what is hidden anyway are there."""
    length = q.shape[1]
    blocks = max(length // LONG_BLOCK, 1) if length >= LONG_ROW else 1
    edges = [round(length * i / blocks) for i in range(blocks + 1)]
    parts = [
        attention(q[:, start:stop], k[:, :stop], v[:, :stop], mask[..., start:stop, :stop])
        for start, stop in itertools.pairwise(edges)
    ]
    return jnp.concatenate(parts, axis=1) if blocks > 1 else parts[0]


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """`causal_attention` by cuDNN's fused kernel: bfloat16 on NVIDIA GPUs alone. Every query must see something, as those of
    packed rows do."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")


class BlockMask(NamedTuple):
    """What N blocks of M queries see: keys int32[B, N, S], places in the row, and seen bool[B, N, M, S], whether a query of
    the block sees such a key. The blocks cover the row; queries that they have beyond it see nothing."""

    keys: jax.Array
    seen: jax.Array


def block_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: BlockMask) -> jax.Array:
    """`attention` of q [B, T, H, hd] to the keys that `mask` lists, of k, v [B, T, K, hd], and to no others: the work grows
    with what is seen instead of with T * T."""
    batch, length, heads, width = q.shape
    blocks, members = mask.seen.shape[1:3]
    pick = jax.vmap(lambda row, at: row[at])
    k, v = (pick(x, mask.keys).reshape(batch * blocks, -1, *x.shape[2:]) for x in (k, v))
    q = jnp.pad(q, ((0, 0), (0, blocks * members - length), (0, 0), (0, 0)))
    q = q.reshape(batch * blocks, members, heads, width)
    out = attention(q, k, v, mask.seen.reshape(batch * blocks, members, -1))
    return out.reshape(batch, -1, heads, width)[:, :length]


def stack(make: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs) -> Any:
    """`count` modules of one kind as one module whose parameters have a leading layer axis."""
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(count))


def rematerialised(step: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """A layer that computes again in the backward pass: nothing (""), all but its matrix products ("dots"), or all ("full"),
    for which less and less is kept from the forward pass."""
    if not remat:
        return step
    policies = jax.checkpoint_policies
    return jax.checkpoint(step, policy=policies.dots_with_no_batch_dims_saveable if remat == "dots" else None)


def scan_layers(
    layers: Any,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    remat: str = "",
    unroll: bool = False,
) -> tuple[Any, Any]:
    """Run `body(layer, carry, x) -> (carry, y)` over a stack made by `stack`: one compiled layer whatever the depth.

    `xs` may hold more per-layer inputs (leading layer axis, or None). `remat`: see `rematerialised`; `unroll` compiles
    every layer: longer to compile, a third faster on a CPU for the few layers of nano.
    """
    graph, state = nnx.split(layers)

    def step(carry: Any, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        layer_state, x = inputs
        return body(nnx.merge(graph, layer_state), carry, x)

    return jax.lax.scan(rematerialised(step, remat), carry, (state, xs), unroll=unroll)
