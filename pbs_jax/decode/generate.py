"""Batched decoding: left-padded prompts, one static-shape KV cache, one compiled function per (rows, length) bucket.

A prompt's answer does not depend on the batch it stands in: padding is masked, positions are counted on real tokens, a
finished row stays finished, a sampled row draws from its own key. Questions about one image share the image's prefix:
its keys and values are computed once (`read_prefix`) and copied into the rows' caches. Tokens come in chunks; between two
the caller may be told what is there, and finished rows leave the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.decode.sampling import Sampling, choose
from pbs_jax.models.decoder import Decoder, KVCache, init_cache, merge_apart
from pbs_jax.models.pbs_vl import insert_visual, rope_positions

BUCKET = 8  # prompt lengths are padded up to a multiple of this
CHUNK = 16  # tokens between two looks at which rows are finished
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


class Rows(NamedTuple):
    """Answers under way: the cache, bool[B, S] which of its slots a row sees, int32[B] the position of the next token,
    int32[] its slot in the cache and how many tokens are there, bool[B, V] ids that occurred, int32[B] the last token,
    bool[B] whether a row has ended."""

    cache: KVCache
    shown: jax.Array
    position: jax.Array
    slot: jax.Array
    made: jax.Array
    seen: jax.Array
    last: jax.Array
    done: jax.Array


@functools.partial(jax.jit, static_argnames=("graph", "slot_id", "stop_ids", "max_new", "first"))
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
    first: int = 0,
) -> tuple[jax.Array, jax.Array, Rows]:
    """(new tokens int32[B, first], first-step logits float32[B, V], the rows for `go_on`); first: 0 = all of `max_new`.

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
    cache: Any = init_cache(model.config, batch, total, apart=layers is not None)
    if prefix is not None:
        # `...` is the layer axis of a stacked cache, and nothing of layers apart.
        cache = jax.tree.map(
            lambda own, read: own.at[..., :past, :, :].set(read.take(prefix[2], axis=-4)), cache, prefix[1]
        )
    key = jnp.arange(total)
    shown = jnp.concatenate([jnp.ones((batch, past), bool), mask, jnp.zeros((batch, max_new), bool)], axis=1)
    query = past + jnp.arange(length)[:, None]
    # A padding row sees itself: softmax stays finite.
    prefill = shown[:, None, :] & (key <= query) | (key == query)
    hidden, cache = model(embeds, positions, prefill, cache, past, layers)
    logits = model.logits(hidden[:, -1]).astype(jnp.float32)
    rows = jnp.arange(batch)
    seen = jnp.zeros(logits.shape, bool).at[rows[:, None], tokens].max(mask)
    if prefix is not None:
        seen = seen.at[:, prefix[0]].set(True)
    new = choose(logits, seen, numbers, keys, 0)
    state = Rows(
        cache,
        shown,
        positions.max(axis=(0, 2)) + 1,
        jnp.asarray(past + length),
        jnp.asarray(1),
        seen.at[rows, new].set(True),
        new,
        (new[:, None] == jnp.asarray(stop_ids)).any(-1),
    )
    out, state = _advance(model, layers, state, numbers, keys, stop_ids, (first or max_new) - 1)
    return jnp.concatenate([new[:, None], out], axis=1), logits, state


@functools.partial(jax.jit, static_argnames=("graph", "stop_ids", "count"), donate_argnames="rows")
def go_on(
    graph: nnx.GraphDef[Decoder],
    params: Any,
    rows: Rows,
    numbers: dict[str, jax.Array] | None,
    keys: jax.Array | None,
    *,
    stop_ids: tuple[int, ...],
    count: int,
) -> tuple[jax.Array, Rows]:
    """The next `count` tokens int32[B, count] of rows from `decode`, and the rows after them."""
    return _advance(*merge_apart(graph, params), rows, numbers, keys, stop_ids, count)


def _advance(
    model: Decoder, layers: Any, rows: Rows, numbers: Any, keys: Any, stop_ids: tuple[int, ...], count: int
) -> tuple[jax.Array, Rows]:
    everyone, stops = jnp.arange(len(rows.last)), jnp.asarray(stop_ids)
    out = jnp.full((len(rows.last), count), stops[0], jnp.int32)
    if not count:
        return out, rows

    def unfinished(carry: Any) -> jax.Array:
        step, _, rows = carry
        return (step < count) & ~rows.done.all()

    def one(carry: Any) -> Any:
        step, out, rows = carry
        shown = rows.shown.at[:, rows.slot].set(True)
        where = jnp.broadcast_to(rows.position, (3, len(rows.last)))[:, :, None]
        hidden, cache = model(model.embed(rows.last[:, None]), where, shown[:, None, :], rows.cache, rows.slot, layers)
        new = choose(model.logits(hidden[:, -1]).astype(jnp.float32), rows.seen, numbers, keys, rows.made)
        new = jnp.where(rows.done, rows.last, new)
        seen = rows.seen.at[everyone, new].set(True)
        done = rows.done | (new[:, None] == stops).any(-1)
        after = Rows(cache, shown, rows.position + 1, rows.slot + 1, rows.made + 1, seen, new, done)
        return step + 1, out.at[:, step].set(new), after

    return jax.lax.while_loop(unfinished, one, (jnp.asarray(0), out, rows))[1:]


@jax.jit
def _chosen(rows: Rows, keys: jax.Array | None, places: jax.Array) -> tuple[Rows, jax.Array | None]:
    """The rows at `places` alone, and their keys."""
    cache = jax.tree.map(lambda leaf: leaf.take(places, axis=-4), rows.cache)
    parts = {name: getattr(rows, name)[places] for name in ("shown", "position", "seen", "last", "done")}
    return rows._replace(cache=cache, **parts), None if keys is None else keys[places]


def generate(
    graph: nnx.GraphDef[Decoder],
    params: Any,
    prompts: Sequence[Sequence[int]],
    visual: jax.Array | None,
    *,
    pad_id: int,
    slot_id: int,
    stop_ids: tuple[int, ...],
    max_new: int | Sequence[int],
    penalty: float = 1.0,
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    prefix: Prefix | None = None,
    owners: Sequence[int] = (),
    tell: Callable[[list[list[int]]], None] | None = None,
    chunk: int = CHUNK,
) -> tuple[list[list[int]], np.ndarray]:
    """(answers as token ids up to the first stop id, without it; first-step logits float32[B, V]) of one batch.

    max_new: most tokens of an answer, one number or one a row (0: the first logits are all that is wanted).
    With a `prefix`, prompts are what follows it and owners[i] is the image of row i. seeds: a number a row for its draws
    (default: its place in the batch). `penalty` is short for a greedy `sampling` with it.
    tell: called with all answers so far after every `chunk` tokens.
    """
    limits = np.broadcast_to(max_new, len(prompts))
    longest = max(int(limits.max()), 1)
    tokens, mask = left_pad(prompts, pad_id)
    positions = rope_positions(tokens, mask, slot_id)
    if prefix is not None:
        positions = np.where(mask, positions + prefix.following, 1)
    sampling = dataclasses.replace(sampling, penalty=penalty) if penalty != 1.0 else sampling
    numbers = None if sampling.plain else sampling.numbers()
    keys = None
    if not sampling.greedy:
        base = jax.random.key(sampling.seed)
        own = np.asarray(range(len(prompts)) if seeds is None else seeds, np.uint32)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(base, own)
    new, first, rows = decode(
        graph,
        params,
        tokens,
        mask,
        positions,
        visual,
        numbers,
        keys,
        None if prefix is None else (prefix.ids, prefix.cache, np.asarray(owners, np.int32)),
        slot_id=slot_id,
        stop_ids=stop_ids,
        max_new=longest,
        first=min(longest, chunk),
    )
    answers: list[list[int]] = [[] for _ in prompts]
    places = np.arange(len(prompts))  # the prompt of each row, -1 for one that fills up
    made = 0
    while True:
        for place, ids in zip(places.tolist(), np.asarray(new).tolist(), strict=True):
            if place >= 0:
                answers[place] += ids
        made += new.shape[1]
        if tell:
            tell(_ended(answers, limits, stop_ids))
        alive = np.flatnonzero((places >= 0) & ~np.asarray(rows.done) & (limits[places] > made))
        if not len(alive):
            return _ended(answers, limits, stop_ids), np.asarray(first)
        room = _room(len(alive))
        if 2 * room <= len(places):
            rows, keys = _chosen(rows, keys, np.resize(alive, room))
            places = np.where(np.arange(room) < len(alive), places[np.resize(alive, room)], -1)
        new, rows = go_on(graph, params, rows, numbers, keys, stop_ids=stop_ids, count=min(chunk, longest - made))


def _room(rows: int) -> int:
    """Rows of the program that `rows` go on in: 1, 2, 3, 4, 6, 8, 12, 16, …, so that there are few."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if power > 2 and rows <= power * 3 // 4 else power


def _ended(answers: Sequence[Sequence[int]], limits: np.ndarray, stop_ids: tuple[int, ...]) -> list[list[int]]:
    """Each answer up to its limit or its first stop id."""
    cut = [list(row[:limit]) for row, limit in zip(answers, limits.tolist(), strict=True)]
    ends = [min((row.index(stop) for stop in stop_ids if stop in row), default=len(row)) for row in cut]
    return [row[:end] for row, end in zip(cut, ends, strict=True)]
