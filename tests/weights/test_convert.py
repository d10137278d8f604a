"""Conversion loses and invents nothing: round trips of every family, and an error for each way a file can be wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from data_prep.schema import DataError
from pbs_jax.models.alignment import Alignment
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverConfig, PerceiverResampler
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.sizes import get_size
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.weights.convert import to_flax, to_torch
from pbs_jax.weights.export import HEAD, phase_tables
from pbs_jax.weights.tables import Table, decoder_table, perceiver_table, projector_table, qformer_table, vit_table

QFORMER = QFormerConfig.nano(dim=16, heads=2, ffn_dim=24, vocab=30, pad_id=0, cls_id=1, dec_id=2)
TIED = DecoderConfig.nano(dim=16, heads=2, kv_heads=1, head_dim=8, ffn_dim=24, vocab=30, mrope_section=(2, 1, 1))
UNTIED = DecoderConfig(30, 16, 2, 2, 1, 8, 24, 1e4, tied=False, qkv_bias=False)
SIZE = get_size("nano")
FAMILIES: dict[str, tuple[Any, Table]] = {
    "conv vit": (lambda r: ViT(ViTConfig.nano(), rngs=r), vit_table(ViTConfig.nano())),
    "qformer": (lambda r: QFormer(QFORMER, rngs=r), qformer_table(QFORMER, "model.visual.encoder.qformer.")),
    "tied decoder": (lambda r: Decoder(TIED, rngs=r), decoder_table(TIED)),
    "untied decoder": (lambda r: Decoder(UNTIED, rngs=r), decoder_table(UNTIED, "model.language_model.")),
    "perceiver": (lambda r: PerceiverResampler(PerceiverConfig.nano(), rngs=r), perceiver_table("resampler.")),
    "projector": (lambda r: Projector(16, 24, rngs=r), projector_table()),
    "alignment": (lambda r: Alignment(16, 24, 8, rngs=r), phase_tables("cell_patch_alignment", SIZE)["alignment"]),
    "head": (lambda r: ClassifierHead(8, {"label": 5}, rngs=r), HEAD),
}


def random_params(name: str) -> tuple[dict[str, Any], Table]:
    """Parameters all of whose values differ, so that a wrong transpose or order shows."""
    make, table = FAMILIES[name]
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))
    generator = np.random.default_rng(0)
    return {key: generator.standard_normal(leaf.shape, np.float32) for key, leaf in flatten_dict(state).items()}, table


@pytest.mark.parametrize("name", FAMILIES)
def test_round_trip(name: str) -> None:
    """flax -> torch -> flax and torch -> flax -> torch, bit by bit (published layouts: test_import, QC: test_densenet)."""
    flat, table = random_params(name)
    state = unflatten_dict(flat)
    tensors = to_torch(state, table)
    back = flatten_dict(to_flax(tensors, table, state))
    assert back.keys() == flat.keys()
    for key, value in flat.items():
        assert np.array_equal(back[key], value), key
    again = to_torch(unflatten_dict(back), table)
    assert again.keys() == tensors.keys() and all(np.array_equal(again[n], value) for n, value in tensors.items())
    assert sum(value.size for value in tensors.values()) >= sum(value.size for value in flat.values())


def test_convolutions_keep_their_meaning() -> None:
    """torch's OIHW kernel and our patch matrix give one and the same number on an image patch."""
    flat, table = random_params("conv vit")
    tensors = to_torch(unflatten_dict(flat), table)
    generator = np.random.default_rng(1)
    for path, side in ((("patch",), 4), (("stage1", "conv3"), 3)):
        matrix, kernel = flat["stem", *path, "proj", "kernel"], tensors[".".join(("stem", *path, "weight"))]
        patch = generator.standard_normal((side, side, kernel.shape[1]), np.float32)
        np.testing.assert_allclose(
            patch.reshape(-1) @ matrix, np.einsum("hwi,oihw->o", patch, kernel), rtol=1e-4, atol=1e-4
        )


def test_each_way_a_file_can_be_wrong() -> None:
    flat, table = random_params("qformer")
    state = unflatten_dict(flat)
    tensors = to_torch(state, table)
    key = "model.visual.encoder.qformer.Qformer.bert.encoder.layer.2.crossattention.self.key.weight"
    with pytest.raises(DataError, match=rf"cross/key/kernel \(2, 192, 16\) needs tensor {key}, which the file lacks"):
        to_flax({name: value for name, value in tensors.items() if name != key}, table, state)
    with pytest.raises(DataError, match=r"1 tensors have no place in the model, first .*layer\.9.*; nearest are"):
        to_flax(tensors | {key.replace("layer.2", "layer.9"): tensors[key]}, table, state)
    with pytest.raises(DataError, match=r"vision_proj/kernel the shape \(15, 64\), but the model has \(16, 64\)"):
        name = "model.visual.encoder.qformer.vision_proj.weight"
        to_flax(tensors | {name: tensors[name][:, 1:]}, table, state)
    with pytest.raises(DataError, match=r"parameter extra \(3,\) has 0 rows in the table"):
        to_torch({**state, "extra": np.zeros(3)}, table)
    with pytest.raises(DataError, match="the table names parameter temperature, which the model lacks"):
        to_torch({name: value for name, value in state.items() if name != "temperature"}, table)
    buffer = "model.visual.encoder.qformer.Qformer.bert.embeddings.position_ids"
    to_flax(tensors | {buffer: np.arange(4)}, table, state)  # a buffer: known, and no parameter
