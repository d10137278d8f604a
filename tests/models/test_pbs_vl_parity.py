"""Slide encoder, projector, image slots, M-RoPE and decoder against the official adapter on a tiny Qwen2.5-VL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.models.decoder import Decoder, DecoderConfig, init_cache
from pbs_jax.models.pbs_vl import Projector, insert_visual, rope_positions
from pbs_jax.models.perceiver import PerceiverConfig, PerceiverResampler, encode_slide
from pbs_jax.weights.convert import to_flax
from pbs_jax.weights.tables import decoder_table, perceiver_table, projector_table
from tests.models.golden import Golden, abstract, close, grads_close, run, torch_grads, tree_close

IMAGE_PAD = 590
CONFIG = DecoderConfig(
    vocab=600, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=64, rope_theta=1e6, mrope_section=(2, 1, 1)
)
ENCODER = "model.visual.encoder.resampler."
TABLES = {
    "encoder": perceiver_table(ENCODER),
    "projector": projector_table(),
    "decoder": decoder_table(CONFIG, "model.language_model."),
}


@pytest.fixture(scope="module", params=[8, 32])
def queries(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def golden(shared: Path, queries: int) -> Golden:
    return Golden(shared, f"qwen_tiny_n{queries}")


@pytest.fixture(scope="module")
def model(golden: Golden, queries: int) -> tuple[dict[str, nnx.GraphDef], dict[str, Any]]:
    perceiver = PerceiverConfig(input_dim=40, dim=48, latents=queries, heads=8)
    modules = {
        "encoder": abstract(lambda: PerceiverResampler(perceiver, rngs=nnx.Rngs(0))),
        "projector": abstract(lambda: Projector(48, CONFIG.dim, rngs=nnx.Rngs(0))),
        "decoder": abstract(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0))),
    }
    weights: dict[str, dict[str, np.ndarray]] = {name: {} for name in modules}
    for name, value in golden.w.items():
        part = re.match(r"model\.visual\.(encoder|projector)", name)
        weights[part.group(1) if part else "decoder"][name] = value
    params = {name: to_flax(weights[name], TABLES[name], state) for name, (_, state) in modules.items()}
    return {name: graph for name, (graph, _) in modules.items()}, params


def test_positions(golden: Golden) -> None:
    for side in ("train", "gen"):
        ids, mask = golden.inp[f"{side}.input_ids"], golden.inp[f"{side}.attention_mask"]
        assert np.array_equal(rope_positions(ids, mask, IMAGE_PAD), golden.out[f"{side}.position_ids"])


@pytest.mark.parametrize("queries", [32], indirect=True)
def test_training_pass_and_gradients(golden: Golden, model: Any) -> None:
    graphs, params = model
    ids, mask, labels = (jnp.asarray(golden.inp[f"train.{name}"]) for name in ("input_ids", "attention_mask", "labels"))
    positions = rope_positions(golden.inp["train.input_ids"], golden.inp["train.attention_mask"], IMAGE_PAD)
    visible = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool)) & mask[:, None, :].astype(bool)

    def loss(trained: Any, decoder: Any, features: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        lm = nnx.merge(graphs["decoder"], decoder)
        tokens = encode_slide(nnx.merge(graphs["encoder"], trained["encoder"]), features)
        visual = nnx.merge(graphs["projector"], trained["projector"])(tokens)
        embeds = insert_visual(lm.embed(ids), ids, visual, IMAGE_PAD)
        hidden, _ = lm(embeds, jnp.asarray(positions), visible)
        logits = lm.logits(hidden)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        keep = labels[:, 1:] >= 0
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels[:, 1:], 0)[..., None], axis=-1)[..., 0]
        value = -jnp.sum(picked * keep) / keep.sum()
        return value, {"tokens": tokens, "visual": visual, "embeds": embeds, "logits": logits, "loss": value}

    trained = {name: params[name] for name in ("encoder", "projector")}
    grads, outputs = run(jax.grad(loss, has_aux=True), trained, params["decoder"], jnp.asarray(golden.inp["features"]))
    close(outputs["tokens"], golden.out["visual_tokens"])
    close(outputs["visual"].reshape(-1, CONFIG.dim), golden.out["adapter_output"])
    close(outputs["embeds"], golden.out["train.inputs_embeds"])
    real = np.asarray(mask, bool)
    close(outputs["logits"][real], golden.out["train.logits"][real])
    np.testing.assert_allclose(outputs["loss"], golden.out["train.loss"], rtol=1e-5)
    named = {key: value for name, grad in grads.items() for key, value in torch_grads(grad, TABLES[name]).items()}
    grads_close(named, golden.grad)
    tree_close(named, golden.grad)


@pytest.mark.parametrize("queries", [8], indirect=True)
def test_prefill_and_cached_steps_reproduce_the_official_logits(golden: Golden, model: Any) -> None:
    """Left-padded prompts into the cache, then the official greedy tokens one at a time."""
    graphs, params = model
    ids, mask = golden.inp["gen.input_ids"], golden.inp["gen.attention_mask"].astype(bool)
    generated = golden.out["gen.rp1.00.tokens"]
    length, steps = ids.shape[1], generated.shape[1]
    prompt_positions = rope_positions(ids, mask, IMAGE_PAD)
    seen = jnp.asarray(np.pad(mask, ((0, 0), (0, steps)), constant_values=True))
    slots = jnp.arange(length + steps)

    def outputs(params: Any, features: jax.Array) -> jax.Array:
        lm = nnx.merge(graphs["decoder"], params["decoder"])
        tokens = encode_slide(nnx.merge(graphs["encoder"], params["encoder"]), features)
        visual = nnx.merge(graphs["projector"], params["projector"])(tokens)
        embeds = insert_visual(lm.embed(jnp.asarray(ids)), jnp.asarray(ids), visual, IMAGE_PAD)
        cache = init_cache(CONFIG, ids.shape[0], length + steps)
        visible = seen[:, None, :] & (slots <= jnp.arange(length)[:, None])
        hidden, cache = lm(embeds, jnp.asarray(prompt_positions), visible, cache, 0)
        start = jnp.asarray(mask.sum(axis=1))

        def step(cache: Any, inputs: Any) -> Any:
            token, k = inputs
            positions = jnp.broadcast_to(start + k, (3, ids.shape[0]))[..., None]
            now = (seen & (slots <= length + k))[:, None, :]
            hidden, cache = lm(lm.embed(token[:, None]), positions, now, cache, length + k)
            return cache, hidden[:, 0]

        inputs = (jnp.asarray(generated.T[:-1]), jnp.arange(steps - 1))
        _, later = jax.lax.scan(step, cache, inputs)
        return lm.logits(jnp.concatenate([hidden[:, -1:], jnp.moveaxis(later, 0, 1)], axis=1))

    logits = run(outputs, params, jnp.asarray(golden.inp["features"]))
    close(logits[:, 0], golden.out["gen.prompt_logits_last"])
    close(logits, golden.out["gen.rp1.00.raw_logits"])
    assert np.array_equal(np.asarray(logits).argmax(-1), generated)
