"""PBS-VL's assembly: visual tokens through a projector into the language model's image slots, and their positions.

An image stands in the prompt as a run of `image_pad` tokens, one for each visual token (32 in the paper, section 3.3).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_prep.schema import DataError
from pbs_jax.models.layers import Linear
from pbs_jax.models.qformer import QFormer


class Projector(nnx.Module):
    """The one linear layer between visual tokens [B, Q, dim] and the language model's embeddings [B, Q, lm_dim]."""

    def __init__(self, dim: int, lm_dim: int, *, rngs: nnx.Rngs) -> None:
        self.linear = Linear(dim, lm_dim, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.linear(tokens)


def visual_tokens(
    qformer: QFormer, projector: Projector, features: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Backbone tokens [B, N, W] before the last norm -> image embeddings [B, Q, lm_dim]; `key` switches dropout on."""
    return projector(qformer.encode(features, key=key))


def insert_visual(embeds: jax.Array, tokens: jax.Array, visual: jax.Array, image_pad_id: int) -> jax.Array:
    """Put visual [B, Q, D] into the `image_pad` slots of embeds [B, T, D], in order of position; the rest is unchanged.

    Rows must hold 0 or Q slots (several images: Q counts all their tokens); `check_slots` verifies that outside jit.
    """
    slot = tokens == image_pad_id
    rank = jnp.clip(jnp.cumsum(slot, axis=1) - 1, 0, visual.shape[1] - 1)
    placed = jnp.take_along_axis(visual.astype(embeds.dtype), rank[..., None], axis=1)
    return jnp.where(slot[..., None], placed, embeds)


def check_slots(tokens: np.ndarray, queries: int, image_pad_id: int) -> None:
    """DataError unless every row of tokens int[B, T] holds 0 or `queries` image slots."""
    counts = (np.asarray(tokens) == image_pad_id).sum(axis=1)
    wrong = np.flatnonzero((counts != 0) & (counts != queries))
    if wrong.size:
        raise DataError(
            f"row {wrong[0]} has {counts[wrong[0]]} image_pad tokens but the model gives {queries} visual tokens; "
            f"rebuild the tokens with a slot of {queries}."
        )


def rope_positions(tokens: np.ndarray, attention_mask: np.ndarray | None, image_pad_id: int) -> np.ndarray:
    """M-RoPE positions int32[3, B, T] (t, h, w) of Qwen2.5-VL's `get_rope_index`, each image being a 1 x Q strip.

    Text counts on all three axes; an image's tokens share t = h = its start and count on w; text after it goes on at
    start + Q. Padding (mask 0, either side) gets 1 and takes no position. A run of image_pad tokens is one image.
    """
    tokens = np.asarray(tokens)
    visible = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    count = np.cumsum(visible, axis=1) - 1
    image = (tokens == image_pad_id) & visible
    starts = image & ~np.pad(image, ((0, 0), (1, 0)))[:, :-1]
    start = np.maximum.accumulate(np.where(starts, count, 0), axis=1)
    shared = np.where(image, start, count)
    return np.where(visible, np.stack([shared, shared, count]), 1).astype(np.int32)
