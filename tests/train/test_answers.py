"""Shared-prefix bins give the loss of one question a row; branches never see each other."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_prep.datasets import read_questions
from data_prep.prompts import IMAGE_PAD
from data_prep.tokens import load_tokenizer, pack
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.train.answers import answer_loss, branch_mask


def as_batch(bins: list[dict]) -> dict[str, jax.Array]:
    count = max(int((record["targets"] >= 0).sum()) for record in bins)
    answers = np.full((len(bins), count), -1, np.int32)
    for row, record in enumerate(bins):
        where = np.flatnonzero(record["targets"] >= 0)
        answers[row, : len(where)] = where
    names = ("tokens", "targets", "segments", "positions")
    unused = {"shares": jnp.zeros(answers.shape), "firsts": jnp.zeros(answers.shape, bool)}
    arrays = {name: jnp.stack([record[name] for record in bins]) for name in names}
    return arrays | unused | {"answers": jnp.asarray(answers)}


@pytest.mark.slow
def test_a_packed_bin_has_the_loss_of_one_question_a_row(drawn: Path):
    tokenizer = load_tokenizer(drawn / "tokenizer")
    first = next(read_questions(drawn, "train")).image_id
    questions = [qa for qa in read_questions(drawn, "train") if qa.image_id == first]
    packed = list(pack(questions, tokenizer, bin_length=1024, too_long=[]))
    single = [one for qa in questions for one in pack([qa], tokenizer, bin_length=160, too_long=[])]
    assert len(packed) == 1 and len(single) == len(questions) > 10
    model = Decoder(DecoderConfig.nano(vocab=tokenizer.size), rngs=nnx.Rngs(0))
    visual = jax.random.normal(jax.random.key(1), (1, 32, 192))
    slot = tokenizer.id(IMAGE_PAD)

    def loss(visual: jax.Array, bins: list[dict]) -> jax.Array:
        return answer_loss(model, as_batch(bins), jnp.repeat(visual, len(bins), 0), slot, "token")[0]

    with jax.default_matmul_precision("highest"):
        values = [jax.jit(jax.value_and_grad(lambda v, bins=bins: loss(v, bins)))(visual) for bins in (packed, single)]
    np.testing.assert_allclose(values[0][0], values[1][0], rtol=1e-5)
    np.testing.assert_allclose(values[0][1], values[1][1], atol=1e-6)


def test_a_branch_sees_the_prefix_and_itself_only():
    mask = np.asarray(branch_mask(jnp.asarray([[0, 0, 1, 1, 2, 2, -1]])))[0]
    assert mask[3].tolist() == [True, True, True, True, False, False, False]
    assert mask[5].tolist() == [True, True, False, False, True, True, False]
    assert mask[1].tolist() == [True, True, False, False, False, False, False]
    assert mask[6].tolist() == [False] * 6 + [True]
