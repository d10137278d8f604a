"""Who sees whom in the Q-Former's passes (LAVIS issues 342, 393, 402, 779): change one input, look at the outputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.models.qformer import QFormer, QFormerConfig
from tests.models.golden import compiled, fresh

CONFIG = QFormerConfig.nano(
    dropout=0.1, dim=32, heads=2, ffn_dim=48, encoder_width=24, queries=4, vocab=50, pad_id=0, cls_id=1, dec_id=3
)
B, N, T = 2, 9, 8
CHANGED = 4  # the text position, and the visual token, that is changed


@pytest.fixture(scope="module")
def passes() -> Any:
    graph, params = nnx.split(fresh(lambda: QFormer(CONFIG, rngs=nnx.Rngs(0))))
    params = jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    program = None

    def everything(params: Any, visual: jax.Array, ids: jax.Array) -> dict[str, jax.Array]:
        model = nnx.merge(graph, params)
        hidden, kv, _ = model.image_pass(visual)
        return {
            "queries": hidden,
            "queries_masked": model.encode(visual, jnp.broadcast_to(jnp.arange(N) != CHANGED, (B, N))),
            "queries_dropout": model.encode(visual, key=jax.random.key(5)),
            "text": model.text_pass(ids),
            "itm": model.itm_logits(visual, ids),
            "lm": model.lm_logits(ids, kv),
        }

    def run(visual: jax.Array, ids: jax.Array, pad_embedding: float = 0.0) -> dict[str, np.ndarray]:
        nonlocal program
        changed = nnx.to_pure_dict(params)
        changed["words"] = (
            changed["words"].at[CONFIG.pad_id].set(pad_embedding * jnp.arange(CONFIG.dim))
        )  # no norm removes a ramp
        if program is None:
            program = compiled(everything, changed, visual, ids)
        return jax.tree.map(np.asarray, program(changed, visual, ids))

    return run


@pytest.fixture(scope="module")
def inputs() -> tuple[jax.Array, jax.Array]:
    visual = jax.random.normal(jax.random.key(1), (B, N, CONFIG.encoder_width))
    ids = jax.random.randint(jax.random.key(2), (B, T), 4, CONFIG.vocab).at[:, 0].set(CONFIG.cls_id)
    return visual, ids.at[1, 6:].set(CONFIG.pad_id)


def test_a_text_token_reaches_itm_and_later_captions_only(passes: Any, inputs: Any) -> None:
    visual, ids = inputs
    before, after = passes(visual, ids), passes(visual, ids.at[:, CHANGED].set(7))
    assert np.array_equal(before["queries"], after["queries"])
    assert np.array_equal(before["lm"][:, :CHANGED], after["lm"][:, :CHANGED])
    assert not np.allclose(before["lm"][:, CHANGED], after["lm"][:, CHANGED])
    assert not np.allclose(before["itm"], after["itm"])
    assert not np.allclose(before["text"][:, 0], after["text"][:, 0])  # bidirectional


def test_an_image_reaches_captions_and_itm_but_not_the_text_features(passes: Any, inputs: Any) -> None:
    visual, ids = inputs
    before, after = passes(visual, ids), passes(visual.at[:, CHANGED].multiply(-1.0), ids)
    assert np.array_equal(before["text"], after["text"])
    for name in ("queries", "itm", "lm"):
        assert not np.allclose(before[name], after[name]), name


def test_padding_is_invisible(passes: Any, inputs: Any) -> None:
    """Whatever the PAD row holds, no real position notices."""
    before, after = passes(*inputs), passes(*inputs, pad_embedding=3.0)
    assert np.array_equal(before["itm"], after["itm"])
    for name in ("text", "lm"):
        assert np.array_equal(before[name][0], after[name][0])
        assert np.array_equal(before[name][1, :6], after[name][1, :6])
        assert not np.allclose(before[name][1, 6:], after[name][1, 6:])


def test_zero_visual_tokens_are_hidden_from_the_image_pass_but_not_from_itm(passes: Any, inputs: Any) -> None:
    visual, ids = inputs
    shown, zeroed = passes(visual, ids), passes(visual.at[:, CHANGED].set(0.0), ids)
    assert np.array_equal(zeroed["queries"], shown["queries_masked"])
    assert not np.allclose(zeroed["queries"], shown["queries"])
    again = passes(visual.at[:, CHANGED].set(0.0), ids)
    assert np.array_equal(again["itm"], zeroed["itm"])


def test_dropout_needs_a_key(passes: Any, inputs: Any) -> None:
    outputs = passes(*inputs)
    assert not np.allclose(outputs["queries_dropout"], outputs["queries"])
    assert np.array_equal(outputs["queries"], passes(*inputs)["queries"])
