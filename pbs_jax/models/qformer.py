"""BLIP-2's Q-Former (arXiv 2301.12597): learned queries read an image, the same post-norm BERT reads its caption.

Shape for shape the network of the official release: self-attention shared by queries and text, one feed-forward net
each, cross-attention into the image every `cross_attention_freq` layers for queries alone. Losses: `qformer_losses`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pbs_jax.models.layers import (
    LayerNorm,
    Linear,
    attention,
    dropout,
    gelu,
    merge_heads,
    rematerialised,
    split_heads,
    stack,
    trunc_normal,
)
from pbs_jax.sharding.mesh import BATCH, constrain

KeysValues = tuple[jax.Array, jax.Array]
Keys = Sequence[Any]  # dropout keys, or Nones in evaluation
LAYER_KEYS = 6  # dropouts of one layer: two in each attention, one in each feed-forward net
VISION_EPS = 1e-5  # ln_vision is a plain torch LayerNorm; BERT's own norms use the config's eps


@dataclasses.dataclass(frozen=True)
class QFormerConfig:
    """Shape of the Q-Former; `pad_id`, `cls_id`, `dec_id` are ids of its text tokenizer."""

    dim: int
    layers: int
    heads: int
    ffn_dim: int
    vocab: int
    max_positions: int
    encoder_width: int
    pad_id: int
    cls_id: int
    dec_id: int
    cross_attention_freq: int = 2
    queries: int = 32
    projection: int = 256
    dropout: float = 0.1
    label_smoothing: float = 0.1
    eps: float = 1e-12
    dtype: str = "float32"
    remat: str = ""

    @classmethod
    def blip2(cls, **changes: Any) -> QFormerConfig:
        """bert-base-uncased plus [DEC], as the official release: 206,637,945 parameters on a ViT-L backbone."""
        shape = {"dim": 768, "layers": 12, "heads": 12, "ffn_dim": 3072, "encoder_width": 1024}
        text = {"vocab": 30523, "max_positions": 512, "pad_id": 0, "cls_id": 101, "dec_id": 30522}
        return cls(**{**shape, **text, **changes})

    @classmethod
    def nano(cls, **changes: Any) -> QFormerConfig:
        """`pad_id`, `cls_id`, `dec_id` depend on the trained tokenizer: pass them."""
        shape = {"dim": 192, "layers": 4, "heads": 6, "ffn_dim": 512, "encoder_width": 192, "projection": 64}
        return cls(**{**shape, "vocab": 4096, "max_positions": 64, "dropout": 0.0, **changes})


class Feed(nnx.Module):
    """norm(x + down(gelu(up(x)))): BERT's post-norm feed-forward half, [..., D] -> [..., D]."""

    def __init__(self, config: QFormerConfig, *, rngs: nnx.Rngs) -> None:
        self.up = Linear(config.dim, config.ffn_dim, rngs=rngs)
        self.down = Linear(config.ffn_dim, config.dim, rngs=rngs)
        self.norm = LayerNorm(config.dim, config.eps)
        self.rate = config.dropout

    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.norm(x + dropout(self.down(gelu(self.up(x))), self.rate, key))


class Attention(nnx.Module):
    """norm(x + out(attention(x, source))): BERT's post-norm attention half; `width` is the source's."""

    def __init__(self, config: QFormerConfig, width: int, *, rngs: nnx.Rngs) -> None:
        dim = config.dim
        self.query = Linear(dim, dim, rngs=rngs)
        self.key = Linear(width, dim, rngs=rngs)
        self.value = Linear(width, dim, rngs=rngs)
        self.out = Linear(dim, dim, rngs=rngs)
        self.norm = LayerNorm(dim, config.eps)
        self.heads, self.rate = config.heads, config.dropout

    def keys_values(self, source: jax.Array) -> KeysValues:
        """[B, S, W] -> K, V [B, S, H, hd]."""
        return split_heads(self.key(source), self.heads), split_heads(self.value(source), self.heads)

    def __call__(self, x: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, keys: Keys) -> jax.Array:
        """`keys` are the dropout keys of the probabilities and of the output."""
        q = split_heads(self.query(x), self.heads)
        context = merge_heads(attention(q, k, v, mask, rate=self.rate, key=keys[0]))
        return self.norm(x + dropout(self.out(context), self.rate, keys[1]))


class Layer(nnx.Module):
    """What every layer has; cross-attention lies in its own, shorter stack."""

    def __init__(self, config: QFormerConfig, *, rngs: nnx.Rngs) -> None:
        self.attention = Attention(config, config.dim, rngs=rngs)
        self.text_ffn = Feed(config, rngs=rngs)
        self.query_ffn = Feed(config, rngs=rngs)


class LMHead(nnx.Module):
    """BERT's prediction head with an untied decoder: [..., D] -> logits [..., V]."""

    def __init__(self, config: QFormerConfig, *, rngs: nnx.Rngs) -> None:
        self.transform = Linear(config.dim, config.dim, rngs=rngs)
        self.norm = LayerNorm(config.dim, config.eps)
        self.decoder = Linear(config.dim, config.vocab, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.decoder(self.norm(gelu(self.transform(x))))


class QFormer(nnx.Module):
    """The whole of BLIP-2 stage 1 above the frozen vision backbone.

    Shapes: visual [B, N, W] backbone tokens before `ln_vision`; ids int32[B, T], [CLS] first, padded on the right with
    `pad_id`. `key` switches dropout on.
    """

    def __init__(self, config: QFormerConfig, *, rngs: nnx.Rngs) -> None:
        if config.layers % config.cross_attention_freq:
            raise ValueError(
                f"layers={config.layers} must be a multiple of cross_attention_freq={config.cross_attention_freq}."
            )
        self.config = config
        dim = config.dim
        self.ln_vision = LayerNorm(config.encoder_width, VISION_EPS)
        self.query_tokens = nnx.Param(trunc_normal(0.02)(rngs.params(), (config.queries, dim)))
        self.words = nnx.Param(trunc_normal(0.02)(rngs.params(), (config.vocab, dim)))
        self.positions = nnx.Param(trunc_normal(0.02)(rngs.params(), (config.max_positions, dim)))
        self.embed_norm = LayerNorm(dim, config.eps)
        self.layers = stack(lambda rngs: Layer(config, rngs=rngs), config.layers, rngs)
        crossings = config.layers // config.cross_attention_freq
        self.cross = stack(lambda rngs: Attention(config, config.encoder_width, rngs=rngs), crossings, rngs)
        self.vision_proj = Linear(dim, config.projection, rngs=rngs)
        self.text_proj = Linear(dim, config.projection, rngs=rngs)
        self.itm_head = Linear(dim, 2, rngs=rngs)
        self.temperature = nnx.Param(jnp.asarray(0.07, jnp.float32))
        self.lm_head = LMHead(config, rngs=rngs)

    def encode(
        self, visual: jax.Array, visual_mask: jax.Array | None = None, key: jax.Array | None = None
    ) -> jax.Array:
        """Query outputs [B, Q, D]; without `visual_mask` bool[B, N], tokens that are exactly zero are invisible."""
        return self.image_pass(visual, visual_mask, key)[0]

    def image_pass(
        self, visual: jax.Array, visual_mask: jax.Array | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, KeysValues, KeysValues]:
        """`encode`'s [B, Q, D]; the self-attention K, V [layers, B, Q, H, hd] that are the prefix of `lm_logits`; the
        images' K, V [crossings, B, N, H, hd] that `itm_logits` need not compute again."""
        mask = jnp.any(visual != 0, axis=-1) if visual_mask is None else visual_mask
        return _run(self, None, visual, mask, key=key)

    def text_pass(self, ids: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Text alone, bidirectional: [B, T, D]."""
        return _run(self, ids, mask=self._visible(ids), key=key)[0]

    def itm_logits(
        self,
        visual: jax.Array,
        ids: jax.Array,
        visual_mask: jax.Array | None = None,
        index: jax.Array | None = None,
        key: jax.Array | None = None,
        images: KeysValues | None = None,
    ) -> jax.Array:
        """Match logits [B, 2] (0 no, 1 yes), the mean over queries; queries and text see each other.

        `index` int32[B] names the image of each text when images repeat: their keys and values are computed once, or
        were by `image_pass` (images).
        Zero tokens stay visible here, unlike in `encode` (official behaviour), unless `visual_mask` says otherwise.
        """
        text = self._visible(ids)
        mask = jnp.concatenate([jnp.ones((ids.shape[0], 1, self.config.queries), bool), text], axis=-1)
        hidden, *_ = _run(self, ids, visual, visual_mask, mask=mask, index=index, images=images, key=key)
        return self.itm_head(hidden[:, : self.config.queries]).mean(axis=1)

    def lm_logits(self, ids: jax.Array, kv: KeysValues, key: jax.Array | None = None) -> jax.Array:
        """Causal caption logits [B, T, V] for the token after each position; position 0 is read as [DEC]."""
        length = ids.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        prefix = jnp.ones((ids.shape[0], length, self.config.queries), bool)
        mask = jnp.concatenate([prefix, causal & self._visible(ids)], axis=-1)
        hidden, *_ = _run(self, ids.at[:, 0].set(self.config.dec_id), mask=mask, prefix=kv, key=key)
        return self.lm_head(hidden)

    def _visible(self, ids: jax.Array) -> jax.Array:
        return (ids != self.config.pad_id)[:, None, :]


def _run(
    model: QFormer,
    ids: jax.Array | None,
    visual: jax.Array | None = None,
    visual_mask: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
    index: jax.Array | None = None,
    prefix: KeysValues | None = None,
    images: KeysValues | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, KeysValues, KeysValues]:
    """Embed and run all layers on [queries if there is an image; text if there are ids].

    mask bool[B, 1|S, P+S] over the self-attention's keys (P = length of the prefix). Returns hidden [B, S, D], the layers'
    own K, V [layers, B, S, H, hd] and the images' (`images`, where they are given) [crossings, I, N, H, hd].
    """
    config = model.config
    keys = None if key is None else jax.random.split(key, (config.layers + 1, LAYER_KEYS))
    x = _embed(model, ids, visual, index, None if keys is None else keys[-1, 0])
    if visual is not None:
        visual = constrain(model.ln_vision(visual.astype(config.dtype)), BATCH)
    queries = 0 if visual is None else config.queries

    # Without an image no layer crosses, so layers are scanned singly: half the program to compile.
    size = 1 if visual is None else config.cross_attention_freq
    layer_graph, layers = nnx.split(model.layers)
    cross_graph, crosses = nnx.split(model.cross)

    def group(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        cross, seen, members = inputs
        own = []
        for i, (layer, past, layer_keys) in enumerate(members):
            layer = nnx.merge(layer_graph, layer)
            drop = (None,) * LAYER_KEYS if layer_keys is None else layer_keys
            k, v = layer.attention.keys_values(x)
            own.append((k, v))
            if past is not None:
                k, v = (jnp.concatenate(pair, axis=1) for pair in zip(past, (k, v), strict=True))
            x = layer.attention(x, k, v, mask, drop[:2])
            query, text = x[:, :queries], x[:, queries:]
            parts = []
            if visual is not None:
                if i == 0:
                    crossing = nnx.merge(cross_graph, cross)
                    seen = seen or crossing.keys_values(visual)
                    query = _cross_attend(crossing, query, seen, visual_mask, index, drop[2:4])
                parts.append(layer.query_ffn(query, drop[4]))
            if ids is not None:
                parts.append(layer.text_ffn(text, drop[5]))
            x = constrain(jnp.concatenate(parts, axis=1), BATCH)
        return x, (jax.tree.map(lambda *kv: jnp.stack(kv), *own), seen)

    per_layer = (layers, prefix, None if keys is None else keys[:-1])
    members = tuple(jax.tree.map(lambda leaf, i=i: leaf[i::size], per_layer) for i in range(size))
    x, (kv, seen) = jax.lax.scan(
        rematerialised(group, config.remat), x, (None if visual is None else crosses, images, members)
    )
    return x, jax.tree.map(lambda leaf: leaf.reshape(config.layers, *leaf.shape[2:]), kv), seen


def _cross_attend(
    cross: Attention,
    query: jax.Array,
    images: KeysValues,
    visual_mask: jax.Array | None,
    index: jax.Array | None,
    keys: Keys,
) -> jax.Array:
    """Queries [B, Q, D] read images' K, V [I, N, H, hd]; `index` int32[B] picks each row's image."""
    mask = None if visual_mask is None else visual_mask[:, None, :]
    if index is not None:
        images, mask = jax.tree.map(lambda leaf: constrain(leaf[index], BATCH), (images, mask))
    return cross(query, *images, mask, keys)


def _embed(
    model: QFormer, ids: jax.Array | None, visual: jax.Array | None, index: jax.Array | None, key: jax.Array | None
) -> jax.Array:
    """Queries (no position) before words + positions, one norm over all: [B, S, D]."""
    config, parts = model.config, []
    if visual is not None:
        batch = visual.shape[0] if index is None else index.shape[0]
        parts.append(jnp.broadcast_to(model.query_tokens[...], (batch, config.queries, config.dim)))
    if ids is not None:
        parts.append(model.words[...][ids] + model.positions[...][: ids.shape[1]])
    x = model.embed_norm(jnp.concatenate(parts, axis=1).astype(config.dtype))
    return constrain(dropout(x, config.dropout, key), BATCH)
