"""Partition rules: every parameter of every shipped size has exactly one, and it divides on the meshes we ship."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from data_prep.schema import ATTRIBUTES, DataError
from pbs_jax.models.alignment import Alignment
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverConfig, PerceiverResampler
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.sharding import rules

IDS = {"pad_id": 0, "cls_id": 1, "dec_id": 2}
OUTPUTS = {"label": 5} | {name: len(values) for name, values in ATTRIBUTES.items()}
MODELS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], rules.Rules, int]] = {  # with the number of parameters
    "vit nano": (lambda r: ViT(ViTConfig.nano(), rngs=r), rules.VIT_RULES, 0),
    "vit s": (lambda r: ViT(ViTConfig.dinov2_s(), rngs=r), rules.VIT_RULES, 21_629_184 - 384),  # less the mask token
    "vit b": (lambda r: ViT(ViTConfig.dinov2_b(), rngs=r), rules.VIT_RULES, 85_725_696 - 768),
    "vit l": (lambda r: ViT(ViTConfig.dinov2_l(), rngs=r), rules.VIT_RULES, 303_228_928 - 1024),
    "vit g": (lambda r: ViT(ViTConfig.dinov2_g(), rngs=r), rules.VIT_RULES, 0),
    "qformer nano": (lambda r: QFormer(QFormerConfig.nano(**IDS), rngs=r), rules.QFORMER_RULES, 0),
    # less the second copy of BERT's prediction bias
    "qformer 7b": (lambda r: QFormer(QFormerConfig.blip2(), rngs=r), rules.QFORMER_RULES, 206_637_945 - 30_523),
    "decoder nano": (lambda r: Decoder(DecoderConfig.nano(), rngs=r), rules.DECODER_RULES, 0),
    "decoder smollm2": (lambda r: Decoder(DecoderConfig.smollm2_135m(), rngs=r), rules.DECODER_RULES, 134_515_008),
    "decoder 3b": (lambda r: Decoder(DecoderConfig.qwen2_5_3b(), rngs=r), rules.DECODER_RULES, 3_085_938_688),
    "decoder 7b": (lambda r: Decoder(DecoderConfig.qwen2_5_7b(), rngs=r), rules.DECODER_RULES, 7_615_616_512),
    "perceiver patch": (
        lambda r: PerceiverResampler(PerceiverConfig.patch(), rngs=r),
        rules.PERCEIVER_RULES,
        14_992_128,
    ),
    "perceiver slide": (
        lambda r: PerceiverResampler(PerceiverConfig.slide(), rngs=r),
        rules.PERCEIVER_RULES,
        14_795_520,
    ),
    "alignment 7b": (lambda r: Alignment(768, 768, 256, rngs=r), rules.ALIGNMENT_RULES, 15_385_856 - 14_992_128),
    "projector 7b": (lambda r: Projector(768, 3584, rngs=r), rules.PROJECTOR_RULES, 768 * 3584 + 3584),
    "head": (lambda r: ClassifierHead(1024, OUTPUTS, rngs=r), rules.HEAD_RULES, 0),
}
MESHES = [
    {"fsdp": 8, "tensor": 1},
    {"fsdp": 16, "tensor": 4},
    {"fsdp": 64, "tensor": 1},
]  # tensor <= 4: Qwen's KV heads


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_one_rule_and_every_size_its_published_count(name: str) -> None:
    make, table, count = MODELS[name]
    state = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    specs = rules.specs(nnx.to_pure_dict(state), table)
    leaves = jax.tree.leaves(nnx.to_pure_dict(state))
    assert len(jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P))) == len(leaves)
    assert jax.tree.leaves(rules.specs(state, table)) == jax.tree.leaves(specs)
    assert count in (0, sum(leaf.size for leaf in leaves))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith(("7b", "vit l", "patch", "slide"))])
def test_large_parameters_divide_evenly(name: str, mesh: dict[str, int]) -> None:
    """All kernels of the 7b size but the two whose odd vocabulary or class count cannot be: those stay whole."""
    make, table, _ = MODELS[name]
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))
    specs = rules.specs(state, table)
    for leaf, spec in zip(
        jax.tree.leaves(state), jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, P)), strict=True
    ):
        for size, axis in zip(leaf.shape, spec, strict=False):
            if axis is not None and size != QFormerConfig.blip2().vocab:
                parts = math.prod(mesh[part] for part in ([axis] if isinstance(axis, str) else axis))
                assert size % parts == 0, (name, leaf.shape, spec)
        if math.prod(leaf.shape) > 10**7:
            assert any(axis is not None for axis in spec), f"{name} {leaf.shape} would be replicated"


def test_errors_name_path_and_shape() -> None:
    tree = {"blocks": {"qkw": {"kernel": jax.ShapeDtypeStruct((2, 4, 12), "float32")}}}
    with pytest.raises(DataError, match=r"blocks/qkw/kernel \(2, 4, 12\) matches no partition rule; nearest are"):
        rules.specs(tree, rules.VIT_RULES)
    twice = (*rules.PROJECTOR_RULES, (r"linear/.*", P()))
    with pytest.raises(DataError, match=r"linear/kernel \(4, 4\) matches rules"):
        rules.specs({"linear": {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")}}, twice)
    with pytest.raises(DataError, match=r"linear/kernel \(4,\) has fewer dimensions"):
        rules.specs({"linear": {"kernel": jax.ShapeDtypeStruct((4,), "float32")}}, rules.PROJECTOR_RULES)
