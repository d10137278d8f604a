"""The Q-Former against the official PyTorch numbers: four passes, three losses, all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.qformer_losses import itc_similarity, phase1_losses
from pbs_jax.weights.convert import to_flax, to_torch
from pbs_jax.weights.tables import qformer_table
from tests.models.golden import Golden, abstract, close, grads_close, run, torch_grads, tree_close

CONFIG = QFormerConfig(
    dim=48, layers=4, heads=4, ffn_dim=96, vocab=101, max_positions=40, encoder_width=40, queries=8, projection=20,
    pad_id=0, cls_id=1, dec_id=100,
)  # fmt: skip
TABLE = qformer_table(CONFIG)
GRAPH, STATE = abstract(lambda: QFormer(CONFIG, rngs=nnx.Rngs(0)))
LOSSES = ("itc", "itm", "lm", "loss")


@pytest.fixture(scope="module")
def golden(shared: Path) -> Golden:
    return Golden(shared, "qformer")


@pytest.fixture(scope="module")
def params(golden: Golden) -> dict[str, Any]:
    return to_flax(golden.w, TABLE, STATE)


@pytest.fixture(scope="module")
def passes(golden: Golden, params: dict[str, Any]) -> dict[str, Any]:
    """All passes on the golden batch, as one program."""

    def outputs(
        params: Any, images: jax.Array, ids: jax.Array, image_for_text: jax.Array, text_for_image: jax.Array
    ) -> Any:
        model, own = nnx.merge(GRAPH, params), jnp.arange(4)
        hidden, kv, _ = model.image_pass(images)
        text = model.text_pass(ids)
        image_features, text_features = model.vision_proj(hidden), model.text_proj(text[:, 0])
        triples = jnp.concatenate([ids, ids, ids[text_for_image]])
        return {
            "hidden": hidden,
            "kv": kv,
            "text": text,
            "image_features": image_features,
            "text_features": text_features,
            "similarity": itc_similarity(image_features, text_features, model.temperature[...]),
            "itm": model.itm_logits(images, triples, index=jnp.concatenate([own, image_for_text, own])),
            "itm_plain": model.itm_logits(images, ids),
            "lm": model.lm_logits(ids, kv),
        }

    return run(outputs, params, *batch(golden), *negatives(golden))


@pytest.fixture(scope="module")
def gradients(golden: Golden, params: dict[str, Any]) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    """The four losses [4] and their gradients for parameters and images, leading axis 4."""

    def losses(params: Any, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(GRAPH, params)
        values = phase1_losses(model, images, batch(golden)[1], jax.random.key(0), negatives=negatives(golden))
        values = jnp.stack([values[name] for name in LOSSES])
        return values, values

    grads, values = run(jax.jacrev(losses, argnums=(0, 1), has_aux=True), params, batch(golden)[0])
    return values, grads


def batch(golden: Golden) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(golden.inp["images"]), jnp.asarray(golden.out["tokens.input_ids"], jnp.int32)


def negatives(golden: Golden) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(golden.out["neg_image_for_text"]), jnp.asarray(golden.out["neg_text_for_image"])


def test_image_pass(golden: Golden, passes: dict[str, Any]) -> None:
    close(passes["hidden"], golden.out["image_pass.last_hidden_state"])
    for layer in range(CONFIG.layers):
        for name, stacked in zip(("key", "value"), passes["kv"], strict=True):
            close(stacked[layer].transpose(0, 2, 1, 3), golden.out[f"image_pass.past_{name}.{layer}"])


def test_text_pass(golden: Golden, passes: dict[str, Any]) -> None:
    close(passes["text"], golden.out["text_pass.last_hidden_state"])
    close(passes["text_features"], golden.out["text_proj_raw"])


def test_itc_weights(golden: Golden, passes: dict[str, Any]) -> None:
    close(passes["image_features"], golden.out["vision_proj_raw"])
    off_diagonal = jnp.where(jnp.eye(4, dtype=bool), -jnp.inf, passes["similarity"])
    close(jax.nn.softmax(off_diagonal, axis=1), golden.out["itc.weights_i2t"])
    close(jax.nn.softmax(off_diagonal.T, axis=1), golden.out["itc.weights_t2i"])


def test_itm_pass(golden: Golden, passes: dict[str, Any]) -> None:
    close(passes["itm"], golden.out["itm_pass.logits"])
    close(passes["itm_plain"][:, 1], golden.out["compute_itm"])


def test_lm_pass(golden: Golden, passes: dict[str, Any]) -> None:
    close(passes["lm"], golden.out["lm_pass.logits"])


def test_losses(golden: Golden, gradients: Any) -> None:
    expected = [golden.out["loss" if name == "loss" else f"loss_{name}"] for name in LOSSES]
    np.testing.assert_allclose(gradients[0], expected, rtol=1e-5)


def test_gradients(golden: Golden, gradients: Any) -> None:
    params, images = jax.tree.map(np.asarray, gradients[1])
    total = torch_grads(jax.tree.map(lambda leaf: leaf[-1], params), TABLE)
    grads_close(total | {"input_images": images[-1]}, golden.grad)
    tree_close(total, golden.grad)
    assert not total["qformer.Qformer.bert.embeddings.word_embeddings.weight"][CONFIG.pad_id].any()
    for i, loss in enumerate(LOSSES[:-1]):
        one = torch_grads(jax.tree.map(lambda leaf, i=i: leaf[i], params), TABLE)
        for name in ("query_tokens", "temp", "ln_vision.weight"):
            expected = golden.grad.get(f"only_loss_{loss}.qformer.{name}", np.zeros(one[f"qformer.{name}"].shape))
            grads_close({name: one[f"qformer.{name}"]}, {name: expected})


def test_exports_every_official_tensor(golden: Golden, params: dict[str, Any]) -> None:
    """The names and shapes of the official checkpoint, buffers aside; bit-equal but for BERT's unread second bias."""
    exported = to_torch(params, TABLE)
    assert {name: value.shape for name, value in exported.items()} == {
        name: value.shape for name, value in golden.w.items() if not name.endswith("position_ids")
    }
    for name, value in exported.items():
        assert name.endswith("cls.predictions.bias") or np.array_equal(value, golden.w[name]), name
