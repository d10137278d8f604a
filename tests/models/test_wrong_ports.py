"""A parity test is worth what it refuses: each classic porting mistake moves the golden outputs far beyond tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.models import decoder as decoder_module
from pbs_jax.models import layers, qformer, vit
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.perceiver import PerceiverConfig
from pbs_jax.models.vit import ViT
from pbs_jax.weights.convert import to_flax
from pbs_jax.weights.tables import decoder_table, vit_table
from tests.models.golden import Golden, abstract, close, run
from tests.models.test_pbs_vl_parity import CONFIG
from tests.models.test_perceiver_parity import build
from tests.models.test_qformer_parity import GRAPH as QFORMER_GRAPH
from tests.models.test_qformer_parity import STATE as QFORMER_STATE
from tests.models.test_qformer_parity import TABLE as QFORMER_TABLE
from tests.models.test_vit_parity import MLP


def vit_check(shared: Path, change: Callable[[Any], Any] = lambda tree: tree) -> None:
    """What `test_vit_parity` asserts on the 112-pixel image, after `change` of the parameters."""
    golden = Golden(shared, "dinov2_mlp")
    graph, state = abstract(lambda: ViT(MLP, rngs=nnx.Rngs(0)))
    params = change(to_flax(golden.w, vit_table(MLP), state))
    images = golden.inp["img112"].transpose(0, 2, 3, 1)
    found = run(lambda params, images: nnx.merge(graph, params)(images)["x_prenorm"], params, images)
    close(found, golden.out["off0.1_noaa.img112.x_prenorm"])


def decoder_check(shared: Path, change: Callable[[Any], Any] = lambda tree: tree, config: Any = CONFIG) -> None:
    """The decoder of `test_pbs_vl_parity` alone, from the official embeddings and positions."""
    golden = Golden(shared, "qwen_tiny_n8")
    graph, state = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    weights = {name: value for name, value in golden.w.items() if not name.startswith("model.visual.")}
    params = change(to_flax(weights, decoder_table(CONFIG, "model.language_model."), state))
    mask = golden.inp["train.attention_mask"].astype(bool)
    visible = np.tril(np.ones((mask.shape[1],) * 2, bool)) & mask[:, None, :]
    positions, embeds = golden.out["train.position_ids"].astype(np.int32), golden.out["train.inputs_embeds"]

    def logits(params: Any, embeds: jax.Array) -> jax.Array:
        net = nnx.merge(graph, params)
        return net.logits(net(embeds, jnp.asarray(positions), jnp.asarray(visible))[0])

    close(np.asarray(run(logits, params, embeds))[mask], golden.out["train.logits"][mask])


def qformer_check(shared: Path, change: Callable[[Any], Any] = lambda tree: tree) -> None:
    """The image pass of `test_qformer_parity`, after `change` of the parameters."""
    golden = Golden(shared, "qformer")
    params = change(to_flax(golden.w, QFORMER_TABLE, QFORMER_STATE))
    queries = run(lambda params, images: nnx.merge(QFORMER_GRAPH, params).encode(images), params, golden.inp["images"])
    close(queries, golden.out["image_pass.last_hidden_state"])


def perceiver_check(shared: Path, change: Callable[[Any], Any] = lambda tree: tree) -> None:
    """The resampler of `test_perceiver_parity` without a mask, after `change` of the parameters."""
    golden = Golden(shared, "perceiver_cell")
    graph, params, _ = build(golden, PerceiverConfig(input_dim=40, dim=48, latents=8, heads=4))
    close(run(lambda params, x: nnx.merge(graph, params)(x), change(params), golden.inp["x"]), golden.out["nomask"])


def swap_keys_and_values(tree: dict[str, Any]) -> dict[str, Any]:
    blocks = dict(tree["blocks"])
    blocks["qkv"] = {
        name: np.concatenate([q, v, k], axis=-1)
        for name, value in blocks["qkv"].items()
        for q, k, v in [np.split(value, 3, axis=-1)]
    }
    return {**tree, "blocks": blocks}


def drop_layer_scale(tree: dict[str, Any]) -> dict[str, Any]:
    ones = {name: np.ones_like(tree["blocks"][name]) for name in ("ls1", "ls2")}
    return {**tree, "blocks": {**tree["blocks"], **ones}}


def swap_in_cross_attention(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "cross": {**tree["cross"], "key": tree["cross"]["value"], "value": tree["cross"]["key"]}}


def feed_queries_as_text(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "layers": {**tree["layers"], "query_ffn": tree["layers"]["text_ffn"]}}


def swap_in_perceiver(tree: dict[str, Any]) -> dict[str, Any]:
    packed = {"blocks": {"qkv": tree["blocks"]["in_proj"]}}
    return {**tree, "blocks": {**tree["blocks"], "in_proj": swap_keys_and_values(packed)["blocks"]["qkv"]}}


def swap_decoder_keys_and_values(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "layers": {**tree["layers"], "k": tree["layers"]["v"], "v": tree["layers"]["k"]}}


def refused(check: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match="off by"):
        check()


def test_the_right_port_passes(shared: Path) -> None:
    vit_check(shared)
    decoder_check(shared)


@pytest.mark.slow
def test_the_right_qformer_and_perceiver_pass(shared: Path) -> None:
    qformer_check(shared)
    perceiver_check(shared)


@pytest.mark.slow
@pytest.mark.parametrize("change", [swap_in_cross_attention, feed_queries_as_text])
def test_wrong_qformer_weights(shared: Path, change: Callable[[Any], Any]) -> None:
    refused(lambda: qformer_check(shared, change))


@pytest.mark.slow
def test_wrong_perceiver_weights(shared: Path) -> None:
    refused(lambda: perceiver_check(shared, swap_in_perceiver))


@pytest.mark.slow
def test_tanh_gelu_in_the_qformer(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qformer, "gelu", jax.nn.gelu)
    refused(lambda: qformer_check(shared))


@pytest.mark.parametrize("change", [swap_keys_and_values, drop_layer_scale])
def test_wrong_vit_weights(shared: Path, change: Callable[[Any], Any]) -> None:
    refused(lambda: vit_check(shared, change))


def test_tanh_gelu(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit, "gelu", jax.nn.gelu)  # its default is the tanh form
    refused(lambda: vit_check(shared))


def test_decoder_keys_and_values_swapped(shared: Path) -> None:
    refused(lambda: decoder_check(shared, swap_decoder_keys_and_values))


def test_heads_tiled(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query head h must read key head h // (H/K); tiling reads h % K."""

    right = layers.attention

    def tiled(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None, **options: Any) -> jax.Array:
        times = q.shape[2] // k.shape[2]
        return right(q, jnp.tile(k, (1, 1, times, 1)), jnp.tile(v, (1, 1, times, 1)), mask, **options)

    monkeypatch.setattr(layers, "attention", tiled)
    monkeypatch.setattr(decoder_module, "attention", tiled)
    refused(lambda: decoder_check(shared))


@pytest.mark.parametrize("sections", [(1, 1, 2), None])
def test_wrong_rotary_sections(shared: Path, sections: Any) -> None:
    """(In a 1 x N strip t and h are always equal, so which of the two a frequency reads cannot matter.)"""
    refused(lambda: decoder_check(shared, config=dataclasses.replace(CONFIG, mrope_section=sections)))
