"""`pbs weights import official`: a phase's model.safetensors of the PyTorch release, or one that we exported, read back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flax import nnx

from configs.base import FULL
from data_prep.schema import DataError
from data_prep.tokens import load_tokenizer
from pbs_jax.models.alignment import Alignment
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverResampler
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import Size, get_size
from pbs_jax.models.vit import ViT
from pbs_jax.train.phase0_backbone import OUTPUTS
from pbs_jax.weights.convert import to_flax
from pbs_jax.weights.export import phase_tables
from pbs_jax.weights.importers import Imported, abstract
from pbs_jax.weights.source import open_source

# Prefix of some tensor of a phase's file -> the phase; the first that fits counts.
PREFIXES = {
    "qformer.": "cell_representation",
    "patch_encoder.resampler.": "cell_patch_alignment",
    "model.visual.encoder.qformer.": "cell_qa",
    "model.visual.encoder.resampler.": "slide_qa",
    "model.layers.": "language_model",
    "blocks.": "backbone",
}


def module_states(phase: str, size: Size, slide_dim: int | None = None) -> dict[str, Any]:
    """Tree name -> abstract parameters of a phase's trainable trees; slide_dim: width of the slide features."""
    slide = size.slide_perceiver(slide_dim or size.patch_perceiver.dim)
    width = slide.dim if phase == "slide_qa" else size.qformer.dim
    makers: dict[str, Any] = {
        "backbone": lambda: ViT(size.vit, rngs=nnx.Rngs(0)),
        "head": lambda: ClassifierHead(size.vit.dim, OUTPUTS, rngs=nnx.Rngs(0)),
        "language_model": lambda: Decoder(size.decoder, rngs=nnx.Rngs(0)),
        "qformer": lambda: QFormer(size.qformer, rngs=nnx.Rngs(0)),
        "patch_perceiver": lambda: PerceiverResampler(size.patch_perceiver, rngs=nnx.Rngs(0)),
        "alignment": lambda: Alignment(
            size.qformer.dim, size.patch_perceiver.dim, size.qformer.projection, rngs=nnx.Rngs(0)
        ),
        "slide_perceiver": lambda: PerceiverResampler(slide, rngs=nnx.Rngs(0)),
        "projector": lambda: Projector(width, size.decoder.dim, rngs=nnx.Rngs(0)),
    }
    return {name: abstract(makers[name]) for name in phase_tables(phase, size)}


def official(path: Path, size_name: str, data: Path | None = None) -> Imported:
    """`path`: the file or its folder. Raises DataError when it is of no phase or not of the size."""
    file = path / "model.safetensors" if path.is_dir() else path
    source = open_source(file)
    phase = next((phase for prefix, phase in PREFIXES.items() if any(n.startswith(prefix) for n in source)), None)
    if phase is None:
        raise DataError(f"{file} is of no phase of PBS-VL: its tensors are named like {min(source)}")
    if size_name not in FULL and data is None:
        raise DataError(f"size {size_name} has its own tokenizer: give --data, the OUT of `pbs data run`")
    tokenizer = load_tokenizer(data / "tokenizer") if data else None
    size = get_size(size_name, tokenizer if size_name not in FULL else None)
    slide_dim = source.shapes.get("model.visual.encoder.resampler.input_projection.weight", (0, None))[1]
    states = module_states(phase, size, slide_dim)
    trees, left = {}, set(source)
    for name, table in phase_tables(phase, size).items():
        prefixes = {row.torch.split("{}")[0] for row in table.rows}
        own = {key for key in left if key.startswith(tuple(prefixes))}
        trees[name] = to_flax({key: source[key] for key in own}, table, states[name])
        left -= own | {key for key in left if any(re.fullmatch(pattern, key) for pattern in table.ignored)}
    if left:
        raise DataError(f"{file} holds {len(left)} tensors that phase {phase} lacks, first {min(left)}")
    facts = {
        "size": size_name,
        "tokenizer_sha256": tokenizer.sha256 if tokenizer else "",
        "datasets": {},
    }
    if phase == "slide_qa":
        facts["features"] = {"dim": slide_dim}
    return Imported(phase, trees, facts, source)
