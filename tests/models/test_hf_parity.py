"""Our networks against transformers' own classes, built here with random weights and read from the files they save."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pbs_jax.models.decoder import Decoder
from pbs_jax.models.pbs_vl import insert_visual, rope_positions
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.qformer_losses import itc_similarity
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.train.phase import definition
from pbs_jax.weights.importers import bert, blip2, decoder_shape, decoder_source, dinobloom, language_model
from pbs_jax.weights.stream import stream
from tests.models.golden import close, run
from tests.models.references import spread, tiny_blip2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.torch]
TOLERANCE = 1e-5  # of the reference's largest value


@pytest.fixture(autouse=True)
def exact() -> Any:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    with jax.default_matmul_precision("highest"):
        yield
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("swiglu", [False, True])
def test_dinov2(tmp_path: Path, swiglu: bool) -> None:
    config = transformers.Dinov2Config(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, image_size=112, patch_size=14, use_swiglu_ffn=swiglu
    )
    model = spread(transformers.Dinov2Model(config))
    model.save_pretrained(tmp_path)
    done = dinobloom(tmp_path, "7b")
    shape = ViTConfig(**done.facts["vit"])
    graph = definition(lambda rngs: ViT(shape, rngs=rngs))
    for height, width in ((112, 112), (140, 98)):
        images = torch.randn(2, 3, height, width)
        theirs = model(images)
        pixels = jnp.asarray(images.permute(0, 2, 3, 1).numpy())
        ours = run(lambda tree, x: nnx.merge(graph, tree)(x), done.trees["backbone"], pixels)
        close(ours["x_norm_clstoken"], theirs.pooler_output.numpy(), TOLERANCE)
        close(ours["x_norm_patchtokens"], theirs.last_hidden_state[:, 1:].numpy(), TOLERANCE)
        close(ours["x_prenorm"], model(images, output_hidden_states=True).hidden_states[-1].numpy(), TOLERANCE)


def test_blip2_image_text_retrieval(tmp_path: Path) -> None:
    """Image pass, text pass, contrast and matching of `Blip2ForImageTextRetrieval`, with 5 queries."""
    model = tiny_blip2()
    model.save_pretrained(tmp_path)
    done = blip2(tmp_path, "7b")
    shape = dataclasses.replace(QFormerConfig(**done.facts["qformer"]), pad_id=0)
    graph = definition(lambda rngs: QFormer(shape, rngs=rngs))
    images = torch.randn(3, 3, 28, 28)
    ids = torch.tensor([[1, 7, 8, 9, 2], [1, 11, 2, 0, 0], [1, 12, 13, 2, 0]])
    mask = (ids != 0).long()
    encoded = model.vision_model(images).last_hidden_state  # their vision model ends with what is our ln_vision
    before = model.vision_model.encoder(model.vision_model.embeddings(images)).last_hidden_state
    queries = model.qformer(
        query_embeds=model.query_tokens.expand(3, -1, -1), encoder_hidden_states=encoded
    ).last_hidden_state
    text = model.qformer(query_embeds=model.embeddings(input_ids=ids), query_length=0, attention_mask=mask)
    matching = model(images, ids, attention_mask=mask, use_image_text_matching_head=True).logits_per_image
    contrast = model(images, ids, attention_mask=mask, use_image_text_matching_head=False).logits_per_image

    def outputs(tree: Any, visual: jax.Array, ids: jax.Array) -> Any:
        net = nnx.merge(graph, tree)
        hidden, text = net.encode(visual), net.text_pass(ids)
        similarity = itc_similarity(net.vision_proj(hidden), net.text_proj(text[:, 0]), jnp.float32(1))
        return hidden, text, similarity, net.itm_logits(visual, ids)

    ours = run(outputs, done.trees["qformer"], jnp.asarray(before.numpy()), jnp.asarray(ids.numpy()))
    real = mask.numpy().astype(bool)
    close(ours[0], queries.numpy(), TOLERANCE)
    close(np.asarray(ours[1])[real], text.last_hidden_state.numpy()[real], TOLERANCE)
    close(ours[2], contrast.numpy(), TOLERANCE)
    close(ours[3], matching.numpy(), TOLERANCE)


def test_bert_as_the_text_half(tmp_path: Path) -> None:
    """The text pass of a Q-Former from BERT is BERT, but for the token types that BLIP-2 leaves out."""
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=30
    )
    model = spread(transformers.BertForPreTraining(config))
    model.bert.embeddings.token_type_embeddings.weight.zero_()
    model.save_pretrained(tmp_path)
    done = bert(tmp_path, "7b")
    shape = QFormerConfig(**done.facts["qformer"] | {"dtype": "float32"})
    graph = definition(lambda rngs: QFormer(shape, rngs=rngs))
    ids = torch.tensor([[1, 7, 8, 9, 2], [1, 11, 2, 0, 0]])
    theirs = model.bert(ids, attention_mask=(ids != 0).long()).last_hidden_state.numpy()
    ours = run(lambda tree, ids: nnx.merge(graph, tree).text_pass(ids), done.trees["qformer"], jnp.asarray(ids.numpy()))
    real = ids.numpy() != 0
    close(np.asarray(ours)[real], theirs[real], TOLERANCE)


TEXT = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE, STRIP = 50, 4


def decoder(folder: Path) -> tuple[Any, Any, Any]:
    """(shape, definition, parameters) of what a model saved in `folder`, through the streaming loader."""
    source, shape, table, _ = decoder_source(folder)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = language_model(folder, "small").trees["language_model"]
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=one), tree)
    graph = definition(lambda rngs: Decoder(shape, rngs=rngs))
    return shape, graph, stream(source, table, target)


@pytest.mark.parametrize("tied", [False, True])
def test_llama(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(
        **TEXT, tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    model = spread(transformers.LlamaForCausalLM(config))
    model.save_pretrained(tmp_path)
    shape, graph, tree = decoder(tmp_path)
    assert shape.tied == tied and not shape.qkv_bias
    ids = torch.randint(0, 60, (2, 9))

    def logits(tree: Any, ids: jax.Array) -> jax.Array:
        net = nnx.merge(graph, tree)
        positions = jnp.broadcast_to(jnp.arange(9), ids.shape)
        return net.logits(net(net.embed(ids), positions, jnp.tril(jnp.ones((2, 9, 9), bool)))[0])

    close(run(logits, tree, jnp.asarray(ids.numpy())), model(ids).logits.numpy(), TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qwen2_5_vl_with_text_one_and_two_images_padded_on_either_side(tmp_path: Path, dtype: str) -> None:
    """Positions equal `get_rope_index`; logits those of `Qwen2_5_VLForConditionalGeneration` on embeddings with images."""
    text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6}}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "spatial_merge_size": 1,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=51, vision_start_token_id=52,
        vision_end_token_id=53, tie_word_embeddings=False,
    )  # fmt: skip
    model = spread(transformers.Qwen2_5_VLForConditionalGeneration(config))
    model.save_pretrained(tmp_path)
    shape, graph, tree = decoder(tmp_path)
    assert shape == dataclasses.replace(decoder_shape(config.to_dict()), dtype="float32") and shape.mrope_section == (
        2,
        1,
        1,
    )

    def cast(arrays: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), arrays)

    image = [52, *[IMAGE] * STRIP, 53]
    rows = [[5, 6, 7, 8], [5, *image, 6, 7], [5, *image, 6, *image, 7, 8]]
    length = max(map(len, rows))
    for side in ("left", "right"):
        ids = np.zeros((3, length), np.int64)
        mask = np.zeros((3, length), np.int64)
        for r, row in enumerate(rows):
            at = slice(length - len(row), None) if side == "left" else slice(len(row))
            ids[r, at], mask[r, at] = row, 1
        count = [row.count(52) for row in rows]
        grid = torch.tensor([[1, 1, STRIP]] * sum(count))
        kinds = torch.from_numpy((ids == IMAGE).astype(np.int64))
        theirs, _ = model.model.get_rope_index(
            torch.from_numpy(ids), mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=torch.from_numpy(mask)
        )
        ours = rope_positions(ids, mask, IMAGE)
        real = mask.astype(bool)
        assert np.array_equal(ours[:, real], theirs.numpy()[:, real])
        visual = np.random.default_rng(1).standard_normal((3, 2 * STRIP, 32), np.float32)
        net = nnx.merge(graph, tree)
        embeds = insert_visual(net.embed(jnp.asarray(ids)), jnp.asarray(ids), jnp.asarray(visual), IMAGE)
        visible = jnp.tril(jnp.ones((length, length), bool)) & mask[:, None, :].astype(bool)
        visible = visible | jnp.eye(length, dtype=bool)
        other = dataclasses.replace(shape, dtype=dtype)
        typed = definition(lambda rngs, other=other: Decoder(other, rngs=rngs))

        def logits(tree: Any, embeds: jax.Array, typed: Any = typed, ours: Any = ours, visible: Any = visible) -> Any:
            net = nnx.merge(typed, tree)
            return net.logits(net(embeds, jnp.asarray(ours), visible)[0])

        found = run(logits, cast(tree), cast(embeds))
        as_torch = model.to(getattr(torch, dtype))
        reference = as_torch(
            inputs_embeds=torch.tensor(np.asarray(embeds)).to(getattr(torch, dtype)), attention_mask=torch.from_numpy(mask),
            position_ids=torch.from_numpy(ours.astype(np.int64)),
        ).logits.float().numpy()  # fmt: skip
        close(np.asarray(found)[real], reference[real], TOLERANCE if dtype == "float32" else 3e-2)
