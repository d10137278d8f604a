"""Phase 4, `slide_qa` (paper sections 3.4.3, 3.5): a second Perceiver reads a slide's patches, a frozen language model answers.

Trains the slide Perceiver and a projector; features of patches (phase 2's, or the raw backbone's as the row to beat) and
the language model are frozen. A slide is a bag: at most `max_patches` patches, spread over it, padding masked.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data_prep.prompts import IMAGE_PAD
from data_prep.tokens import load_tokenizer
from pbs_jax.data.examples import Preloaded
from pbs_jax.data.rows import arrange
from pbs_jax.data.slide_examples import SlideBags, SlideQuestions
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverResampler, encode_slide
from pbs_jax.models.sizes import Size, of_config
from pbs_jax.sharding.rules import DECODER_RULES, PERCEIVER_RULES, PROJECTOR_RULES
from pbs_jax.train import handover
from pbs_jax.train.answers import answer_loss, answer_weight, evaluate_answers, frozen_language_model, with_attention
from pbs_jax.train.phase import Networks, Phase, definition, parameters
from pbs_jax.train.state import Params, tree_sha256
from pbs_jax.train.step import LossFn


def networks(size: Size, dim: int) -> Networks:
    """`dim` is the width of the slide features."""
    shape = size.slide_perceiver(dim)
    return {
        "slide_perceiver": lambda rngs: PerceiverResampler(shape, rngs=rngs),
        "projector": lambda rngs: Projector(shape.dim, size.decoder.dim, rngs=rngs),
        "language_model": lambda rngs: Decoder(size.decoder, rngs=rngs),
    }


def make_loss(size: Size, dim: int, slot_id: int, config: Any) -> LossFn:
    """Loss of a batch of `SlideQuestions`; a row of several slides has `visual` [B, I, N, D] and `mask` [B, I, N]."""
    graphs = {name: definition(make) for name, make in networks(size, dim).items()}

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        features = batch["visual"].astype(jnp.float32)
        mask = batch["mask"].reshape(-1, features.shape[-2])
        mask = mask if key is None else drop_patches(mask, config.patch_dropout, key)
        perceiver = nnx.merge(graphs["slide_perceiver"], trainable["slide_perceiver"])
        tokens = encode_slide(perceiver, features.reshape(-1, *features.shape[-2:]), mask)
        visual = nnx.merge(graphs["projector"], trainable["projector"])(tokens)
        decoder = nnx.merge(graphs["language_model"], frozen["language_model"])
        visual = visual.reshape(features.shape[0], -1, visual.shape[-1])
        return answer_loss(decoder, batch, visual, slot_id, config.weighting)

    return loss


def build(config: Any) -> Phase:
    """config: size, seed, queries, data.{root, features}, batch_size, weighting, images_per_row, int8, max_patches, patch_dropout,

    init_from.language_model (workdir of 0b), init_from.projector (workdir of phase 3, whose projector already
    speaks to that language model; empty = a fresh one, as in the released code).
    """
    root = Path(config.data.root)
    tokenizer = load_tokenizer(root / "tokenizer")
    size = with_attention(of_config(config, tokenizer, config.queries), config.attention)
    before = handover.read(config.init_from.language_model, ("language_model",))
    handover.same_tokenizer(config.init_from.language_model, before["facts"], tokenizer, root / "tokenizer")
    bags = SlideBags(Path(config.data.features or root), ("train", "val"), config.max_patches)
    trainable = {
        name: parameters(networks(size, bags.dim)[name], config.seed)[1] for name in ("slide_perceiver", "projector")
    }
    if config.init_from.projector:
        told = handover.read(config.init_from.projector, ("cell_qa",))["facts"]
        handover.same_tokenizer(config.init_from.projector, told, tokenizer, root / "tokenizer")
        trainable |= handover.load(config.init_from.projector, ["projector"])
    language_model = frozen_language_model(config, size)
    loss = make_loss(size, bags.dim, tokenizer.id(IMAGE_PAD), config)
    slot = tokenizer.id(IMAGE_PAD), size.qformer.queries
    questions = {split: SlideQuestions(root, split, bags, slot) for split in ("train", "val")}
    train, val = (arrange(Preloaded(source), config) for source in questions.values())
    return Phase(
        name="slide_qa",
        trainable=trainable,
        frozen={"language_model": language_model},
        rules={"slide_perceiver": PERCEIVER_RULES, "projector": PROJECTOR_RULES, "language_model": DECODER_RULES},
        loss=loss,
        weight=answer_weight(config.weighting),
        examples=train,
        evaluate=evaluate_answers(loss, val, config.batch_size),
        facts={
            "size": config.size,
            **({"qformer": dataclasses.asdict(size.qformer)} if config.queries else {}),
            "tokenizer_sha256": tokenizer.sha256,
            "features": bags.made_from | {"dim": bags.dim},
            "max_patches": config.max_patches,
            "language_model": str(Path(config.init_from.language_model)),
            "language_model_sha256": tree_sha256(language_model),
            "datasets": {
                "slide_features": bags.content_id,
                "slide_qa_tokens": questions["train"].content_id,
            },
        },
        example_id=questions["train"].image_id,
        loaded=("projector",) if config.init_from.projector else (),
    )


def drop_patches(mask: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """mask bool[B, N] with a share `rate` of its patches hidden, another draw each step; never a slide's last one."""
    kept = mask & jax.random.bernoulli(key, 1.0 - rate, mask.shape)
    return jnp.where(kept.any(1, keepdims=True), kept, mask)
