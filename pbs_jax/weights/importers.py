"""`pbs weights import`: published weights as the workdir of a finished phase, so that training and answering use them.

A backbone or Q-Former is converted and written with Orbax. A language model stays where it lies: the workdir points to
its files, and loading streams them (`weights.stream`). Shapes come from the tensors and config.json, never from hope.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from data_prep.io import atomic_write
from data_prep.schema import DataError
from data_prep.tokens import DEC, load_tokenizer
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.sizes import get_size
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.train import handover
from pbs_jax.train.phase import parameters
from pbs_jax.train.state import Params, leaves_by_name
from pbs_jax.weights.convert import plan, to_flax
from pbs_jax.weights.files import sha256_of
from pbs_jax.weights.source import Source, decoder_name, dinov2_name, open_source
from pbs_jax.weights.stream import stream
from pbs_jax.weights.tables import Table, decoder_table, vit_table
from pbs_jax.weights.tables_hf import bert_table, blip2_hf_table, blip2_table, dinov2_hf_table

COMPUTE = ("dtype", "remat", "attention", "int8")  # of a DecoderConfig: how, not what
HEAD_DIM = 64  # of every published DINOv2 and BERT; a config.json or --heads says otherwise
# The evaluation images' sources among DinoBloom's training sets (official_code.md 8): not unseen by this backbone.
DINOBLOOM_SAW = ("AML-Cytomorphology_LMU", "APL", "WBC_LISC", "BCCD", "PBC")


@dataclasses.dataclass(frozen=True)
class Imported:
    """`trees` are converted parameters, or, when `linked`, shapes of what stays in the source's files."""

    phase: str
    trees: Params
    facts: dict[str, Any]
    source: Source
    dropped: tuple[str, ...] = ()
    linked: bool = False
    fresh: tuple[str, ...] = ()


def import_weights(
    family: str, path: Path | None, out: Path, *, size: str | None = None, heads: int | None = None,
    offset: float | None = None, antialias: bool | None = None, ln_vision: bool = False, data: Path | None = None,
    tokenizer: Path | None = None,
) -> Imported:  # fmt: skip
    """Writes `out` (handover.json, and checkpoints unless linked). Raises DataError for what does not fit exactly.

    offset, antialias: position interpolation of a DINOv2 checkpoint, else its publisher's. data: OUT of `pbs data run`,
    whose tokenizer an `official` file of nano or small was trained with. tokenizer: BERT's folder, which a Q-Former's
    captions need (default: the source's, when it has one).
    """
    if path is None and family != "gguf-llama":
        raise DataError(f"{family} needs SOURCE: a weight file or the folder of a snapshot")
    match family:
        case "dinobloom":
            done = dinobloom(Path(path or ""), size or "7b", heads, offset, antialias)
        case "blip2":
            done = blip2(Path(path or ""), size or "7b", heads, ln_vision)
        case "bert":
            done = bert(Path(path or ""), size or "7b", heads)
        case "qwen2_5_vl":
            done = language_model(Path(path or ""), size or "7b")
        case "gguf-llama":
            from pbs_jax.weights.gguf_llama import dequantise

            done = language_model(dequantise(path, out), size or "small")
        case "qc":
            from pbs_jax.weights.qc import qc

            done = qc(Path(path or ""))
        case "official":
            from pbs_jax.weights.official import official

            done = official(Path(path or ""), size or "7b", data)
        case _:
            raise DataError(f'family "{family}" is unknown')
    source = {
        "family": family,
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in done.source.files},
    }
    content: dict[str, Any] = {"imported": source}
    if done.linked:
        folder = done.source.files[0].parent.resolve()
        inside = folder.is_relative_to(out.resolve())
        content["linked"] = str(folder.relative_to(out.resolve()) if inside else folder)
    else:
        ocp.save_checkpointables((out / "checkpoints" / "0").resolve(), {"params": done.trees}, overwrite=True)
    if family in ("bert", "blip2"):
        write_words(tokenizer or Path(path or ""), done.facts["qformer"]["dec_id"], out, required=tokenizer is not None)
    config = {"seed": None, "data": {"root": str(data or "")}}
    handover.write(out, step=0, trees=done.trees, config=config, facts={**done.facts, **content}, phase=done.phase)
    return done


def dinobloom(
    path: Path, size: str, heads: int | None = None, offset: float | None = None, antialias: bool | None = None
) -> Imported:
    """DINOv2 and DinoBloom in every spelling of the hub, its trainer, timm and Hugging Face."""
    source, dropped = open_source(path).renamed(dinov2_name)
    facts = _config(path)
    hugging = "embeddings.cls_token" in source
    if not hugging and not any(".w12." in name for name in source):
        source = _timm(source)
    config = vit_shape(source.shapes, heads or facts.get("num_attention_heads"))
    changes: dict[str, Any] = {"interpolate_offset": (0.0 if hugging else 0.1) if offset is None else offset}
    if antialias is not None:
        changes["antialias"] = antialias
    config = dataclasses.replace(config, **changes, eps=facts.get("layer_norm_eps", config.eps))
    table = dinov2_hf_table(config) if hugging else vit_table(config)
    tree = to_flax(source, table, abstract(lambda: ViT(config, rngs=nnx.Rngs(0))))
    told = {"size": size, "vit": dataclasses.asdict(config), "datasets": {}, "seen": list(DINOBLOOM_SAW)}
    return Imported("backbone", {"backbone": tree}, told, source, tuple(dropped))


def vit_shape(shapes: Mapping[str, tuple[int, ...]], heads: int | None = None) -> ViTConfig:
    """A DINOv2's shape as its tensors say it. Raises DataError, with examples, when the naming is unknown."""
    hugging = "embeddings.cls_token" in shapes
    layer = r"encoder\.layer\.(\d+)\." if hugging else r"blocks\.(\d+)\."
    numbers = {int(found[1]) for name in shapes if (found := re.match(layer, name))}
    first = "encoder.layer.0." if hugging else "blocks.0."
    names = {
        "positions": "embeddings.position_embeddings" if hugging else "pos_embed",
        "patch": "embeddings.patch_embeddings.projection.weight" if hugging else "patch_embed.proj.weight",
    }
    missing = [name for name in names.values() if name not in shapes]
    ffn = next((kind for kind in ("fc2", "w3", "weights_out") if f"{first}mlp.{kind}.weight" in shapes), None)
    if missing or not numbers or not ffn:
        raise DataError(
            f"this is no DINOv2 naming: {', '.join(missing) or first + 'mlp'} is not among {_examples(shapes)}"
        )
    dim, _, patch, _ = shapes[names["patch"]]
    grid = math.isqrt(shapes[names["positions"]][1] - 1)
    if grid * grid + 1 != shapes[names["positions"]][1]:
        raise DataError(f"{names['positions']} {shapes[names['positions']]} is not of a square grid and a class token")
    return ViTConfig(
        image_size=224 if patch == 14 else grid * patch,
        patch_size=patch,
        dim=dim,
        depth=max(numbers) + 1,
        heads=heads or max(1, dim // HEAD_DIM),
        mlp_dim=shapes[f"{first}mlp.{ffn}.weight"][1],
        ffn="mlp" if ffn == "fc2" else "swiglu",
        position_grid=None if grid * patch == 224 else (grid, grid),
    )


def _timm(source: Source) -> Source:
    """timm calls SwiGLU's packed matrix fc1: told apart by being twice as wide as fc2 reads."""
    wide = source.shapes.get("blocks.0.mlp.fc1.weight"), source.shapes.get("blocks.0.mlp.fc2.weight")
    if not (wide[0] and wide[1] and wide[0][0] == 2 * wide[1][1]):
        return source
    return source.renamed(lambda name: name.replace(".mlp.fc1.", ".mlp.w12.").replace(".mlp.fc2.", ".mlp.w3."))[0]


def blip2(path: Path, size: str, heads: int | None = None, ln_vision: bool = False) -> Imported:
    """BLIP-2 stage 1, as LAVIS or Hugging Face write it, into a Q-Former; `ln_vision`: keep the file's norm."""
    source = open_source(path)
    facts = _config(path).get("qformer_config", {})
    hugging = "qformer.layernorm.weight" in source
    config = qformer_shape(
        source.shapes, "qformer." if hugging else "Qformer.bert.", heads or facts.get("num_attention_heads")
    )
    config = dataclasses.replace(config, eps=facts.get("layer_norm_eps", config.eps))
    table = blip2_hf_table(config) if hugging else blip2_table(config, ln_vision)
    return _qformer(source, config, table, size)


def bert(path: Path, size: str, heads: int | None = None) -> Imported:
    """bert-base-uncased into the size's Q-Former; [DEC] gets a fresh row, as do all parts that BERT lacks."""
    source, _ = open_source(path).renamed(_bert_name)
    layer = "bert.encoder.layer.0."
    words = source.shapes.get("bert.embeddings.word_embeddings.weight")
    if words is None:
        raise DataError(f"{path} is no BERT: bert.embeddings.word_embeddings.weight is not among {_examples(source)}")
    depth = 1 + max(int(found[1]) for name in source if (found := re.match(r"bert\.encoder\.layer\.(\d+)\.", name)))
    config = dataclasses.replace(
        get_size(size).qformer,
        dim=words[1],
        layers=depth,
        heads=heads or _config(path).get("num_attention_heads") or words[1] // HEAD_DIM,
        ffn_dim=source.shapes[f"{layer}intermediate.dense.weight"][0],
        vocab=words[0] + 1,
        dec_id=words[0],
        max_positions=source.shapes["bert.embeddings.position_embeddings.weight"][0],
    )
    return _qformer(source, config, bert_table(), size)


def _bert_name(name: str) -> str:
    """The bare `BertModel` lacks the prefix; Google's conversion calls a norm's parameters gamma and beta."""
    if not re.match(r"(bert|cls)\.", name):
        name = f"bert.{name}"
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: "LayerNorm." + {"gamma": "weight", "beta": "bias"}[m[1]], name)


def _qformer(source: Source, config: QFormerConfig, table: Table, size: str) -> Imported:
    _, start = parameters(lambda rngs: QFormer(config, rngs=rngs), 42)
    start = jax.tree.map(np.asarray, start)
    tensors: Mapping[str, np.ndarray] = source
    if any(row.torch.startswith("bert.") for row in table.rows):  # [DEC]: one row more than BERT has
        tensors = dict(source)
        words = "bert.embeddings.word_embeddings.weight"
        tensors[words] = np.concatenate([tensors[words], start["words"][-1:]])
        tensors["cls.predictions.bias"] = np.append(tensors["cls.predictions.bias"], np.float32(0))
    tree = to_flax(tensors, table, start)
    fresh = sorted(name for name in leaves_by_name(tree) if any(re.fullmatch(p, name) for p in table.fresh))
    dropped = sorted(name for name in source if any(re.fullmatch(pattern, name) for pattern in table.ignored))
    facts = {"size": size, "qformer": dataclasses.asdict(config), "tokenizer_sha256": "", "datasets": {}}
    return Imported("cell_representation", {"qformer": tree}, facts, source, tuple(dropped), fresh=tuple(fresh))


def write_words(folder: Path, dec_id: int, out: Path, required: bool) -> None:
    """out/tokenizer/tokenizer.json: BERT's with [DEC] after its last word, as the official code adds it. Raises DataError."""
    if not (folder / "tokenizer.json").is_file() and not required:
        return
    backend = load_tokenizer(folder).backend
    backend.no_padding()
    backend.no_truncation()
    backend.add_special_tokens([DEC])
    if backend.token_to_id(DEC) != dec_id:
        raise DataError(
            f"{folder} has {backend.token_to_id(DEC)} words, the Q-Former {dec_id}: it is another tokenizer"
        )
    atomic_write(out / "tokenizer" / "tokenizer.json", backend.to_str())


def qformer_shape(shapes: Mapping[str, tuple[int, ...]], prefix: str, heads: int | None = None) -> QFormerConfig:
    """A BLIP-2 Q-Former's shape as its tensors say it (`prefix` "qformer." of Hugging Face, else "...Qformer.bert.")."""
    layer = f"{prefix}encoder.layer."
    layer_numbers = [(name, re.match(re.escape(layer) + r"(\d+)\.", name)) for name in shapes]
    numbers = {name: int(found[1]) for name, found in layer_numbers if found}
    crossing = sorted(number for name, number in numbers.items() if name.endswith("crossattention.output.dense.weight"))
    query = next((name for name in shapes if name.endswith("query_tokens")), None)
    if query is None or not crossing:
        raise DataError(f"this is no Q-Former: no query_tokens and {layer}N.crossattention among {_examples(shapes)}")
    part = "attention" if prefix == "qformer." else "self"
    words = next(name for name in shapes if name.endswith("embeddings.word_embeddings.weight"))
    projection = next(name for name in shapes if name.endswith(("vision_proj.weight", "vision_projection.weight")))
    depth = 1 + max(numbers.values())
    dim = shapes[query][-1]
    return QFormerConfig.blip2(
        dim=dim,
        layers=depth,
        heads=heads or max(1, dim // HEAD_DIM),
        ffn_dim=shapes[f"{layer}0.intermediate_query.dense.weight"][0],
        vocab=shapes[words][0],
        dec_id=shapes[words][0] - 1,
        max_positions=shapes[words.replace("word", "position")][0],
        encoder_width=shapes[f"{layer}0.crossattention.{part}.key.weight"][1],
        cross_attention_freq=crossing[1] - crossing[0] if len(crossing) > 1 else depth,
        queries=shapes[query][1],
        projection=shapes[projection][0],
    )


def language_model(path: Path, size: str) -> Imported:
    """A folder of Hugging Face's: config.json, safetensors, tokenizer.json. Its weights stay there."""
    source, config, table, dropped = decoder_source(path)
    sized = get_size(size)
    differing = [
        f"{name} {have} (size {size}: {want})"
        for name, have in dataclasses.asdict(config).items()
        if name not in COMPUTE and not _same(have, want := getattr(sized.decoder, name))
    ]
    tree = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    plan(source.shapes, table, tree)
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, sized.frozen_dtype), tree)
    tokenizer = path / "tokenizer.json"
    facts = {
        "size": size,
        "decoder": dataclasses.asdict(config),
        "differs": differing,
        "tokenizer_sha256": load_tokenizer(path).sha256 if tokenizer.is_file() else "",
        "datasets": {},
    }
    return Imported("language_model", {"language_model": tree}, facts, source, tuple(dropped), linked=True)


def _same(one: Any, two: Any) -> bool:
    return math.isclose(one, two, rel_tol=1e-6) if isinstance(one, float) else one == two


def decoder_source(path: Path) -> tuple[Source, DecoderConfig, Table, list[str]]:
    """Tensors under Llama's names, shape, table and what was left out (the vision model), of a snapshot folder."""
    told = _config(path)
    if not told:
        raise DataError(f"{path}/config.json is missing: give the folder of a Hugging Face snapshot")
    config = decoder_shape(told)
    source, dropped = open_source(path).renamed(decoder_name)
    head, embedding = source.shapes.get("lm_head.weight"), source.shapes.get("model.embed_tokens.weight")
    if (
        config.tied
        and head is not None
        and (head != embedding or not np.array_equal(source["lm_head.weight"], source["model.embed_tokens.weight"]))
    ):
        raise DataError(
            f"{path}: config.json ties lm_head to the embedding, but lm_head.weight differs from it; set "
            "tie_word_embeddings to what the weights are"
        )
    return source, config, decoder_table(config), dropped


def decoder_shape(told: Mapping[str, Any]) -> DecoderConfig:
    """config.json of a Llama or Qwen2 / Qwen2.5-VL model, nested or flat -> shape. Raises DataError for others."""
    text = {**told, **(told.get("text_config") or {})}
    kind = str(text.get("model_type", ""))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if (
        not kind.startswith(("llama", "qwen2"))
        or rope_type not in ("default", "mrope")
        or text.get("hidden_act") != "silu"
    ):
        raise DataError(
            f"a {kind or 'nameless'} model with {text.get('hidden_act')} and {rope_type} rotary embedding is not supported"
        )
    if text.get("use_sliding_window"):
        raise DataError("a model with sliding-window attention is not supported")
    heads = text["num_attention_heads"]
    sections = rope.get("mrope_section")
    return DecoderConfig(
        vocab=text["vocab_size"],
        dim=text["hidden_size"],
        layers=text["num_hidden_layers"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        ffn_dim=text["intermediate_size"],
        rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 1e4),
        mrope_section=tuple(sections) if sections else None,
        rms_eps=text["rms_norm_eps"],
        tied=bool(told.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        qkv_bias=bool(text.get("attention_bias", False)) if kind.startswith("llama") else True,
    )


def load_linked(workdir: Path, content: Mapping[str, Any], expected: Params) -> Params:
    """The trees of a handover that points to its files. Raises DataError when a file has changed size or is gone."""
    folder = workdir / content["facts"]["linked"]
    for name, facts in content["facts"]["imported"]["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts["bytes"]:
            raise DataError(f"{folder / name} is not the imported file of {facts['bytes']:,} bytes: import again")
    source, _, table, _ = decoder_source(folder)
    return {name: stream(source, table, tree, name) for name, tree in expected.items()}


def abstract(make: Any) -> Any:
    """A module's parameters as nested ShapeDtypeStructs: nothing is allocated."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(make)))


def _config(path: Path) -> dict[str, Any]:
    """config.json beside the weights, or {}."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _examples(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:6])


def summary(done: Imported) -> str:
    """What came in, for a terminal: files, tensors, parameters, what is fresh and what was left out."""
    lines = []
    for name, tree in done.trees.items():
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        lines.append(f"  {name}: {len(done.source) - len(done.dropped):,} tensors, {count:,} parameters")
    if done.fresh:
        lines.append(f"  fresh, the file lacks them: {', '.join(done.fresh)}")
    if done.dropped:
        lines.append(f"  left out: {len(done.dropped)} tensors, as {_examples(done.dropped)}")
    lines += [f"  differs from the size: {text}" for text in done.facts.get("differs", [])]
    return "\n".join(lines)
