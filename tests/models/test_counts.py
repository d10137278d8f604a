"""Full-size networks by shape alone: the parameter counts of the publishers (official_code.md 3.1, 3.2, 3.7)."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from flax import nnx

from pbs_jax.models.alignment import Alignment
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.densenet import DenseNet, DenseNetConfig
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverConfig, PerceiverResampler
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.train.state import leaves_by_name


def count(make: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))))


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: ViT(ViTConfig.nano(), rngs=rngs),
        lambda rngs: ViT(ViTConfig.dinov2_s(), rngs=rngs),
        lambda rngs: ClassifierHead(192, {"label": 5}, rngs=rngs),
        lambda rngs: QFormer(QFormerConfig.blip2(), rngs=rngs),
        lambda rngs: PerceiverResampler(PerceiverConfig.nano(), rngs=rngs),
        lambda rngs: Alignment(192, 192, 64, rngs=rngs),
        lambda rngs: Projector(192, 192, rngs=rngs),
        lambda rngs: Decoder(DecoderConfig.qwen2_5_7b(), rngs=rngs),
    ],
)
def test_parameters_keep_their_type_in_an_update(make: Any) -> None:
    """A weakly typed one turns into a strong one in the first step, and the whole step is compiled a second time."""
    state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))
    assert not [name for name, leaf in leaves_by_name(state).items() if leaf.weak_type]


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (ViTConfig.dinov2_s(), 21_629_184),
        (ViTConfig.dinov2_b(), 85_725_696),
        (ViTConfig.dinov2_l(), 303_228_928),
        (ViTConfig.dinov2_g(), 1_134_771_200),
    ],
)
def test_dinov2(config: ViTConfig, published: int) -> None:
    """As published with 257 positions; we hold no mask token, which no pass reads."""
    assert count(lambda rngs: ViT(config, rngs=rngs)) == published - config.dim


def test_qformer() -> None:
    """All but BERT's second, unread bias of the vocabulary."""
    config = QFormerConfig.blip2()
    assert count(lambda rngs: QFormer(config, rngs=rngs)) == 206_637_945 - config.vocab


def test_language_models() -> None:
    assert count(lambda rngs: Decoder(DecoderConfig.smollm2_135m(), rngs=rngs)) == 134_515_008
    assert count(lambda rngs: Decoder(DecoderConfig.qwen2_5_3b(), rngs=rngs)) == 3_085_938_688
    assert count(lambda rngs: Decoder(DecoderConfig.qwen2_5_7b(), rngs=rngs)) == 7_615_616_512


def test_densenet121() -> None:
    """Keras counts 7,037,504 for the backbone; the head has 525,313 at a width of 512."""
    assert count(lambda rngs: DenseNet(DenseNetConfig(hidden=512), rngs=rngs)) == 7_037_504 + 525_313


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("config", [DecoderConfig.qwen2_5_3b(), DecoderConfig.qwen2_5_7b()], ids=["3b", "7b"])
def test_transformers_counts_the_same(config: DecoderConfig) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": config.vocab, "hidden_size": config.dim, "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "tie_word_embeddings": config.tied,
    }  # fmt: skip
    theirs = Qwen2_5_VLConfig(text_config=text, vision_config={"depth": 1}, tie_word_embeddings=config.tied)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(theirs)
    parameters = sum(p.numel() for name, p in model.named_parameters() if ".visual." not in name)
    assert parameters == count(lambda rngs: Decoder(config, rngs=rngs))
