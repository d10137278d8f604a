"""The three sizes of DESIGN section 5: which backbone, Q-Former and language model go together."""

from __future__ import annotations

import dataclasses
from typing import Any

from data_prep.schema import DataError
from data_prep.tokens import CLS, DEC, PAD
from pbs_jax.models.decoder import DecoderConfig
from pbs_jax.models.qformer import QFormerConfig
from pbs_jax.models.vit import ViTConfig


@dataclasses.dataclass(frozen=True)
class Size:
    """One size; `frozen_dtype` is what frozen weights are held in."""

    name: str
    vit: ViTConfig
    qformer: QFormerConfig
    decoder: DecoderConfig
    frozen_dtype: str


def get_size(name: str, tokenizer: Any | None = None) -> Size:
    """The size's shapes; `tokenizer` (nano, small) gives vocabulary and special ids. Raises DataError for other names."""
    match name:
        case "nano":
            vocab = {"vocab": tokenizer.size} if tokenizer else {}
            tokens = {"pad_id": PAD, "cls_id": CLS, "dec_id": DEC}
            special = {name: tokenizer.id(token) if tokenizer else 0 for name, token in tokens.items()}
            return Size(
                name, ViTConfig.nano(), QFormerConfig.nano(**vocab, **special), DecoderConfig.nano(**vocab), "float32"
            )
        case "7b":
            return Size(name, ViTConfig.dinov2_l(), QFormerConfig.blip2(), DecoderConfig.qwen2_5_7b(), "bfloat16")
    raise DataError(f'size "{name}" is unknown: use nano or 7b')
