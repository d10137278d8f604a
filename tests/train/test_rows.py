"""How questions lie in a row changes nothing but the work: one image, several images and one question a row agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_prep import prompts
from data_prep.schema import QA
from data_prep.tokens import PAD, pack
from pbs_jax.data.rows import (
    QUERY_BLOCK,
    KeyLists,
    PackedRows,
    before_image,
    key_lists,
    plan_rows,
    split_questions,
    with_keys,
)
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.train import answers, chunked_loss
from pbs_jax.train.answers import answer_loss, branch_mask

SPECIALS = (prompts.IM_START, prompts.IM_END, prompts.VISION_START, prompts.VISION_END, prompts.IMAGE_PAD, PAD)
TINY = DecoderConfig.nano(
    vocab=262, dim=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn_dim=32, mrope_section=(2, 3, 3)
)


class Bytes:
    """A tokenizer of bytes and the special tokens."""

    def id(self, token: str) -> int:
        return 256 + SPECIALS.index(token)

    def encode(self, text: str) -> list[int]:
        for special in SPECIALS:
            text = text.replace(special, chr(0xE000 + SPECIALS.index(special)))
        return [256 + ord(c) - 0xE000 if 0xE000 <= ord(c) < 0xE010 else ord(c) % 256 for c in text]


@pytest.fixture(scope="module")
def bins() -> list[dict[str, np.ndarray]]:
    """Three images with three, two and one question, as `QuestionBins` gives them."""
    asked = [
        ("a", "Is it round?", "True"),
        ("a", "Colour?", "pink"),
        ("a", "Name it.", "neutrophil"),
        ("b", "Lobes?", "two"),
    ]
    asked += [("b", "Is it large?", "False"), ("c", "What stands out?", "granules")]
    facts = {"level": "cell", "domain": "id", "split": "train", "task": "morphology", "question_type": "open"}
    questions = [
        QA(id=str(i), image_id=image, question=question, answer=answer, **facts)
        for i, (image, question, answer) in enumerate(asked)
    ]
    examples = []
    for number, record in enumerate(pack(questions, Bytes(), bin_length=320, too_long=[])):
        where = np.flatnonzero(record["targets"] >= 0)
        answers_ = np.pad(where, (0, 60 - len(where)), constant_values=-1).astype(np.int32)
        branch = record["segments"][where]
        shares = np.pad(1.0 / np.bincount(branch)[branch], (0, 60 - len(where))).astype(np.float32)
        firsts = np.pad(np.diff(branch, prepend=-1) != 0, (0, 60 - len(where)))
        names = ("tokens", "targets", "segments", "positions")
        example = {name: record[name] for name in names} | {"answers": answers_, "shares": shares, "firsts": firsts}
        visual = np.random.default_rng(number).standard_normal((32, TINY.dim)).astype(np.float32)
        examples.append(example | {"visual": visual, "index": np.asarray(number, np.int32)})
    return examples


def stacked(rows) -> dict[str, jax.Array]:
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


@pytest.mark.parametrize("weighting", ["token", "answer"])
def test_all_forms_have_one_loss_and_one_gradient(bins, weighting):
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    forms = {"image": bins, "images": PackedRows(bins, 3), "question": split_questions(bins)}
    forms |= {f"{name}, keys listed": KeyLists(forms[name]) for name in ("image", "images")}

    @jax.jit
    def loss(visual, batch):
        tokens = visual.reshape(batch["tokens"].shape[0], -1, TINY.dim)
        return answer_loss(model, batch, tokens, Bytes().id(prompts.IMAGE_PAD), weighting)

    found = {}
    with jax.default_matmul_precision("highest"):
        for name, rows in forms.items():
            batch = stacked(rows)
            (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(batch["visual"], batch)
            per_image = np.zeros((len(bins), 32, TINY.dim))
            np.add.at(per_image, np.asarray(batch["index"]).ravel(), np.asarray(gradient).reshape(-1, 32, TINY.dim))
            found[name] = {"loss": value, **metrics, "gradient": per_image}
    for name in forms:
        for figure, value in found[name].items():
            expected = found["image"][figure]
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7, err_msg=f"{name} {figure}")


def test_lists_of_keys_hold_all_that_a_block_sees_and_pay_in_long_rows_alone(bins):
    rows = PackedRows(bins, 3)
    row = rows[0]
    mask = np.asarray(branch_mask(jnp.asarray(row["segments"])[None], jnp.asarray(row["groups"])[None]))[0]
    for block, places in enumerate(key_lists(row)):
        seen = mask[block * QUERY_BLOCK : (block + 1) * QUERY_BLOCK].any(axis=0)
        assert places.tolist() == np.flatnonzero(seen).tolist(), f"block {block}"
    assert "keys" in with_keys(rows)[0]
    assert "keys" not in with_keys(split_questions(bins))[0]


def test_a_row_of_images_holds_the_system_turn_once_and_its_images_apart(bins):
    row = PackedRows(bins, 3)[0]
    before = before_image(bins[0])
    assert row["tokens"][:before].tolist() == Bytes().encode(prompts.PREFIX_BEFORE_SLOT)
    own = sum(int((example["segments"] >= 0).sum()) - before for example in bins)
    assert (row["segments"] >= 0).sum() == before + own
    mask = np.asarray(branch_mask(jnp.asarray(row["segments"])[None], jnp.asarray(row["groups"])[None]))[0]
    groups = row["groups"]
    second = np.flatnonzero((groups == 1) & (row["segments"] >= 0))
    seen = {int(group) for group in groups[mask[second[-1]]]}
    assert seen == {-1, 1}, "a question of the second image sees another image"
    assert row["index"].tolist() == list(PackedRows(bins, 3).plan[0])


def test_a_long_example_gets_a_row_with_fewer_others():
    rows, length = plan_rows([598, *[370] * 20], 3)
    assert sorted(i for row in rows for i in row) == list(range(21))
    assert length < 598 + 2 * 370
    assert all(sum([598, *[370] * 20][i] for i in row) <= length for row in rows)


def test_slices_of_the_vocabulary_loss_give_the_whole(monkeypatch):
    model = Decoder(TINY, rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(0), (2, 7, TINY.dim))
    targets = jax.random.randint(jax.random.key(1), (2, 7), 0, TINY.vocab)

    def total(hidden):
        losses, right = chunked_loss.token_losses(model, hidden, targets)
        return losses.sum(), (losses, right)

    whole = jax.value_and_grad(total, has_aux=True)(hidden)
    monkeypatch.setattr(chunked_loss, "SLICE_BYTES", 4 * 2 * TINY.vocab * 3)  # three of the seven positions at a time
    sliced = jax.value_and_grad(total, has_aux=True)(hidden)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6), whole, sliced)
    assert answers.token_losses is chunked_loss.token_losses
