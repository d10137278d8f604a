"""Greedy decoding equals the official code's tokens, and does not depend on batch, order, padding or the cache."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.decode.generate import generate, read_prefix
from pbs_jax.decode.sampling import Sampling
from pbs_jax.models.decoder import Decoder, DecoderConfig, layers_apart
from pbs_jax.models.pbs_vl import rope_positions

PAD, SLOT, STOP = 0, 1, 2


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(DecoderConfig.nano(vocab=64), rngs=nnx.Rngs(3))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    slot = [SLOT] * 8
    return [[3, *slot, *rng.integers(4, 64, n).tolist()] for n in (5, 9, 20, 30, 41, 50)]


def answers(model, rows, visual, **options):
    graph, params = nnx.split(model)
    settings = {"pad_id": PAD, "slot_id": SLOT, "stop_ids": (STOP,), "max_new": 12} | options
    return generate(graph, params, rows, visual, **settings)[0]


def test_a_prompt_answers_alike_alone_in_a_batch_and_permuted(model):
    rows = prompts()
    visual = jax.random.normal(jax.random.key(0), (6, 8, 192))
    together = answers(model, rows, visual)
    alone = [answers(model, [row], visual[k : k + 1])[0] for k, row in enumerate(rows)]
    order = [3, 0, 5, 1, 4, 2]
    permuted = answers(model, [rows[k] for k in order], visual[jnp.asarray(order)])
    assert together == alone
    assert permuted == [together[k] for k in order]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_the_cache_gives_what_full_passes_give(model, penalty):
    row, visual = prompts()[2], jax.random.normal(jax.random.key(1), (1, 8, 192))
    length = len(row) + 12

    @jax.jit
    def full_pass(tokens, positions):
        embeds = model.embed(tokens).at[0, 1:9].set(visual[0])
        hidden, _ = model(embeds, positions, jnp.tril(jnp.ones((1, length, length), bool)))
        return model.logits(hidden[0])

    expected: list[int] = []
    while len(expected) < 12:
        seen = row + expected
        tokens = np.asarray([seen + [PAD] * (length - len(seen))], np.int32)
        logits = np.array(full_pass(tokens, rope_positions(tokens, None, SLOT))[len(seen) - 1])
        for token in set(seen):
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        if int(logits.argmax()) == STOP:
            break
        expected.append(int(logits.argmax()))
    assert answers(model, [row], visual, penalty=penalty)[0] == expected


def test_any_of_several_stop_ids_ends_a_row(model):
    row, visual = prompts()[1], jax.random.normal(jax.random.key(2), (1, 8, 192))
    free = answers(model, [row], visual)[0]
    second = free[3]
    assert answers(model, [row], visual, stop_ids=(STOP, second))[0] == free[: free.index(second)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(penalty=1.3), Sampling(temperature=1.5, seed=7)])
def test_rows_that_end_leave_the_batch_and_change_no_other(model, sampling):
    rows, visual = prompts(), jax.random.normal(jax.random.key(0), (6, 8, 192))
    whole = answers(model, rows, visual, sampling=sampling)
    limits, told = [12, 2, 0, 5, 1, 12], []
    expected = [answer[:limit] for answer, limit in zip(whole, limits, strict=True)]
    assert answers(model, rows, visual, sampling=sampling, max_new=limits, chunk=3, tell=told.append) == expected
    assert told[-1] == expected and [len(row[0]) for row in told] == [3, 6, 9, 12]
    for before, after in itertools.pairwise(told):
        assert all(new[: len(old)] == old for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("shared", [False, True])
def test_layers_apart_answer_as_stacked_ones(model, shared):
    graph, state = nnx.split(model)
    params, rows = nnx.to_pure_dict(state), prompts()
    visual = jax.random.normal(jax.random.key(2), (2, 8, 192))
    found = []
    for tree in (params, layers_apart(params)):
        owners = [0, 1, 1, 0, 1, 0]
        prefix = read_prefix(graph, tree, [3, *[SLOT] * 8], visual, SLOT) if shared else None
        options = {"prefix": prefix, "owners": owners} if shared else {}
        asked = [row[9:] for row in rows] if shared else rows
        own = None if shared else visual[jnp.asarray(owners)]
        found.append(
            generate(graph, tree, asked, own, pad_id=PAD, slot_id=SLOT, stop_ids=(STOP,), max_new=12, **options)
        )
    assert found[0][0] == found[1][0] and any(found[0][0])
    np.testing.assert_allclose(found[1][1], found[0][1], atol=1e-5)


def test_one_rows_logits_are_those_of_many(model):
    hidden = jax.random.normal(jax.random.key(4), (3, 192))
    alone = jnp.concatenate([model.logits(row) for row in hidden[:, None]])
    np.testing.assert_allclose(alone, model.logits(hidden), atol=1e-5)
