"""Phase 0a, `backbone` (nano and small only): a small ViT learns the cell labels, in place of DinoBloom.

Trains ViT + heads; cross-entropy on the five classes, plus the eleven attributes where an expert gave them. It reads
the train split only. The 7b size has no such phase: DinoBloom is loaded and frozen (paper section 3.4).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from data_prep.io import read_manifest
from data_prep.schema import ATTRIBUTES, WHITE_CELL_CLASSES
from data_prep.stain_match import density_of
from pbs_jax.data.augment import Acquisition, acquire, augment, normalise
from pbs_jax.data.examples import CellImages, Preloaded
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.sizes import get_size
from pbs_jax.models.vit import ViT
from pbs_jax.sharding.mesh import fetch
from pbs_jax.sharding.rules import HEAD_RULES, VIT_RULES
from pbs_jax.train.phase import Phase, batches, parameters
from pbs_jax.train.state import Params

OUTPUTS = {"label": len(WHITE_CELL_CLASSES)} | {name: len(values) for name, values in ATTRIBUTES.items()}


def build(config: Any) -> Phase:
    """config: size, seed, data.root, batch_size, attribute_weight, label_smoothing, acquisition."""
    root = Path(config.data.root)
    limits = Acquisition(**config.acquisition)
    vit_config = get_size(config.size).vit
    vit_graph, vit = parameters(lambda rngs: ViT(vit_config, rngs=rngs), config.seed)
    head_graph, head = parameters(lambda rngs: ClassifierHead(vit_config.dim, OUTPUTS, rngs=rngs), config.seed)

    def logits(trainable: Params, images: jax.Array) -> dict[str, jax.Array]:
        features = nnx.merge(vit_graph, trainable["backbone"])(images)
        return nnx.merge(head_graph, trainable["head"])(features["x_prenorm"])

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        images = batch["image"]
        if key is not None:
            # 100: apart from the six keys that `augment` splits off, which fold_in(key, 0..5) would give again.
            images = acquire(augment(images, key), jax.random.fold_in(key, 100), limits)
        predicted = logits(trainable, normalise(images))
        label = _cross_entropy(predicted["label"], batch["label"], config.label_smoothing)
        attributes = [
            _cross_entropy(predicted[name], batch["attributes"][:, k], config.label_smoothing)
            for k, name in enumerate(ATTRIBUTES)
        ]
        attribute = sum(attributes) / len(attributes)
        return label + config.attribute_weight * attribute, {"label": label, "attribute": attribute}

    cells = CellImages(root, "train", vit_config.image_size)
    train = Preloaded(cells)
    val = batches(Preloaded(CellImages(root, "val", vit_config.image_size)), config.batch_size)
    predict = jax.jit(
        lambda trainable, images: {k: v.argmax(-1) for k, v in logits(trainable, normalise(images)).items()}
    )

    def evaluate(trainable: Params, frozen: Params) -> dict[str, float]:
        hits: dict[str, list[np.ndarray]] = {name: [] for name in OUTPUTS}
        for batch, real in val:
            predicted = predict(trainable, batch["image"])
            golds = {"label": batch["label"]} | {name: batch["attributes"][:, k] for k, name in enumerate(ATTRIBUTES)}
            for name, gold in golds.items():
                known = real & (gold >= 0)
                hits[name].append((fetch(predicted[name]) == gold)[known])
        return {
            f"{name}_accuracy": float(np.concatenate(hit).mean()) for name, hit in hits.items() if sum(map(len, hit))
        }

    manifest = read_manifest(root / "cells")
    density = density_of(example["image"] for example in train)
    return Phase(
        name="backbone",
        trainable={"backbone": vit, "head": head},
        frozen={},
        rules={"backbone": VIT_RULES, "head": HEAD_RULES},
        loss=loss,
        examples=train,
        evaluate=evaluate,
        facts={
            "size": config.size,
            "datasets": {"cells": manifest["content_id"]},
            "trained_on": "train split",
            **({"density": dataclasses.asdict(density)} if density else {}),
        },
        example_id=cells.image_id,
    )


def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    """Mean over the known labels (>= 0); 0 when there is none."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    losses = jnp.where(labels >= 0, optax.softmax_cross_entropy(logits, targets), 0.0)
    return losses.sum() / jnp.maximum((labels >= 0).sum(), 1)
