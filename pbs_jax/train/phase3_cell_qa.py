"""Phase 3, `cell_qa` (paper section 3.4.3): the Q-Former and a projector learn to answer through a frozen language model.

The query tokens of a cell, projected to the language model's width, fill its visual slot; loss on the answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data_prep.prompts import IMAGE_PAD
from data_prep.schema import DataError
from data_prep.tokens import load_tokenizer
from pbs_jax.data.examples import FeatureTable, Preloaded, QuestionBins
from pbs_jax.data.rows import arrange
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.pbs_vl import Projector, visual_tokens
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import Size, of_config, told_queries
from pbs_jax.sharding.rules import DECODER_RULES, PROJECTOR_RULES, QFORMER_RULES
from pbs_jax.train import handover
from pbs_jax.train.answers import answer_loss, answer_weight, evaluate_answers, frozen_language_model, with_attention
from pbs_jax.train.phase import Networks, Phase, definition, parameters
from pbs_jax.train.state import Params, tree_sha256
from pbs_jax.train.step import LossFn


def networks(size: Size) -> Networks:
    return {
        "qformer": lambda rngs: QFormer(size.qformer, rngs=rngs),
        "projector": lambda rngs: Projector(size.qformer.dim, size.decoder.dim, rngs=rngs),
        "language_model": lambda rngs: Decoder(size.decoder, rngs=rngs),
    }


def make_loss(size: Size, slot_id: int, weighting: str) -> LossFn:
    """Loss of a batch of `QuestionBins` with features; a row of several images has `visual` [B, I, 1+N, D]."""
    graphs = {name: definition(make) for name, make in networks(size).items()}

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        features = batch["visual"].astype(jnp.float32)
        visual = visual_tokens(
            nnx.merge(graphs["qformer"], trainable["qformer"]),
            nnx.merge(graphs["projector"], trainable["projector"]),
            features.reshape(-1, *features.shape[-2:]),
            key=key,
        )
        decoder = nnx.merge(graphs["language_model"], frozen["language_model"])
        visual = visual.reshape(features.shape[0], -1, visual.shape[-1])
        return answer_loss(decoder, batch, visual, slot_id, weighting)

    return loss


def build(config: Any) -> Phase:
    """config: size, seed, data.root, batch_size, weighting, images_per_row, int8,

    init_from.{backbone, qformer, language_model} (workdirs of 0a, 1, 0b).
    """
    root = Path(config.data.root)
    tokenizer = load_tokenizer(root / "tokenizer")
    told: dict[str, Any] = {}
    for name, phase in (("qformer", "cell_representation"), ("language_model", "language_model")):
        told[name] = handover.read(config.init_from[name], (phase,))["facts"]
        handover.same_tokenizer(config.init_from[name], told[name], tokenizer, root / "tokenizer")
    shape = (
        {"qformer": told["qformer"]["qformer"]} if "qformer" in told["qformer"] else {}
    )  # where it is not its size's
    size = with_attention(of_config(config, tokenizer, told_queries(shape)), config.attention)
    _, projector = parameters(networks(size)["projector"], config.seed)
    qformer = handover.load(config.init_from.qformer, ["qformer"])["qformer"]
    language_model = frozen_language_model(config, size)
    loss = make_loss(size, tokenizer.id(IMAGE_PAD), config.weighting)
    features = FeatureTable(Path(config.data.features or root), ("train", "val"))
    backbone_sha256 = tree_sha256(handover.load(config.init_from.backbone, ["backbone"])["backbone"])
    if backbone_sha256 != features.backbone_sha256:
        raise DataError(
            f"the cell_features are of another backbone than {config.init_from.backbone}: run `pbs data features`"
        )
    slot = tokenizer.id(IMAGE_PAD), size.qformer.queries
    bins = {split: QuestionBins(root, split, features=features, slot=slot) for split in ("train", "val")}
    train, val = (arrange(Preloaded(source), config) for source in bins.values())
    return Phase(
        name="cell_qa",
        trainable={"qformer": qformer, "projector": projector},
        frozen={"language_model": language_model},
        rules={"qformer": QFORMER_RULES, "projector": PROJECTOR_RULES, "language_model": DECODER_RULES},
        loss=loss,
        weight=answer_weight(config.weighting),
        examples=train,
        evaluate=evaluate_answers(loss, val, config.batch_size),
        facts={
            "size": config.size,
            **shape,
            "tokenizer_sha256": tokenizer.sha256,
            "backbone": str(Path(config.init_from.backbone)),
            "backbone_sha256": backbone_sha256,
            "language_model": str(Path(config.init_from.language_model)),
            "language_model_sha256": tree_sha256(language_model),
            "datasets": {
                "cell_features": features.content_id,
                "cell_qa_tokens": bins["train"].content_id,
            },
        },
        example_id=bins["train"].image_id,
        loaded=("qformer",),
    )
