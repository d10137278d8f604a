"""`pbs weights export`: a finished phase as safetensors under the official names, with what a reader must know beside.

model.safetensors holds the phase's trainable trees (official_code.md 3.7 fixes names and number of tensors: no more, no
less), frozen.safetensors the backbone and language model that a question-answering phase was trained on, so that the
folder alone can answer. At 7b a Hugging Face snapshot of the language model is not copied: PyTorch reads it where it lies,
or from FOLDER/language_model. Exporting the same finished phase again writes the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pbs_jax
from configs.base import FULL
from data_prep.cards import run_card
from data_prep.io import atomic_write, read_manifest
from data_prep.prompts import IM_END, IMAGE_PAD, PROMPT_SET
from data_prep.schema import DataError
from data_prep.tokens import PAD, load_tokenizer
from pbs_jax.data.augment import MEAN, STD
from pbs_jax.decode.answer import MAX_NEW
from pbs_jax.models.decoder import DecoderConfig
from pbs_jax.models.qformer import QFormerConfig
from pbs_jax.models.sizes import Size, backbone_shape, get_size
from pbs_jax.train import handover
from pbs_jax.train.phase0_backbone import OUTPUTS
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.files import (
    ANSWERS,
    BESIDE,
    CARD,
    FROZEN,
    MODEL,
    PARTS,
    READABLE,
    TOKENIZER,
    seen_by_backbone,
    write_safetensors,
)
from pbs_jax.weights.tables import (
    Table,
    decoder_table,
    linear,
    norm,
    perceiver_table,
    projector_table,
    qformer_table,
    vit_table,
)

HEAD = Table((*norm("head.norm", "norm"), *linear("head.ffn", "ffn"), *linear("head.out", "out")))


def phase_tables(phase: str, size: Size) -> dict[str, Table]:
    """Trainable tree -> its table, the names being those of the phase's model.safetensors."""
    match phase:
        case "backbone":
            return {"backbone": vit_table(size.vit), "head": HEAD}
        case "classifier":
            return {"head": HEAD}
        case "language_model":
            return {"language_model": decoder_table(size.decoder)}
        case "cell_representation":
            return {"qformer": qformer_table(size.qformer)}
        case "cell_patch_alignment":
            projections = [linear(f"{side}_projection", f"{side}_projection") for side in ("cell", "patch")]
            return {
                "patch_perceiver": perceiver_table(PARTS["patch_perceiver"][1]),
                "alignment": Table(tuple(row for rows in projections for row in rows)),
            }
        case "slide_qa":
            return {
                "slide_perceiver": perceiver_table(PARTS["slide_perceiver"][1]),
                "projector": projector_table(PARTS["projector"][1].removesuffix(".")),
            }
        case "cell_qa":
            qformer, projector = PARTS["qformer"][1], PARTS["projector"][1]
            return {
                "qformer": qformer_table(size.qformer, qformer),
                "projector": projector_table(projector.removesuffix(".")),
            }
    raise DataError(f'phase "{phase}" has no export layout')


def frozen_tables(phase: str, size: Size) -> dict[str, Table]:
    """The frozen parts of a question-answering phase -> their tables; a slide's features come ready made."""
    prefix = PARTS["language_model"][1]
    tables = {"language_model": decoder_table(size.decoder, f"{prefix}model.", f"{prefix}lm_head.weight")}
    return tables if phase == "slide_qa" else {"backbone": vit_table(size.vit, PARTS["backbone"][1]), **tables}


def torch_tensors(trees: Mapping[str, Any], tables: Mapping[str, Table]) -> dict[str, np.ndarray]:
    """All trees under their torch names, float32."""
    tensors: dict[str, np.ndarray] = {}
    for name, table in tables.items():
        for key, value in to_torch(trees[name], table).items():
            tensors[key] = np.asarray(value, np.float32, order="C")
    return tensors


def export(workdir: Path, out: Path, frozen: bool | None = None) -> dict[str, Any]:
    """Writes `out` and returns export.json's content. `frozen` (of cell_qa, slide_qa): also write what the phase was
    trained on, by default at the small sizes. Raises DataError when the phase is unfinished or the chain behind it has changed.
    """
    content = handover.read(workdir)
    phase, facts, root = content["phase"], content["facts"], Path(content["config"]["data"]["root"])
    answers = phase in ANSWERS
    if frozen and not answers:
        raise DataError(f"{workdir} is of phase {phase}: only {' and '.join(ANSWERS)} have frozen parts to export")
    with_frozen = answers and (facts["size"] not in FULL if frozen is None else frozen)
    imported = "imported" in facts
    words = tokenizer_folder(workdir, facts) if imported else Path(facts.get("words", root / "tokenizer"))
    wordless = phase in ("backbone", "classifier") or (imported and not (words / TOKENIZER).is_file())
    tokenizer = None if wordless else load_tokenizer(words)
    words_sha256 = facts.get("words_sha256") or facts.get("tokenizer_sha256")  # an imported Q-Former's file tells none
    if tokenizer and words_sha256:
        handover.same_tokenizer(workdir, {"tokenizer_sha256": words_sha256}, tokenizer, words)
    size = true_shapes(get_size(facts["size"], None if imported else tokenizer), facts)
    tables = {name: table for name, table in phase_tables(phase, size).items() if name in content["trees"]}
    beside = snapshot(facts) if with_frozen and facts["size"] in FULL else None
    frozen_parts = frozen_tables(phase, size) if with_frozen else {}
    if beside:
        del frozen_parts["language_model"]
    trees = handover.load(workdir, tables)
    for name in frozen_parts:
        trees |= handover.load_recorded(workdir, facts, name)

    card: dict[str, Any] = {
        "pbs_jax": pbs_jax.__version__,
        "workdir": str(workdir.resolve()),
        "phase": phase,
        "step": content["step"],
        "trees": {name: tree_sha256(trees[name]) for name in tables},
        "facts": facts,
        "images": _normalisation(size) if imported else _normalisation(size) | _cells(root),
        "config": content["config"],
        "shapes": {name: dataclasses.asdict(getattr(size, name)) for name in ("vit", "qformer", "decoder")},
        "seen_by_backbone": seen_by_backbone(facts),
    }
    if phase == "slide_qa":
        card["shapes"]["perceiver"] = dataclasses.asdict(size.slide_perceiver(facts["features"]["dim"]))
    if phase == "cell_patch_alignment":
        card["shapes"]["perceiver"] = dataclasses.asdict(size.patch_perceiver)
    if phase == "backbone":
        card["head_outputs"] = OUTPUTS if "head" in tables else {}
    if answers and tokenizer:
        ids = {"pad_id": tokenizer.id(PAD), "slot_id": tokenizer.id(IMAGE_PAD), "stop_id": tokenizer.id(IM_END)}
        card["answers"] = {"prompt_set": PROMPT_SET, "max_new": MAX_NEW, **ids}
    if beside:
        card[BESIDE] = beside
    metadata = {
        key: value if isinstance(value, str) else json.dumps(value, sort_keys=True) for key, value in card.items()
    }
    metadata = {"format": "pt", **metadata}

    tensors = {MODEL: torch_tensors(trees, tables)}
    if frozen_parts:
        tensors[FROZEN] = torch_tensors(trees, frozen_parts)
    out.mkdir(parents=True, exist_ok=True)
    for name in (CARD, MODEL, FROZEN, TOKENIZER, READABLE):  # nothing of an earlier export stays
        (out / name).unlink(missing_ok=True)
    files = {name: write_safetensors(out / name, part, metadata) for name, part in tensors.items()}
    if tokenizer:
        atomic_write(out / TOKENIZER, (words / TOKENIZER).read_bytes())
        files[TOKENIZER] = {"sha256": tokenizer.sha256}
    card["files"] = files
    atomic_write(out / READABLE, run_card(workdir))
    atomic_write(out / CARD, json.dumps(card, indent=1, sort_keys=True) + "\n")
    return card


def snapshot(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Folder and files of the language model that a phase was trained with, when it is a Hugging Face snapshot."""
    workdir = Path(facts["language_model"])
    told = handover.read(workdir)["facts"]
    if "linked" not in told:
        return None
    return {"folder": str((workdir / told["linked"]).resolve()), "files": told["imported"]["files"]}


def tokenizer_folder(workdir: Path, facts: Mapping[str, Any]) -> Path:
    """Where an imported part's tokenizer.json lies, if it has one: beside the linked weights or in the workdir."""
    return workdir / facts["linked"] if "linked" in facts else workdir / "tokenizer"


def told_size(facts: Mapping[str, Any]) -> Size:
    """A phase's size as its facts tell it, but for the vocabulary of a trained tokenizer."""
    return true_shapes(get_size(facts["size"]), facts)


def true_shapes(size: Size, facts: Mapping[str, Any]) -> Size:
    """The size with the shapes of imported parts, which may be of another scale than the size's own."""
    trained_on = facts.get("backbone")
    told = facts if "vit" in facts or not trained_on else handover.read(trained_on)["facts"]
    changes: dict[str, Any] = {"vit": backbone_shape(told, size.vit)}
    if "decoder" in facts:
        sections = facts["decoder"]["mrope_section"]
        changes["decoder"] = DecoderConfig(
            **{**facts["decoder"], "mrope_section": tuple(sections) if sections else None}
        )
    if "qformer" in facts:
        changes["qformer"] = QFormerConfig(**facts["qformer"])
    return dataclasses.replace(size, **changes)


def _cells(root: Path) -> dict[str, Any]:
    """How the training pictures were cut and coloured."""
    cells = read_manifest(root / "cells")
    return {
        "cells": cells["content_id"],
        "geometry": cells["details"].get("geometry"),
        "color_enhance": cells["config"].get("color_enhance"),
        "licences": cells["licences"],
    }


def _normalisation(size: Size) -> dict[str, Any]:
    """How a picture becomes the network's input."""
    return {"side": size.vit.image_size, "resize": "PIL bilinear", "mean": MEAN, "std": STD}
