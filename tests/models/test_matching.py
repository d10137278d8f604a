"""The matching heads: a word of the prompt that stands in the marked slot looks there, another one does not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pbs_jax.models.decoder import Decoder, DecoderConfig, rotary_tables, rotate
from pbs_jax.models.layers import split_heads
from pbs_jax.models.matching import add_matching_heads
from pbs_jax.train.phase import parameters

SLOT_ID, MARK = 3, 0.3


def shares(first: int, second: int) -> tuple[float, float]:
    """How much of two prompt words' attention goes to a slot that holds only `first`, eight tokens before them."""
    config = DecoderConfig.nano(vocab=64)
    params = add_matching_heads(parameters(lambda rngs: Decoder(config, rngs=rngs), 0)[1], config, SLOT_ID, 0)
    embedding = params["embedding"]
    ids = jnp.asarray([[first, *range(20, 28), first, second]])
    x = embedding[ids].at[:, 0].add(MARK * embedding[SLOT_ID])
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True))
    cos, sin = rotary_tables(jnp.tile(jnp.arange(ids.shape[1]), (3, 1, 1)), config)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    q = rotate(split_heads(x @ layer["q"]["kernel"], config.heads), cos, sin)[0, :, 0]
    k = rotate(split_heads(x @ layer["k"]["kernel"], config.kv_heads), cos, sin)[0, :, 0]
    weights = jax.nn.softmax(q @ k.T / np.sqrt(config.head_dim), axis=-1)
    return float(weights[-2, 0]), float(weights[-1, 0])


def test_only_a_word_that_is_in_the_slot_looks_there() -> None:
    found = np.asarray([shares(first, second) for first, second in ((5, 6), (7, 8), (9, 10), (11, 12))])
    assert found[:, 0].min() > 0.1 and found[:, 1].max() < 0.1
    assert found[:, 0].mean() > 10 * found[:, 1].mean()


def test_everything_else_is_kept() -> None:
    config = DecoderConfig.nano(vocab=64)
    before = parameters(lambda rngs: Decoder(config, rngs=rngs), 0)[1]
    after = add_matching_heads(before, config, SLOT_ID, 0)
    np.testing.assert_array_equal(after["embedding"], before["embedding"])
    for name in "qkvo":
        np.testing.assert_array_equal(after["layers"][name]["kernel"][1:], before["layers"][name]["kernel"][1:])
    assert (np.asarray(after["layers"]["gate"]["kernel"]) == np.asarray(before["layers"]["gate"]["kernel"])).all()
