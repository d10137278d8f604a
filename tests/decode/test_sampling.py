"""Choosing tokens: what transformers' processors keep is kept, draws are a row's own, one program serves all settings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_prep.schema import DataError
from pbs_jax.decode.generate import decode, read_prefix
from pbs_jax.decode.sampling import Sampling, choose, restricted
from tests.decode.test_generate import SLOT, answers, model, prompts

__all__ = ["model"]


@pytest.mark.torch
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (9, 0.4), (1, 1.0), (500, 0.99)])
def test_top_k_and_top_p_keep_what_transformers_keeps(top_k, top_p):
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers")
    logits = 3 * np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    theirs = warpers.TemperatureLogitsWarper(0.7)(None, torch.from_numpy(logits))
    if top_k:
        theirs = warpers.TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = warpers.TopPLogitsWarper(top_p)(None, theirs)
    ours = restricted(jnp.asarray(logits), Sampling(temperature=0.7, top_k=top_k, top_p=top_p).numbers())
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs.numpy()))
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=1e-6)


def test_draws_follow_the_probabilities():
    logits = jnp.broadcast_to(jnp.log(jnp.asarray([0.5, 0.3, 0.2])), (4000, 3))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(4000))
    drawn = choose(logits, jnp.zeros((4000, 3), bool), Sampling(temperature=1.0).numbers(), keys, 0)
    shares = np.bincount(np.asarray(drawn), minlength=3) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.2], atol=0.03)


@pytest.mark.slow
def test_a_sampled_answer_does_not_depend_on_its_neighbours_but_on_its_seed(model):
    rows = prompts()[:3]
    visual = jax.random.normal(jax.random.key(0), (3, 8, 192))
    hot = Sampling(temperature=1.5, seed=7)
    together = answers(model, rows, visual, sampling=hot, seeds=[4, 5, 6])
    alone = answers(model, [rows[1]] * 3, visual[jnp.asarray([1, 1, 1])], sampling=hot, seeds=[5, 5, 9])
    assert alone[0] == alone[1] == together[1]
    assert alone[2] != alone[0]
    assert together != answers(model, rows, visual, sampling=Sampling(temperature=1.5, seed=8), seeds=[4, 5, 6])


@pytest.mark.slow
def test_questions_that_share_a_prefix_answer_as_if_each_had_read_it(model):
    from flax import nnx

    graph, params = nnx.split(model)
    branches = [[9, 8, 7], [5] * 20, [33, 34], [40, 41, 42, 43]]
    owners = [1, 0, 0, 1]
    head = [3, *[SLOT] * 8, 11]
    visual = jax.random.normal(jax.random.key(3), (2, 8, 192))
    for penalty in (1.0, 1.3):
        alone = answers(model, [[*head, *b] for b in branches], visual[jnp.asarray(owners)], penalty=penalty)
        prefix = read_prefix(graph, params, head, visual, SLOT)
        assert answers(model, branches, None, prefix=prefix, owners=owners, penalty=penalty) == alone


@pytest.mark.slow
def test_one_program_serves_all_settings_and_lengths_of_a_bucket(model):
    rows, visual = prompts()[:2], jax.random.normal(jax.random.key(0), (2, 8, 192))
    answers(model, rows, visual, sampling=Sampling(temperature=0.5))
    before = decode._cache_size()
    for sampling in (Sampling(temperature=0.9, top_k=3), Sampling(temperature=1.1, top_p=0.5, penalty=1.05, seed=3)):
        answers(model, rows[::-1], visual, sampling=sampling)
        answers(model, [row[:-1] for row in rows], visual, sampling=sampling)
    assert decode._cache_size() == before


def test_numbers_out_of_range_are_named():
    with pytest.raises(DataError, match=r"top_p is 1\.5"):
        Sampling(top_p=1.5)
