"""Batched decoding: left-padded prompts, one static-shape KV cache, one compiled function per (rows, length) bucket.

A prompt's answer does not depend on the batch it stands in: padding is masked, positions are counted on real tokens, a
finished row stays finished, a sampled row draws from its own key. Questions about one image share the image's prefix:
its keys and values are computed once (`read_prefix`) and copied into the rows' caches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.decode.sampling import Sampling, choose
from pbs_jax.models.decoder import Decoder, KVCache, init_cache, merge_apart
from pbs_jax.models.pbs_vl import insert_visual, rope_positions

BUCKET = 8  # prompt lengths are padded up to a multiple of this
GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What all questions about an image begin with: ids int32[P], k and v [layers, I, P, K, hd] of I images, and the
    position of the token that follows."""

    ids: np.ndarray
    cache: KVCache
    following: int


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int, multiple: int = BUCKET) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32[B, T], mask bool[B, T] (False = padding on the left), T a multiple of `multiple`."""
    length = -(-max(map(len, prompts)) // multiple) * multiple
    tokens = np.full((len(prompts), length), pad_id, np.int32)
    mask = np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = prompt
        mask[row, length - len(prompt) :] = True
    return tokens, mask


def read_prefix(
    graph: nnx.GraphDef[Decoder], params: Any, ids: Sequence[int], visual: jax.Array | None, slot_id: int
) -> Prefix:
    """The prefix of I images, visual [I, Q, D] in the slots of `slot_id` (None: one blind prefix)."""
    row = np.asarray([ids], np.int32)
    positions = rope_positions(row, None, slot_id)
    cache = _read_prefix(graph, params, row, positions, visual, slot_id=slot_id)
    return Prefix(row[0], cache, int(positions.max()) + 1)


@functools.partial(jax.jit, static_argnames=("graph", "slot_id"))
def _read_prefix(
    graph: nnx.GraphDef[Decoder], params: Any, ids: jax.Array, positions: jax.Array, visual: Any, *, slot_id: int
) -> KVCache:
    model, layers = merge_apart(graph, params)
    images, length = 1 if visual is None else visual.shape[0], ids.shape[1]
    tokens = jnp.broadcast_to(ids, (images, length))
    embeds = model.embed(tokens)
    if visual is not None:
        embeds = insert_visual(embeds, tokens, visual, slot_id)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (images, length, length))
    where = jnp.broadcast_to(positions, (3, images, length))
    empty = init_cache(model.config, images, length, apart=layers is not None)
    _, cache = model(embeds, where, mask, empty, 0, layers)
    return cache


@functools.partial(jax.jit, static_argnames=("graph", "slot_id", "stop_ids", "max_new"))
def decode(
    graph: nnx.GraphDef[Decoder],
    params: Any,
    tokens: jax.Array,
    mask: jax.Array,
    positions: jax.Array,
    visual: jax.Array | None,
    numbers: dict[str, jax.Array] | None = None,
    keys: jax.Array | None = None,
    prefix: tuple[jax.Array, KVCache, jax.Array] | None = None,
    *,
    slot_id: int,
    stop_ids: tuple[int, ...],
    max_new: int,
) -> tuple[jax.Array, jax.Array]:
    """(new tokens int32[B, max_new], first-step logits float32[B, V]).

    tokens int32[B, T] and mask bool[B, T] left-padded; positions int32[3, B, T]; visual [B, Q, D] fills the slots of
    `slot_id` (None: the slots keep their own embedding: a blind prompt). After a stop id a row repeats that id.
    numbers, keys: of `sampling.choose` (None: greedy, no penalty); the penalty is over all prompt and generated ids.
    prefix: ids int32[P], cache [layers, I, P, K, hd] and int32[B], the image of each row, which tokens then go on from.
    """
    model, layers = merge_apart(graph, params)
    batch, length = tokens.shape
    past = 0 if prefix is None else prefix[0].shape[0]
    total = past + length + max_new
    embeds = model.embed(tokens)
    if visual is not None:
        embeds = insert_visual(embeds, tokens, visual, slot_id)
    cache = init_cache(model.config, batch, total, apart=layers is not None)
    if prefix is not None:
        # `...` is the layer axis of a stacked cache, and nothing of layers apart.
        cache = jax.tree.map(
            lambda own, read: own.at[..., :past, :, :].set(read.take(prefix[2], axis=-4)), cache, prefix[1]
        )
    key = jnp.arange(total)
    visible = jnp.concatenate([jnp.ones((batch, past), bool), mask, jnp.zeros((batch, max_new), bool)], axis=1)
    query = past + jnp.arange(length)[:, None]
    # A padding row sees itself: softmax stays finite.
    prefill = visible[:, None, :] & (key <= query) | (key == query)
    hidden, cache = model(embeds, positions, prefill, cache, past, layers)
    first = model.logits(hidden[:, -1]).astype(jnp.float32)
    rows = jnp.arange(batch)
    seen = jnp.zeros(first.shape, bool).at[rows[:, None], tokens].max(mask)
    if prefix is not None:
        seen = seen.at[:, prefix[0]].set(True)
    after = positions.max(axis=(0, 2)) + 1
    stops = jnp.asarray(stop_ids)

    def unfinished(carry: Any) -> jax.Array:
        step, _, done, *_ = carry
        return (step < max_new) & ~done.all()

    def advance(carry: Any) -> Any:
        step, out, done, last, cache, seen = carry
        at = past + length + step - 1
        where = jnp.broadcast_to(after + step - 1, (3, batch))[:, :, None]
        shown = (visible | ((key >= past + length) & (key <= at)))[:, None, :]
        hidden, cache = model(model.embed(last[:, None]), where, shown, cache, at, layers)
        new = choose(model.logits(hidden[:, -1]).astype(jnp.float32), seen, numbers, keys, step)
        new = jnp.where(done, last, new)
        seen = seen.at[rows, new].set(True)
        return step + 1, out.at[:, step].set(new), done | (new[:, None] == stops).any(-1), new, cache, seen

    new = choose(first, seen, numbers, keys, 0)
    seen = seen.at[rows, new].set(True)
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
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    prefix: Prefix | None = None,
    owners: Sequence[int] = (),
) -> tuple[list[list[int]], np.ndarray]:
    """(answers as token ids up to the first stop id, without it; first-step logits float32[B, V]) of one batch.

    With a `prefix`, prompts are what follows it and owners[i] is the image of row i. seeds: a number a row for its draws
    (default: its place in the batch). `penalty` is short for a greedy `sampling` with it.
    """
    tokens, mask = left_pad(prompts, pad_id)
    positions = rope_positions(tokens, mask, slot_id)
    if prefix is not None:
        positions = np.where(mask, positions + prefix.following, 1)
    sampling = dataclasses.replace(sampling, penalty=penalty) if penalty != 1.0 else sampling
    keys = None
    if not sampling.greedy:
        base = jax.random.key(sampling.seed)
        own = np.asarray(range(len(prompts)) if seeds is None else seeds, np.uint32)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(base, own)
    out, first = decode(
        graph,
        params,
        tokens,
        mask,
        positions,
        visual,
        None if sampling.plain else sampling.numbers(),
        keys,
        None if prefix is None else (prefix.ids, prefix.cache, np.asarray(owners, np.int32)),
        slot_id=slot_id,
        stop_ids=stop_ids,
        max_new=max_new,
    )
    answers = []
    for row in np.asarray(out).tolist():
        ends = [row.index(stop) for stop in stop_ids if stop in row]
        answers.append(row[: min(ends, default=len(row))])
    return answers, np.asarray(first)
