"""The sizes of DESIGN section 5, and the paper's model on a smaller language model (3b): what goes together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from configs.base import FULL
from data_prep.schema import DataError
from data_prep.tokens import CLS, DEC, PAD
from pbs_jax.models.decoder import DecoderConfig
from pbs_jax.models.perceiver import PerceiverConfig
from pbs_jax.models.qformer import QFormerConfig
from pbs_jax.models.vit import ViTConfig


@dataclasses.dataclass(frozen=True)
class Size:
    """One size; `frozen_dtype` is what frozen weights are held in.

    patch_windows: a patch is read as so many windows a side, at the scale of the cell crops that the stand-in backbone
    learnt from; 1 = whole, as the official code does.
    latent_std: of the slide Perceiver's drawn latents. Small ones are drowned by what they read, all alike, and a short
    run is over before they part; 0.02, as the official code draws them, is for long ones.
    """

    name: str
    vit: ViTConfig
    qformer: QFormerConfig
    decoder: DecoderConfig
    frozen_dtype: str
    patch_windows: int = 1
    latent_std: float = 0.02

    @property
    def patch_perceiver(self) -> PerceiverConfig:
        """Phase 2's, from a patch's backbone tokens to tokens of the Q-Former's number and width."""
        q = self.qformer
        return PerceiverConfig(input_dim=self.vit.dim, dim=q.dim, latents=q.queries, dtype=q.dtype)

    def slide_perceiver(self, input_dim: int) -> PerceiverConfig:
        """Phase 4's; `input_dim` is the width of the slide features."""
        return dataclasses.replace(self.patch_perceiver, input_dim=input_dim, latent_std=self.latent_std)


def get_size(name: str, tokenizer: Any | None = None, *, int8: bool = False) -> Size:
    """The size's shapes; `tokenizer` (nano, small) gives vocabulary and special ids; int8: of the frozen decoder's kernels.

    Raises DataError for other names.
    """
    size = _size(name, tokenizer)
    return dataclasses.replace(size, decoder=dataclasses.replace(size.decoder, int8=True)) if int8 else size


def with_queries(size: Size, queries: int) -> Size:
    """The size with so many query tokens, and latents of the Perceivers; 0 = its own."""
    return dataclasses.replace(size, qformer=dataclasses.replace(size.qformer, queries=queries)) if queries else size


def told_queries(facts: Mapping[str, Any]) -> int:
    """How many query tokens a phase's facts tell, for `with_queries`."""
    return int(facts["qformer"]["queries"]) if "qformer" in facts else 0


def backbone_shape(facts: Mapping[str, Any], default: ViTConfig) -> ViTConfig:
    """The backbone of a handover's facts: an imported one tells its own shape, another has its size's, `default`."""
    if "vit" not in facts:
        return default
    grid = facts["vit"]["position_grid"]
    return ViTConfig(**{**facts["vit"], "position_grid": tuple(grid) if grid else None})


def of_config(config: Any, tokenizer: Any | None = None, queries: int = 0) -> Size:
    """The size that a phase trains: of config.size, int8 and remat, with so many query tokens (`with_queries`)."""
    return with_remat(with_queries(get_size(config.size, tokenizer, int8=config.int8), queries), config.remat)


def with_remat(size: Size, remat: str) -> Size:
    """`config.remat`: what decoder and Q-Former compute again in the backward pass; "" = as the size does."""
    if not remat:
        return size
    how = "" if remat == "none" else remat
    parts = {name: dataclasses.replace(getattr(size, name), remat=how) for name in ("decoder", "qformer")}
    return dataclasses.replace(size, **parts)


def in_float32(size: Size) -> Size:
    """The size with all networks computing in float32, to be compared with another framework."""
    parts = {name: dataclasses.replace(getattr(size, name), dtype="float32") for name in ("vit", "qformer", "decoder")}
    return dataclasses.replace(size, **parts)


def with_words(config: QFormerConfig, words: Any) -> QFormerConfig:
    """The Q-Former with the vocabulary and special ids of a tokenizer of its own, which reads captions alone."""
    ids = {"pad_id": words.id(PAD), "cls_id": words.id(CLS), "dec_id": words.id(DEC)}
    return dataclasses.replace(config, vocab=words.size, **ids)


def _size(name: str, tokenizer: Any | None) -> Size:
    vocab = {"vocab": tokenizer.size} if tokenizer else {}
    special = {"pad_id": 0, "cls_id": 0, "dec_id": 0}
    if tokenizer and name not in FULL:
        special = {"pad_id": tokenizer.id(PAD), "cls_id": tokenizer.id(CLS), "dec_id": tokenizer.id(DEC)}
    stand_in: dict[str, Any] = {"patch_windows": 4, "latent_std": 1.0}
    match name:
        case "nano":
            qformer = QFormerConfig.nano(**vocab, **special)
            return Size(name, ViTConfig.nano(), qformer, DecoderConfig.nano(**vocab), "float32", **stand_in)
        case "small":
            # nano's backbone; the Q-Former reads and writes with the language model's tokenizer.
            width = {"dim": 384, "layers": 6, "heads": 6, "ffn_dim": 1536, "projection": 128}
            qformer = QFormerConfig.nano(**width, **vocab, **special)
            return Size(name, ViTConfig.nano(), qformer, DecoderConfig.smollm2_135m(), "float32", **stand_in)
        case "3b" | "7b":
            # Compute in bfloat16 (parameters that train stay float32), layers recomputed in the backward pass.
            large: dict[str, Any] = {"dtype": "bfloat16", "remat": "full"}
            vit, qformer = ViTConfig.dinov2_l(dtype="bfloat16"), QFormerConfig.blip2(**large)
            decoder = (DecoderConfig.qwen2_5_3b if name == "3b" else DecoderConfig.qwen2_5_7b)(**large)
            return Size(name, vit, qformer, decoder, "bfloat16")
    raise DataError(f'size "{name}" is unknown: use nano, small, 3b or 7b')
