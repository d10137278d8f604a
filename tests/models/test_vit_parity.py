"""The ViT against DINOv2's own numbers: both feed-forward nets, every rule of position interpolation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from pbs_jax.models.vit import ViT, ViTConfig, position_table
from pbs_jax.weights.convert import to_flax, to_torch
from pbs_jax.weights.tables import vit_table
from tests.models.golden import Golden, abstract, close, run

MLP = ViTConfig(image_size=112, patch_size=14, dim=48, depth=3, heads=3, mlp_dim=192)
SWIGLU = dataclasses.replace(MLP, ffn="swiglu", mlp_dim=128)
CASES = [
    ("dinov2_mlp", MLP, "off0.1_noaa", "img112"),
    ("dinov2_mlp", MLP, "off0.1_noaa", "img140x98"),
    ("dinov2_mlp", MLP, "off0.1_aa", "img140x98"),
    ("dinov2_mlp", MLP, "off0.0_noaa", "img140x98"),
    ("dinov2_mlp", MLP, "off0.0_aa", "img140x98"),
    ("dinov2_swiglu", SWIGLU, "off0.1_noaa", "img112"),
    ("dinov2_swiglu", SWIGLU, "off0.1_noaa", "img140x98"),
]


@pytest.mark.parametrize(("file", "config", "variant", "image"), CASES)
def test_outputs(shared: Path, file: str, config: ViTConfig, variant: str, image: str) -> None:
    golden = Golden(shared, file)
    images = Golden(shared, "dinov2_mlp").inp[image].transpose(0, 2, 3, 1)
    offset, antialias = variant.removeprefix("off").split("_")
    config = dataclasses.replace(config, interpolate_offset=float(offset), antialias=antialias == "aa")
    graph, state = abstract(lambda: ViT(config, rngs=nnx.Rngs(0)))
    params = to_flax(golden.w, vit_table(config), state)
    outputs = run(lambda params, images: nnx.merge(graph, params)(images), params, images)
    for name, value in outputs.items():
        close(value, golden.out[f"{variant}.{image}.{name}"])
    if image == "img140x98":
        close(
            position_table(params["positions"], config, (10, 7)), golden.out[f"{variant}.{image}.pos_embed_interp"][0]
        )


def test_exports_every_official_tensor(shared: Path) -> None:
    """Bit-equal but for the mask token, which no pass reads and an export writes as zeros."""
    for file, config in (("dinov2_mlp", MLP), ("dinov2_swiglu", SWIGLU)):
        golden = Golden(shared, file)
        table = vit_table(config)
        exported = to_torch(to_flax(golden.w, table, abstract(lambda c=config: ViT(c, rngs=nnx.Rngs(0)))[1]), table)
        assert exported.keys() == golden.w.keys()
        for name, value in exported.items():
            assert value.shape == golden.w[name].shape
            assert name == "mask_token" or np.array_equal(value, golden.w[name]), name
