"""A finished chain of tiny random networks on a few made cells: what a question-answering run leaves, without training."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from orbax.checkpoint import v1 as ocp
from PIL import Image
from safetensors.numpy import load_file

from data_prep.datasets import CELL_FEATURES, QA_FEATURES, cell_record, qa_record
from data_prep.io import write_dataset
from data_prep.qa import cell_questions
from data_prep.tokens import CLS, DEC, PAD, Tokenizer, tokenizer_texts, train_tokenizer
from pbs_jax.models.alignment import Alignment
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverResampler
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.sizes import Size
from pbs_jax.models.vit import ViT, ViTConfig
from pbs_jax.train import handover
from pbs_jax.train.phase0_backbone import OUTPUTS
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights.export import export
from pbs_jax.weights.files import write_safetensors
from tests.data_prep.wbcatt import made_cells

PHASES = {
    "backbone": ("backbone", "head"),
    "language_model": ("language_model",),
    "cell_representation": ("qformer",),
    "cell_qa": ("qformer", "projector"),
    "cell_patch_alignment": ("patch_perceiver", "alignment"),
    "slide_qa": ("slide_perceiver", "projector"),
    "classifier": ("head",),
}
SLIDE_DIM = 24  # width of the slide features


@dataclasses.dataclass(frozen=True)
class Chain:
    """root: cells, cell_qa, tokenizer; runs: phase -> workdir; params: tree -> parameters (of cell_qa for the Q-Former)."""

    root: Path
    runs: dict[str, Path]
    params: dict[str, Any]
    size: Size


def tiny_size(name: str, tokenizer: Tokenizer | None = None, *, int8: bool = False) -> Size:
    """In place of `get_size`."""
    vocab = {"vocab": tokenizer.size} if tokenizer else {}
    ids = {
        key: tokenizer.id(token) if tokenizer else 0
        for key, token in (("pad_id", PAD), ("cls_id", CLS), ("dec_id", DEC))
    }
    width = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 48}
    return Size(
        name,
        ViTConfig.nano(image_size=32, dim=32, depth=2, heads=4, mlp_dim=48),
        QFormerConfig.nano(**width, encoder_width=32, projection=16, **vocab, **ids),
        DecoderConfig.nano(**width, kv_heads=2, head_dim=8, mrope_section=(2, 1, 1), int8=int8, **vocab),
        "float32",
    )


def random_tree(make: Any, seed: int) -> dict[str, Any]:
    """Parameters of the size that a trained network's have, none of them equal, so that any mix-up shows."""
    generator = np.random.default_rng(seed)
    leaves = {}
    for path, leaf in flatten_dict(nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))).items():
        value = generator.standard_normal(leaf.shape, np.float32)
        if path[-1] == "kernel":
            value = value * np.float32(1.3 / leaf.shape[-2] ** 0.5)
        elif path[-1] in ("scale", "ls1", "ls2"):
            value = 1 + value / 4
        elif path[-1] in ("bias", "embedding"):  # small embeddings: the layers decide the next token, not the last one
            value = value / 5
        leaves[path] = value
    return unflatten_dict(leaves)


def finish(workdir: Path, phase: str, trees: dict[str, Any], root: Path, facts: dict[str, Any]) -> None:
    """A workdir as the training loop leaves it."""
    ocp.save_checkpointables(workdir / "checkpoints" / "7", {"params": trees})
    config = {"seed": 0, "data": {"root": str(root)}}
    handover.write(workdir, step=7, trees=trees, config=config, facts={"size": "nano", **facts}, phase=phase)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    root, runs = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("runs")
    cells = [dataclasses.replace(cell, image=noise(k)) for k, cell in enumerate(made_cells(6))]
    questions = cell_questions(cells)
    write_dataset(root, "cells", CELL_FEATURES, map(cell_record, cells), id_feature="cell_id", config={}, inputs={})
    write_dataset(root, "cell_qa", QA_FEATURES, map(qa_record, questions), id_feature="id", config={}, inputs={})
    tokenizer = train_tokenizer(tokenizer_texts(cells, questions), root / "tokenizer", 600)
    size = tiny_size("nano", tokenizer)
    params = {
        "backbone": random_tree(lambda rngs: ViT(size.vit, rngs=rngs), 1),
        "head": random_tree(lambda rngs: ClassifierHead(size.vit.dim, OUTPUTS, rngs=rngs), 2),
        "language_model": random_tree(lambda rngs: Decoder(size.decoder, rngs=rngs), 3),
        "qformer": random_tree(lambda rngs: QFormer(size.qformer, rngs=rngs), 4),
        "projector": random_tree(lambda rngs: Projector(size.qformer.dim, size.decoder.dim, rngs=rngs), 5),
        "patch_perceiver": random_tree(lambda rngs: PerceiverResampler(size.patch_perceiver, rngs=rngs), 6),
        "alignment": random_tree(lambda rngs: Alignment(32, 32, 16, rngs=rngs), 7),
        "slide_perceiver": random_tree(lambda rngs: PerceiverResampler(size.slide_perceiver(SLIDE_DIM), rngs=rngs), 8),
    }
    facts: dict[str, Any] = {"tokenizer_sha256": tokenizer.sha256, "datasets": {"cells": "c"}}
    facts |= {"features": {"dim": SLIDE_DIM, "kind": "backbone"}, "max_patches": 8}
    for name in ("backbone", "language_model"):
        facts |= {name: str(runs / name), f"{name}_sha256": tree_sha256(params[name])}
    for phase, trees in PHASES.items():
        finish(runs / phase, phase, {name: params[name] for name in trees}, root, facts)
    return Chain(root, {phase: runs / phase for phase in PHASES}, params, size)


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """Makes "nano" `tiny_size` for export and answering; programs are hardly optimised: compiling them is what takes time."""
    flag = "jax_disable_most_optimizations"
    before = jax.config.read(flag)
    jax.config.update(flag, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "")  # no programs in the home folder of who runs the tests
        patch.setattr("pbs_jax.decode.answer.get_size", tiny_size)
        patch.setattr("pbs_jax.decode.slide_answer.get_size", tiny_size)
        patch.setattr("pbs_jax.weights.export.get_size", tiny_size)
        yield
    jax.config.update(flag, before)


@pytest.fixture(scope="module")
def exported(chain: Chain, tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exported question-answering phase; not to be written to."""
    out = tmp_path_factory.mktemp("export")
    export(chain.runs["cell_qa"], out)
    return out


def rewritten(exported: Path, folder: Path, file: str, change: Any) -> Path:
    """A copy of the export with one file's tensors changed, and export.json saying so."""
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / file)
    change(tensors)
    card = json.loads((folder / "export.json").read_text())
    card["files"][file] = write_safetensors(folder / file, tensors, {})
    (folder / "export.json").write_text(json.dumps(card))
    return folder


def noise(seed: int) -> bytes:
    """A picture of coloured noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((48, 48), Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()
