"""Frozen backbone features, computed once: `pbs data features` writes bfloat16 tokens of every cell (`cell_features`).

Keyed by the backbone's hash: features of another backbone or of other cells are another dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_prep.io import TEXT, array, open_dataset, read_manifest, write_dataset
from data_prep.progress import progress
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import decode_image
from pbs_jax.models.sizes import backbone_shape, get_size
from pbs_jax.models.vit import ViT
from pbs_jax.train import handover
from pbs_jax.train.phase import definition
from pbs_jax.train.state import tree_sha256


def write_features(root: Path, backbone: Path, out: Path, batch_size: int = 64) -> str:
    """out/cell_features: features of all cells of root/cells by the backbone of a finished phase 0a; returns the content id.

    Tokens before the last norm (official_code 3.1), bfloat16[1+N, D]. A finished dataset of the same inputs is kept.
    """
    content = handover.read(backbone, ("backbone",))
    params = handover.load(backbone, ["backbone"])["backbone"]
    vit_config = backbone_shape(content["facts"], get_size(content["facts"]["size"]).vit)
    graph = definition(lambda rngs: ViT(vit_config, rngs=rngs))
    cells = read_manifest(root / "cells")
    config = {"backbone_sha256": tree_sha256(params), "image_size": vit_config.image_size}
    inputs = {"cells": cells["content_id"]}
    if (out / "cell_features").exists():
        done = read_manifest(out / "cell_features")
        if done["config"] == config and done["inputs"] == inputs:
            print(f"{out}/cell_features is up to date ({done['content_id'][:12]})")
            return done["content_id"]
    tokens = 1 + (vit_config.image_size // vit_config.patch_size) ** 2

    @jax.jit
    def forward(pixels: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(normalise(pixels))["x_prenorm"].astype(jnp.bfloat16)

    def records() -> Iterator[dict[str, Any]]:
        for split in cells["splits"]:
            source = open_dataset(root / "cells", split)
            for start in progress(
                range(0, len(source), batch_size), -(-len(source) // batch_size), f"features {split}"
            ):
                rows = [source[i] for i in range(start, min(start + batch_size, len(source)))]
                pixels = np.stack([decode_image(row["image"], vit_config.image_size) for row in rows])
                short = batch_size - len(rows)
                features = np.asarray(forward(np.pad(pixels, ((0, short), (0, 0), (0, 0), (0, 0)))))
                for row, feature in zip(rows, features, strict=False):
                    yield {"cell_id": row["cell_id"], "split": split, "tokens": feature}

    return write_dataset(
        out,
        "cell_features",
        {"cell_id": TEXT, "split": TEXT, "tokens": array("bfloat16", tokens, vit_config.dim)},
        records(),
        id_feature="cell_id",
        config=config,
        inputs=inputs,
    )
