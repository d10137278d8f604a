"""Tables of what others publish: Hugging Face's DINOv2 and BLIP-2, BLIP-2 stage 1 of LAVIS, BERT.

The official release's own names are in `tables`. Parts that a file lacks keep their initialisation (`Table.fresh`).
"""

from __future__ import annotations

import dataclasses

from pbs_jax.models.qformer import QFormerConfig
from pbs_jax.models.vit import ViTConfig
from pbs_jax.weights.tables import Row, Table, linear, norm, qformer_table

BUFFERS = r".*position_ids"


def dinov2_hf_table(config: ViTConfig) -> Table:
    """`Dinov2Model`'s files: query, key and value apart, LayerScale as `lambda1`."""
    layer = "encoder.layer.{}."
    qkv = [
        dataclasses.replace(row, part=(i, 3))
        for i, name in enumerate(("query", "key", "value"))
        for row in linear(f"{layer}attention.attention.{name}", "blocks/qkv")
    ]
    names = {"fc1": "fc1", "fc2": "fc2"} if config.ffn == "mlp" else {"weights_in": "w12", "weights_out": "w3"}
    rows = [
        Row("embeddings.patch_embeddings.projection.weight", "stem/proj/kernel", "patch"),
        Row("embeddings.patch_embeddings.projection.bias", "stem/proj/bias"),
        Row("embeddings.mask_token", "cls_token", "zero_row", export_only=True),
        Row("embeddings.cls_token", "cls_token", "two_rows"),
        Row("embeddings.position_embeddings", "positions", "row"),
        *norm(f"{layer}norm1", "blocks/norm1"),
        *qkv,
        *linear(f"{layer}attention.output.dense", "blocks/proj"),
        Row(f"{layer}layer_scale1.lambda1", "blocks/ls1"),
        *norm(f"{layer}norm2", "blocks/norm2"),
        *(row for torch, flax in names.items() for row in linear(f"{layer}mlp.{torch}", f"blocks/ffn/{flax}")),
        Row(f"{layer}layer_scale2.lambda1", "blocks/ls2"),
        *norm("layernorm", "norm"),
    ]
    return Table(tuple(rows))


def blip2_table(config: QFormerConfig, ln_vision: bool = False) -> Table:
    """LAVIS's stage-1 file. Its vision encoder goes, and (as the official code does) its `ln_vision`, unless asked for."""
    table = qformer_table(config, "")
    dropped = (r"visual_encoder\..*",)
    if ln_vision:
        return dataclasses.replace(table, ignored=(*table.ignored, *dropped))
    rows = tuple(row for row in table.rows if not row.flax.startswith("ln_vision/"))
    return Table(rows, (*table.ignored, *dropped, r"ln_vision\..*"), (r"ln_vision/.*",))


def blip2_hf_table(config: QFormerConfig) -> Table:
    """`Blip2ForImageTextRetrieval`: no caption head and no temperature; `ln_vision` is the vision model's last norm."""
    layer = "qformer.encoder.layer.{}."

    def attention(torch: str, flax: str, every: int) -> list[Row]:
        parts = ("query", "key", "value")
        return [
            *(row for name in parts for row in linear(f"{torch}.attention.{name}", f"{flax}/{name}", every)),
            *linear(f"{torch}.output.dense", f"{flax}/out", every),
            *norm(f"{torch}.output.LayerNorm", f"{flax}/norm", every),
        ]

    rows = [
        Row("query_tokens", "query_tokens", "row"),
        *norm("vision_model.post_layernorm", "ln_vision"),
        Row("embeddings.word_embeddings.weight", "words"),
        Row("embeddings.position_embeddings.weight", "positions"),
        *norm("qformer.layernorm", "embed_norm"),
        *attention(f"{layer}attention", "layers/attention", 1),
        *attention(f"{layer}crossattention", "cross", config.cross_attention_freq),
        *_feed(layer, "", "layers/text_ffn"),
        *_feed(layer, "_query", "layers/query_ffn"),
        *linear("vision_projection", "vision_proj"),
        *linear("text_projection", "text_proj"),
        *linear("itm_head", "itm_head"),
    ]
    return Table(tuple(rows), (BUFFERS, r"vision_model\.(?!post_layernorm).*"), (r"lm_head/.*", "temperature"))


def bert_table() -> Table:
    """`BertForPreTraining` (bert-base-uncased) into a Q-Former: the query half starts as a copy of the text half.

    Rows that the [DEC] token adds to the vocabulary are the importer's matter; token types and the pooler have no place.
    """
    layer = "bert.encoder.layer.{}."
    copies = [dataclasses.replace(row, import_only=True) for row in _feed(layer, "", "layers/query_ffn")]
    words = "bert.embeddings.word_embeddings.weight"
    rows = [
        Row(words, "words"),
        Row(words, "lm_head/decoder/kernel", "linear", import_only=True),
        Row("bert.embeddings.position_embeddings.weight", "positions"),
        *norm("bert.embeddings.LayerNorm", "embed_norm"),
        *(
            row
            for name in ("query", "key", "value")
            for row in linear(f"{layer}attention.self.{name}", f"layers/attention/{name}")
        ),
        *linear(f"{layer}attention.output.dense", "layers/attention/out"),
        *norm(f"{layer}attention.output.LayerNorm", "layers/attention/norm"),
        *_feed(layer, "", "layers/text_ffn"),
        *copies,
        *linear("cls.predictions.transform.dense", "lm_head/transform"),
        *norm("cls.predictions.transform.LayerNorm", "lm_head/norm"),
        Row("cls.predictions.bias", "lm_head/decoder/bias"),
    ]
    ignored = (BUFFERS, r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"bert\.embeddings\.token_type_.*")
    fresh = (r"cross/.*", "query_tokens", "temperature", r"(ln_vision|vision_proj|text_proj|itm_head)/.*")
    return Table(tuple(rows), (*ignored, r"cls\.predictions\.decoder\..*"), fresh)


def _feed(layer: str, suffix: str, flax: str) -> list[Row]:
    """BERT's feed-forward half, of text ("") or queries ("_query")."""
    return [
        *linear(f"{layer}intermediate{suffix}.dense", f"{flax}/up"),
        *linear(f"{layer}output{suffix}.dense", f"{flax}/down"),
        *norm(f"{layer}output{suffix}.LayerNorm", f"{flax}/norm"),
    ]
