"""One table a model family: torch parameter name <-> flax path, with what happens to the array on the way.

A `{}` in the torch name is the layer index of a stacked flax leaf. Names are those of the official release (PBSBench,
DINOv2) and of Hugging Face's decoders; `convert` applies a table in both directions.
"""

from __future__ import annotations

import dataclasses
import re

from pbs_jax.models.decoder import DecoderConfig
from pbs_jax.models.qformer import QFormerConfig
from pbs_jax.models.vit import ViTConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """torch name <-> flax path. `how` names a transform of `convert.TRANSFORMS`; stacked layer k is torch's k * every.

    An `export_only` row writes a tensor that official loaders want but no pass reads; importing accepts and drops it.
    An `import_only` row fills a leaf from a tensor that another row writes. `part` = (i, n): the tensor is the i-th of n
    equal parts of the leaf's last axis.
    """

    torch: str
    flax: str
    how: str = "same"
    every: int = 1
    export_only: bool = False
    import_only: bool = False
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    """All parameters of one model; `ignored` are regexes of torch names without counterpart (buffers, tied copies),
    `fresh` of flax leaves that the file does not hold and that keep their initialisation."""

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()


def vit_table(config: ViTConfig, prefix: str = "") -> Table:
    """DINOv2's names (`blocks.0.attn.qkv.weight`); the conv stem's are `stem.stage1.conv1.weight` and so on."""
    block, torch = "blocks", f"{prefix}blocks.{{}}."
    ffn = ("fc1", "fc2") if config.ffn == "mlp" else ("w12", "w3")
    stem: list[Row] = []
    if config.stem == "patch":
        stem = [
            Row(f"{prefix}patch_embed.proj.weight", "stem/proj/kernel", "patch"),
            Row(f"{prefix}patch_embed.proj.bias", "stem/proj/bias"),
            Row(f"{prefix}mask_token", "cls_token", "zero_row", export_only=True),
        ]
    else:
        stem = conv(f"{prefix}stem.patch", "stem/patch", "patch")
        for stage in ("stage1", "stage2"):
            for i in (1, 2, 3):
                stem += norm(f"{prefix}stem.{stage}.norm{i}", f"stem/{stage}/norm{i}")
                stem += conv(f"{prefix}stem.{stage}.conv{i}", f"stem/{stage}/conv{i}", "conv3")
    rows = [
        *stem,
        Row(f"{prefix}cls_token", "cls_token", "two_rows"),
        Row(f"{prefix}pos_embed", "positions", "row"),
        *norm(f"{torch}norm1", f"{block}/norm1"),
        *linear(f"{torch}attn.qkv", f"{block}/qkv"),
        *linear(f"{torch}attn.proj", f"{block}/proj"),
        Row(f"{torch}ls1.gamma", f"{block}/ls1"),
        *norm(f"{torch}norm2", f"{block}/norm2"),
        *(row for name in ffn for row in linear(f"{torch}mlp.{name}", f"{block}/ffn/{name}")),
        Row(f"{torch}ls2.gamma", f"{block}/ls2"),
        *norm(f"{prefix}norm", "norm"),
    ]
    return Table(tuple(rows))


def qformer_table(config: QFormerConfig, prefix: str = "qformer.") -> Table:
    """The official release's names (LAVIS); phase 3 puts them under `model.visual.encoder.qformer.`."""
    bert, head = f"{prefix}Qformer.bert.", f"{prefix}Qformer.cls.predictions."
    layer = f"{bert}encoder.layer.{{}}."

    def attention(torch: str, flax: str, every: int) -> list[Row]:
        parts = ("query", "key", "value")
        return [
            *(row for name in parts for row in linear(f"{torch}.self.{name}", f"{flax}/{name}", every)),
            *linear(f"{torch}.output.dense", f"{flax}/out", every),
            *norm(f"{torch}.output.LayerNorm", f"{flax}/norm", every),
        ]

    def feed(suffix: str, flax: str) -> list[Row]:
        return [
            *linear(f"{layer}intermediate{suffix}.dense", f"{flax}/up"),
            *linear(f"{layer}output{suffix}.dense", f"{flax}/down"),
            *norm(f"{layer}output{suffix}.LayerNorm", f"{flax}/norm"),
        ]

    rows = [
        Row(f"{prefix}query_tokens", "query_tokens", "row"),
        Row(f"{prefix}temp", "temperature"),
        *norm(f"{prefix}ln_vision", "ln_vision"),
        Row(f"{bert}embeddings.word_embeddings.weight", "words"),
        Row(f"{bert}embeddings.position_embeddings.weight", "positions"),
        *norm(f"{bert}embeddings.LayerNorm", "embed_norm"),
        *attention(f"{layer}attention", "layers/attention", 1),
        *attention(f"{layer}crossattention", "cross", config.cross_attention_freq),
        *feed("", "layers/text_ffn"),
        *feed("_query", "layers/query_ffn"),
        *linear(f"{head}transform.dense", "lm_head/transform"),
        *norm(f"{head}transform.LayerNorm", "lm_head/norm"),
        *linear(f"{head}decoder", "lm_head/decoder"),
        Row(f"{head}bias", "lm_head/decoder/bias", export_only=True),  # BERT's second copy, which no pass reads
        *linear(f"{prefix}vision_proj", "vision_proj"),
        *linear(f"{prefix}text_proj", "text_proj"),
        *linear(f"{prefix}itm_head", "itm_head"),
    ]
    return Table(tuple(rows), ignored=(r".*\.embeddings\.position_ids",))


def decoder_table(config: DecoderConfig, prefix: str = "model.", head: str = "lm_head.weight") -> Table:
    """Hugging Face's Llama / Qwen2 names; `prefix` is "model." or, inside Qwen2.5-VL, "model.language_model."."""
    torch = f"{prefix}layers.{{}}."

    def kernel(name: str, flax: str) -> Row:
        return Row(f"{torch}{name}.weight", f"layers/{flax}/kernel", "linear")

    rows = [
        Row(f"{prefix}embed_tokens.weight", "embedding"),
        Row(f"{torch}input_layernorm.weight", "layers/input_norm/scale"),
        *(kernel(f"self_attn.{name}_proj", name) for name in "qkvo"),
        Row(f"{torch}post_attention_layernorm.weight", "layers/post_norm/scale"),
        *(kernel(f"mlp.{name}_proj", name) for name in ("gate", "up", "down")),
        Row(f"{prefix}norm.weight", "norm/scale"),
    ]
    if config.qkv_bias:
        rows += [Row(f"{torch}self_attn.{name}_proj.bias", f"layers/{name}/bias") for name in "qkv"]
    ignored = [r".*rotary_emb\.inv_freq"]
    if config.tied:
        ignored.append(re.escape(head))
    else:
        rows.append(Row(head, "lm_head/kernel", "linear"))
    return Table(tuple(rows), tuple(ignored))


def perceiver_table(prefix: str = "") -> Table:
    """`PerceiverResampler`'s names, under `patch_encoder.resampler.` (phase 2) or `model.visual.encoder.resampler.`."""
    torch = f"{prefix}blocks.{{}}."
    rows = [
        Row(f"{prefix}latents", "latents", "row"),
        *linear(f"{prefix}input_projection", "input_projection"),
        *norm(f"{torch}query_norm", "blocks/query_norm"),
        *norm(f"{torch}input_norm", "blocks/input_norm"),
        Row(f"{torch}attention.in_proj_weight", "blocks/in_proj/kernel", "linear"),
        Row(f"{torch}attention.in_proj_bias", "blocks/in_proj/bias"),
        *linear(f"{torch}attention.out_proj", "blocks/out_proj"),
        *norm(f"{torch}ffn.0", "blocks/ffn_norm"),
        *linear(f"{torch}ffn.1", "blocks/up"),
        *linear(f"{torch}ffn.3", "blocks/down"),
        *norm(f"{prefix}output_norm", "output_norm"),
    ]
    return Table(tuple(rows))


def projector_table(prefix: str = "model.visual.projector") -> Table:
    """The linear layer into the language model, under phase 3's and 4's name."""
    return Table(tuple(linear(prefix, "linear")))


def linear(torch: str, flax: str, every: int = 1) -> list[Row]:
    return [
        Row(f"{torch}.weight", f"{flax}/kernel", "linear", every),
        Row(f"{torch}.bias", f"{flax}/bias", every=every),
    ]


def conv(torch: str, flax: str, how: str) -> list[Row]:
    return [Row(f"{torch}.weight", f"{flax}/proj/kernel", how), Row(f"{torch}.bias", f"{flax}/proj/bias")]


def norm(torch: str, flax: str, every: int = 1) -> list[Row]:
    return [Row(f"{torch}.weight", f"{flax}/scale", every=every), Row(f"{torch}.bias", f"{flax}/bias", every=every)]
