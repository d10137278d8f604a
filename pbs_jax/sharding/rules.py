"""Partition rules: which mesh axes each parameter's dimensions are split over, one ordered table a model.

Mesh axes are ("data", "fsdp", "tensor"); parameters are never split over "data". Megatron's pattern: kernels that widen
are column-parallel over "tensor", kernels that narrow row-parallel, "fsdp" takes the other dimension. Stacked layers
have a leading layer axis (L), never split. A parameter must match exactly one rule: there is no catch-all.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from data_prep.schema import DataError

Rules = tuple[tuple[str, P], ...]

VIT_RULES: Rules = (
    (r"stem/(patch/|stage\d/conv\d/)?proj/kernel", P(None, "fsdp")),  # (3*p*p, D) or (9*C, D)
    (r"stem/(patch/|stage\d/conv\d/)?proj/bias|stem/stage\d/norm\d/(bias|scale)", P()),
    (r"cls_token|positions", P()),
    (r"blocks/(qkv|ffn/fc1|ffn/w12)/kernel", P(None, "fsdp", "tensor")),  # (L, D, F)
    (r"blocks/(qkv|ffn/fc1|ffn/w12)/bias", P(None, "tensor")),  # (L, F)
    (r"blocks/(proj|ffn/fc2|ffn/w3)/kernel", P(None, "tensor", "fsdp")),  # (L, F, D)
    (r"blocks/(proj|ffn/fc2|ffn/w3)/bias", P()),
    (r"blocks/(norm1|norm2)/(scale|bias)|blocks/ls[12]", P()),
    (r"norm/(scale|bias)", P()),
)

QFORMER_RULES: Rules = (
    (r"words", P("tensor", "fsdp")),  # (V, D)
    (r"positions|query_tokens|temperature", P()),
    (r"(ln_vision|embed_norm)/(scale|bias)", P()),
    (r"(layers/attention|cross)/(query|key|value)/kernel", P(None, "fsdp", "tensor")),  # (L, W, H*hd)
    (r"(layers/attention|cross)/(query|key|value)/bias", P(None, "tensor")),
    (r"(layers/attention|cross)/out/kernel", P(None, "tensor", "fsdp")),  # (L, H*hd, D)
    (r"layers/(text|query)_ffn/up/kernel", P(None, "fsdp", "tensor")),  # (L, D, F)
    (r"layers/(text|query)_ffn/up/bias", P(None, "tensor")),
    (r"layers/(text|query)_ffn/down/kernel", P(None, "tensor", "fsdp")),  # (L, F, D)
    (r"(layers/attention|cross)/(out/bias|norm/(scale|bias))", P()),
    (r"layers/(text|query)_ffn/(down/bias|norm/(scale|bias))", P()),
    (r"(vision_proj|text_proj|itm_head)/kernel", P("fsdp", None)),  # (D, P)
    (r"(vision_proj|text_proj|itm_head)/bias", P()),
    (r"lm_head/transform/kernel", P("fsdp", None)),  # (D, D)
    (r"lm_head/(transform/bias|norm/(scale|bias))", P()),
    (r"lm_head/decoder/kernel", P("fsdp", "tensor")),  # (D, V)
    (r"lm_head/decoder/bias", P("tensor")),
)

DECODER_RULES: Rules = (
    (r"embedding", P("tensor", "fsdp")),  # (V, D)
    (r"lm_head/kernel", P(None, ("fsdp", "tensor"))),  # (D, V): logits stay split over the vocabulary
    (r"lm_head/scale", P(("fsdp", "tensor"))),
    (r"layers/(q|k|v|gate|up)/scale", P(None, "tensor")),  # (L, F), of int8 kernels
    (r"layers/(o|down)/scale", P()),
    (r"layers/(q|k|v|gate|up)/kernel", P(None, "fsdp", "tensor")),  # (L, D, F)
    (r"layers/(q|k|v)/bias", P(None, "tensor")),
    (r"layers/(o|down)/kernel", P(None, "tensor", "fsdp")),  # (L, F, D)
    (r"layers/(input|post)_norm/scale|norm/scale", P()),
)

PERCEIVER_RULES: Rules = (
    (r"latents", P()),
    (r"input_projection/kernel", P("fsdp", None)),  # (W, D)
    (r"blocks/(in_proj|up)/kernel", P(None, "fsdp", "tensor")),  # (L, D, F)
    (r"blocks/(in_proj|up)/bias", P(None, "tensor")),
    (r"blocks/(out_proj|down)/kernel", P(None, "tensor", "fsdp")),  # (L, F, D)
    (r"input_projection/bias|blocks/(out_proj|down)/bias", P()),
    (r"(blocks/(query|input|ffn)_norm|output_norm)/(scale|bias)", P()),
)

PROJECTOR_RULES: Rules = (
    (r"linear/kernel", P("fsdp", "tensor")),  # (D, LM width)
    (r"linear/bias", P("tensor")),
)

ALIGNMENT_RULES: Rules = (
    (r"(cell|patch)_projection/kernel", P("fsdp", None)),  # (D, K)
    (r"(cell|patch)_projection/bias", P()),
)

HEAD_RULES: Rules = (
    (r"(ffn|out)/kernel", P("fsdp", None)),  # (2D, hidden), (hidden, classes)
    (r"(ffn|out)/bias|norm/(scale|bias)", P()),
)


def specs(tree: Any, rules: Rules) -> Any:
    """PartitionSpec of every leaf of a parameter tree (nested dicts, or nnx state), by its "/"-joined path.

    Raises DataError naming path and shape where no rule, several rules, or a rule of higher rank matches.
    """
    return jax.tree.map_with_path(lambda path, leaf: _match(_name(path), leaf.shape, rules), tree)


def _match(name: str, shape: tuple[int, ...], rules: Rules) -> P:
    hits = [(pattern, spec) for pattern, spec in rules if re.fullmatch(pattern, name)]
    if not hits:
        near = difflib.get_close_matches(name, [pattern for pattern, _ in rules], n=2, cutoff=0.0)
        raise DataError(f"parameter {name} {shape} matches no partition rule; nearest are {near}, add or widen one.")
    if len(hits) > 1:
        raise DataError(f"parameter {name} {shape} matches rules {[p for p, _ in hits]}; keep one.")
    pattern, spec = hits[0]
    if len(spec) > len(shape):
        raise DataError(f"parameter {name} {shape} has fewer dimensions than rule {pattern!r} with {spec}.")
    return spec


def _name(path: tuple[Any, ...]) -> str:
    if isinstance(path[-1], GetAttrKey):  # an nnx variable's leaf is its `value`
        path = path[:-1]
    return "/".join(str(getattr(entry, "key", entry)) for entry in path)
