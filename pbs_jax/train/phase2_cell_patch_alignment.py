"""Phase 2, `cell_patch_alignment` (paper section 3.4.2): a Perceiver reads a patch's backbone tokens as the Q-Former reads its cells.

Trains the patch Perceiver and two projections; the Q-Former of phase 1 is frozen and without dropout (the released code
leaves it on). One example is a cell with the patch it lies in; patches without cells never occur. The projections serve
the loss only: phase 4 reads the Perceiver's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_prep.io import read_manifest
from data_prep.schema import DataError
from data_prep.tokens import load_tokenizer
from pbs_jax.data.examples import FeatureTable
from pbs_jax.data.slide_examples import CellPatches
from pbs_jax.models.alignment import Alignment, alignment_losses, content, diagnose, effective_rank
from pbs_jax.models.perceiver import PerceiverResampler
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import Size, of_config, told_queries
from pbs_jax.sharding.mesh import fetch
from pbs_jax.sharding.rules import ALIGNMENT_RULES, PERCEIVER_RULES, QFORMER_RULES
from pbs_jax.train import handover
from pbs_jax.train.answers import frozen_cast
from pbs_jax.train.phase import Networks, Phase, batches, definition, parameters
from pbs_jax.train.state import Params, tree_sha256
from pbs_jax.train.step import LossFn

TARGETS = ("fixed", "trained")
DIAGNOSED = 512  # pairs of the val split that losses and retrieval are measured on


def networks(size: Size) -> Networks:
    shape, qformer = size.patch_perceiver, size.qformer
    return {
        "qformer": lambda rngs: QFormer(qformer, rngs=rngs),
        "patch_perceiver": lambda rngs: PerceiverResampler(shape, rngs=rngs),
        "alignment": lambda rngs: Alignment(qformer.dim, shape.dim, qformer.projection, rngs=rngs),
    }


def make_project(size: Size, target: str) -> Callable[[Params, Params, dict[str, jax.Array]], tuple[jax.Array, ...]]:
    """project(trainable, frozen, batch of `CellPatches`) -> projected cell tokens, projected patch tokens, patch tokens.

    target "trained": both projections learn, as in the released code. Then slot vectors without content minimise the
    losses. "fixed": the cells' projection stays as drawn, so that only patch tokens that carry their cells do.
    """
    if target not in TARGETS:
        raise DataError(f'config.target "{target}" is unknown: use {" or ".join(TARGETS)}')
    graphs = {name: definition(make) for name, make in networks(size).items()}

    def project(trainable: Params, frozen: Params, batch: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        cells = nnx.merge(graphs["qformer"], frozen["qformer"]).encode(batch["cell"].astype(jnp.float32))
        perceiver = nnx.merge(graphs["patch_perceiver"], trainable["patch_perceiver"])
        patches = perceiver(batch["patch"].astype(jnp.float32))
        alignment = trainable["alignment"]
        if target == "fixed":
            alignment = alignment | {"cell_projection": jax.lax.stop_gradient(alignment["cell_projection"])}
        return (*nnx.merge(graphs["alignment"], alignment)(cells, patches), patches)

    return project


def make_loss(size: Size, config: Any) -> LossFn:
    """config: alignment ("paper" or "official"), target, global_weight, local_weight. Metrics: both losses, unweighted."""
    project = make_project(size, config.target)

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        of_cells, of_patches, _ = project(trainable, frozen, batch)
        apart, local = alignment_losses(of_cells, of_patches, config.alignment)
        return config.global_weight * apart + config.local_weight * local, {"global": apart, "local": local}

    return loss


def build(config: Any) -> Phase:
    """config: size, seed, data.{root, features}, batch_size, alignment, target, global_weight, local_weight,

    init_from.{backbone, qformer} (workdirs of 0a, 1).
    """
    root = Path(config.data.root)
    store = Path(config.data.features or root)
    tokenizer = load_tokenizer(root / "tokenizer")
    told = handover.read(config.init_from.qformer, ("cell_representation",))["facts"]
    handover.same_tokenizer(config.init_from.qformer, told, tokenizer, root / "tokenizer")
    size = of_config(config, tokenizer, told_queries(told))
    trainable = {name: parameters(networks(size)[name], config.seed)[1] for name in ("patch_perceiver", "alignment")}
    qformer = handover.load(config.init_from.qformer, ["qformer"], rules={"qformer": QFORMER_RULES})["qformer"]
    cells = FeatureTable(store, ("train", "val"))
    patches = FeatureTable(store, ("train", "val"), "patch_features")
    backbone_sha256 = tree_sha256(handover.load(config.init_from.backbone, ["backbone"])["backbone"])
    if backbone_sha256 != patches.backbone_sha256:
        raise DataError(
            f"the patch_features are of another backbone than {config.init_from.backbone}: run `pbs data features`"
        )
    train, held_out = (CellPatches(root, split, cells, patches) for split in ("train", "val"))
    val = batches(held_out.spread(DIAGNOSED), config.batch_size)
    project = jax.jit(make_project(size, config.target))

    def evaluate(trainable: Params, frozen: Params) -> dict[str, float]:
        found: list[tuple[np.ndarray, ...]] = []
        for batch, real in val:
            parts = [fetch(part).astype(np.float32)[real] for part in project(trainable, frozen, batch)]
            found.append((*parts, batch["patch_no"][real], batch["slide_no"][real]))
        of_cells, of_patches, tokens, patch_no, slide_no = (np.concatenate(part) for part in zip(*found, strict=True))
        apart, local = alignment_losses(jnp.asarray(of_cells), jnp.asarray(of_patches), config.alignment)
        values = {"global": float(apart), "local": float(local)}
        # The losses see the projected tokens, phase 4 the Perceiver's own: those may keep what the projections drop.
        own = {"own_rank": effective_rank(tokens.mean(1)), "own_content": content(tokens)}
        return values | diagnose(of_cells, of_patches, patch_no, slide_no) | own

    return Phase(
        name="cell_patch_alignment",
        trainable=trainable,
        frozen={"qformer": frozen_cast(qformer, size.frozen_dtype)},
        rules={"patch_perceiver": PERCEIVER_RULES, "alignment": ALIGNMENT_RULES, "qformer": QFORMER_RULES},
        loss=make_loss(size, config),
        examples=train,
        evaluate=evaluate,
        facts={
            "size": config.size,
            **({"qformer": told["qformer"]} if "qformer" in told else {}),
            "tokenizer_sha256": tokenizer.sha256,
            "backbone": str(Path(config.init_from.backbone)),
            "backbone_sha256": backbone_sha256,
            "qformer_sha256": tree_sha256(qformer),
            "datasets": {
                "cells": read_manifest(root / "cells")["content_id"],
                "cell_features": cells.content_id,
                "patch_features": patches.content_id,
            },
        },
        example_id=train.image_id,
    )
