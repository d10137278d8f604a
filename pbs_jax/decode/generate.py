"""Batched greedy decoding: left-padded prompts, one static-shape KV cache, one compiled function per (rows, length) bucket.

A prompt's answer does not depend on the batch it stands in: padding is masked, positions are counted on real tokens, a
finished row stays finished.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.models.decoder import Decoder, init_cache
from pbs_jax.models.pbs_vl import insert_visual, rope_positions

BUCKET = 32  # prompt lengths are padded up to a multiple of this


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int, multiple: int = BUCKET) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32[B, T], mask bool[B, T] (False = padding on the left), T a multiple of `multiple`."""
    length = -(-max(map(len, prompts)) // multiple) * multiple
    tokens = np.full((len(prompts), length), pad_id, np.int32)
    mask = np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    return tokens, mask


@functools.partial(jax.jit, static_argnames=("graph", "slot_id", "stop_ids", "max_new", "penalty"))
def decode(
    graph: nnx.GraphDef[Decoder],
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    positions: jax.Array,
    visual: jax.Array | None,
    *,
    slot_id: int,
    stop_ids: tuple[int, ...],
    max_new: int,
    penalty: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """(new tokens int32[B, max_new], first-step logits float32[B, V]).

    tokens int32[B, T] and mask bool[B, T] left-padded; positions int32[3, B, T]; visual [B, Q, D] fills the slots of
    `slot_id` (None: the slots keep their own embedding: a blind prompt). After a stop id a row repeats that id.
    penalty: Hugging Face's repetition penalty over all prompt and generated ids (1.0 = off).
    """
    model = nnx.merge(graph, params)
    batch, length = tokens.shape
    total = length + max_new
    embeds = model.embed(tokens)
    if visual is not None:
        embeds = insert_visual(embeds, tokens, visual, slot_id)
    key = jnp.arange(total)
    visible = jnp.pad(mask, ((0, 0), (0, max_new)))
    prefill = visible[:, None, :] & (key <= jnp.arange(length)[:, None])
    prefill = prefill | (key == jnp.arange(length)[:, None])  # a padding row sees itself: softmax stays finite
    hidden, cache = model(embeds, positions, prefill, init_cache(model.config, batch, total), 0)
    first = model.logits(hidden[:, -1]).astype(jnp.float32)
    seen = jnp.zeros(first.shape, bool).at[jnp.arange(batch)[:, None], tokens].set(True)
    after = positions.max(axis=(0, 2)) + 1
    stops = jnp.asarray(stop_ids)

    def choose(logits: jax.Array, seen: jax.Array) -> jax.Array:
        if penalty != 1.0:
            logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
        return logits.argmax(-1).astype(jnp.int32)

    def unfinished(carry: Any) -> jax.Array:
        step, _, done, *_ = carry
        return (step < max_new) & ~done.all()

    def advance(carry: Any) -> Any:
        step, out, done, last, cache, seen = carry
        at = length + step - 1
        rows = jnp.broadcast_to(after + step - 1, (3, batch))[:, :, None]
        shown = (visible | ((key >= length) & (key <= at)))[:, None, :]
        hidden, cache = model(model.embed(last[:, None]), rows, shown, cache, at)
        new = jnp.where(done, last, choose(model.logits(hidden[:, -1]).astype(jnp.float32), seen))
        seen = seen.at[jnp.arange(batch), new].set(True)
        return step + 1, out.at[:, step].set(new), done | (new[:, None] == stops).any(-1), new, cache, seen

    new = choose(first, seen)
    seen = seen.at[jnp.arange(batch), new].set(True)
    out = jnp.full((batch, max_new), stops[0], jnp.int32).at[:, 0].set(new)
    done = (new[:, None] == stops).any(-1)
    carry = (jnp.asarray(1), out, done, new, cache, seen)
    return jax.lax.while_loop(unfinished, advance, carry)[1], first


def generate(
    graph: nnx.GraphDef[Decoder],
    params: Any,
    prompts: Sequence[Sequence[int]],
    visual: jax.Array | None,
    *,
    pad_id: int,
    slot_id: int,
    stop_ids: tuple[int, ...],
    max_new: int,
    penalty: float = 1.0,
) -> tuple[list[list[int]], np.ndarray]:
    """(answers as token ids up to the first stop id, without it; first-step logits float32[B, V]) of one batch."""
    tokens, mask = left_pad(prompts, pad_id)
    positions = rope_positions(tokens, mask, slot_id)
    out, first = decode(
        graph,
        params,
        tokens,
        mask,
        positions,
        visual,
        slot_id=slot_id,
        stop_ids=stop_ids,
        max_new=max_new,
        penalty=penalty,
    )
    answers = []
    for row in np.asarray(out).tolist():
        ends = [row.index(stop) for stop in stop_ids if stop in row]
        answers.append(row[: min(ends, default=len(row))])
    return answers, np.asarray(first)
