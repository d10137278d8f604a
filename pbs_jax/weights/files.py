"""What an export consists of, without jax or torch: file names, the parts' prefixes, safetensors writing, export.json.

The safetensors package orders its metadata at random; this writer sorts, so that equal weights are equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.schema import DataError

CARD, MODEL, FROZEN, TOKENIZER = "export.json", "model.safetensors", "frozen.safetensors", "tokenizer.json"
READABLE = "CARD.md"  # the card that people read
BESIDE = "language_model"  # of export.json: the snapshot that stays apart; also the folder's name inside an export
# Part of a question-answering export -> (its file, the prefix of its tensors). What follows the prefix are the names of
# the official Q-Former, of DINOv2 and of Hugging Face's Qwen2.
PARTS = {
    "qformer": (MODEL, "model.visual.encoder.qformer."),
    "projector": (MODEL, "model.visual.projector."),
    "backbone": (FROZEN, "backbone."),
    "language_model": (FROZEN, "language_model."),
    "slide_perceiver": (MODEL, "model.visual.encoder.resampler."),
    "patch_perceiver": (MODEL, "patch_encoder.resampler."),
}
ANSWERS = {  # phases that answer questions -> the parts of an export that can, in the order they run
    "cell_qa": ("backbone", "qformer", "projector", "language_model"),
    "slide_qa": ("slide_perceiver", "projector", "language_model"),
}


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> dict[str, Any]:
    """Writes float32 tensors, sorted by name; returns sha256 and counts. Raises DataError for what is not finite.

    The file is written beside, read back with the safetensors package, compared bit by bit, and only then renamed.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
            raise DataError(f"{path}: tensor {name} is {tensor.dtype} or not finite; only sound float32 is exported")
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    beside, digest = path.with_name(path.name + ".partial"), hashlib.sha256()
    with beside.open("wb") as file:
        for block in _blocks(head, tensors):
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    _compare(beside, tensors)
    os.replace(beside, path)
    count = sum(tensor.size for tensor in tensors.values())
    return {"sha256": digest.hexdigest(), "tensors": len(tensors), "parameters": count}


def _blocks(head: bytes, tensors: Mapping[str, np.ndarray]) -> Iterator[bytes]:
    yield len(head).to_bytes(8, "little")
    yield head
    for _, tensor in sorted(tensors.items()):
        yield tensor.astype("<f4").tobytes()


def _compare(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        if set(file.keys()) != set(tensors):
            raise DataError(f"{path} does not read back with the names written: is the disk full or damaged?")
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            if found.shape != tensor.shape or found.tobytes() != tensor.tobytes():
                raise DataError(f"{path}: tensor {name} does not read back as written: is the disk full or damaged?")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_card(directory: str | Path) -> dict[str, Any]:
    """export.json of a finished export, its files checked against their hashes. Raises DataError."""
    path = Path(directory) / CARD
    if not path.is_file():
        raise DataError(f"{path} is missing: write it with `pbs weights export --workdir=… --out={directory}`")
    card = json.loads(path.read_text())
    for name, facts in card["files"].items():
        file = path.with_name(name)
        if not file.is_file():
            raise DataError(f"{file} is missing: export again")
        found = sha256_of(file)
        if found != facts["sha256"]:
            raise DataError(f"{file} is not the file that {path} describes (sha256 {found[:12]}): export again")
    return card


def seen_by_backbone(facts: Mapping[str, Any]) -> list[str]:
    """Image sets that an imported backbone was pre-trained on, as its workdir tells; [] for one trained here."""
    file = Path(facts["backbone"]) / "handover.json" if facts.get("backbone") else None
    told = json.loads(file.read_text())["facts"] if file and file.is_file() else facts
    return list(told.get("seen", []))
