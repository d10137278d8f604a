"""Phase 1, `cell_representation` (paper section 3.4.1): the Q-Former learns from cell captions, BLIP-2 stage 1.

Trains the Q-Former on frozen backbone tokens with three losses of weight 1: image-text contrast (max over queries),
image-text matching (hard negatives), caption generation. Captions here are templated, so two cells of a batch often
share one: such pairs count as positives, not as negatives.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_prep.io import read_manifest
from data_prep.tokens import load_tokenizer
from pbs_jax.data.examples import CellCaptions, FeatureTable, Preloaded
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.qformer_losses import phase1_losses
from pbs_jax.models.sizes import Size, of_config, with_words
from pbs_jax.sharding.rules import QFORMER_RULES
from pbs_jax.train import handover
from pbs_jax.train.checkpoint import compare_trees
from pbs_jax.train.phase import Networks, Phase, batches, definition, parameters
from pbs_jax.train.state import Params
from pbs_jax.train.step import LossFn

LOSSES = ("itc", "itm", "lm")


def networks(size: Size) -> Networks:
    return {"qformer": lambda rngs: QFormer(size.qformer, rngs=rngs)}


def make_loss(size: Size) -> LossFn:
    """Loss of a batch of `CellCaptions`: the sum of itc, itm and lm.

    They are also its metrics, and `repeated`: the share of cells whose caption another cell of the batch has as well.
    """
    graph = definition(networks(size)["qformer"])

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        model = nnx.merge(graph, trainable["qformer"])
        text = batch["text"]
        positives = (text[:, None] == text[None]).all(-1)
        negative_key, dropout_key = jax.random.split(jax.random.key(0) if key is None else key)
        losses = phase1_losses(
            model,
            batch["features"].astype(jnp.float32),
            text,
            negative_key,
            positives=positives,
            dropout_key=None if key is None else dropout_key,
        )
        repeated = (positives.sum(1) > 1).mean()
        return losses["loss"], {name: losses[name] for name in LOSSES} | {"repeated": repeated}

    return loss


def words_folder(config: Any) -> Path:
    """The captions' tokenizer: an imported Q-Former (BERT's words) brings its own, others read the language model's."""
    root = Path(config.data.root)
    words = Path(config.words or Path(config.init_from.qformer or root) / "tokenizer")
    return words if config.words or words.is_dir() else root / "tokenizer"


def build(config: Any) -> Phase:
    """config: size, seed, queries, data.root, words, batch_size, text_length, init_from.qformer (an imported one; empty = fresh)."""
    root = Path(config.data.root)
    tokenizer = load_tokenizer(root / "tokenizer")
    words = words_folder(config)
    reader = load_tokenizer(words)
    size = of_config(config, tokenizer, config.queries)
    own_shape: dict[str, Any] = {}
    if config.words:
        size = dataclasses.replace(size, qformer=with_words(size.qformer, reader))
        own_shape = {"words": str(words), "words_sha256": reader.sha256}
    if config.words or config.queries:
        own_shape["qformer"] = dataclasses.asdict(size.qformer)
    _, qformer = parameters(networks(size)["qformer"], config.seed)
    if config.init_from.qformer:
        before = handover.load(config.init_from.qformer, ["qformer"])
        compare_trees(config.init_from.qformer, before, {"qformer": qformer})
        qformer = before["qformer"]
    loss = make_loss(size)
    features = FeatureTable(Path(config.data.features or root), ("train", "val"))
    captions = [CellCaptions(root, split, features, reader, config.text_length) for split in ("train", "val")]
    train, held_out = map(Preloaded, captions)
    # Whole batches only: contrast against a batch is the measure. A split that has none is one short batch.
    whole = min(config.batch_size, max(len(held_out), 1))
    val = [batch for batch, real in batches(held_out, whole) if real.all()]
    step = jax.jit(lambda trainable, batch: loss(trainable, {}, batch, None))

    def evaluate(trainable: Params, frozen: Params) -> dict[str, float]:
        rows = [step(trainable, batch) for batch in val]
        values = {"loss": [float(value) for value, _ in rows]}
        for name in (*LOSSES, "repeated"):
            values[name] = [float(metrics[name]) for _, metrics in rows]
        return {name: float(np.mean(value)) for name, value in values.items()}

    return Phase(
        name="cell_representation",
        trainable={"qformer": qformer},
        frozen={},
        rules={"qformer": QFORMER_RULES},
        loss=loss,
        examples=train,
        evaluate=evaluate,
        facts={
            "size": config.size,
            "tokenizer_sha256": tokenizer.sha256,
            "datasets": {"cells": read_manifest(root / "cells")["content_id"], "cell_features": features.content_id},
            **own_shape,
        },
        example_id=captions[0].image_id,
        loaded=("qformer",) if config.init_from.qformer else (),
    )
