"""Tensors of a checkpoint as a mapping, read when asked for: safetensors (mapped, not copied), torch files, npz.

Nothing is unpickled: .bin, .pth and .pt go through torch's `weights_only` loader, arrays through numpy without objects.
A mapped tensor costs file-backed pages, which the system takes back at will, so a model larger than memory can be read.
"""

from __future__ import annotations

import functools
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from data_prep.schema import DataError

DTYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
WRAPPERS = ("teacher", "model", "state_dict", "module")  # keys under which trainers put the weights
SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".npz")
Read = Callable[[], np.ndarray]


class Source(Mapping[str, np.ndarray]):
    """name -> array, read on access; `shapes` without reading; `file_of` where each tensor lies; `files` in order."""

    def __init__(self, readers: Mapping[str, tuple[tuple[int, ...], Path, Read]]) -> None:
        self._readers = dict(readers)
        self.shapes = {name: shape for name, (shape, _, _) in self._readers.items()}
        self.file_of = {name: path for name, (_, path, _) in self._readers.items()}
        self.files = list(dict.fromkeys(self.file_of.values()))

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name][2]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def renamed(self, rename: Callable[[str], str | None]) -> tuple[Source, list[str]]:
        """The tensors under new names, and the names dropped (those renamed to None). Raises DataError for a clash."""
        kept: dict[str, Any] = {}
        origin: dict[str, str] = {}
        dropped = []
        for name, reader in self._readers.items():
            new = rename(name)
            if new is None:
                dropped.append(name)
            elif new in kept:
                raise DataError(f"tensors {origin[new]} and {name} are both {new}: the file holds two models")
            else:
                kept[new], origin[new] = reader, name
        return Source(kept), dropped


def open_source(path: Path) -> Source:
    """All tensors of a file, or of a folder's index, or of its only set of weight files. Raises DataError."""
    readers: dict[str, tuple[tuple[int, ...], Path, Read]] = {}
    for file in weight_files(path):
        for name, (shape, read) in _open(file).items():
            if name in readers:
                raise DataError(f"tensor {name} is in {readers[name][1]} and in {file}: keep one")
            readers[name] = (shape, file, read)
    if not readers:
        raise DataError(f"{path} holds no tensor: is it the right file?")
    return Source(readers)


def weight_files(path: Path) -> list[Path]:
    """The files a checkpoint consists of, every shard its index names being there. Raises DataError."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} is no weight file: give {', '.join(SUFFIXES)}, or the folder of a snapshot")
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist: give a weight file or the folder of a snapshot")
    for pattern in ("*.safetensors", "*.bin", "*.pth", "*.npz"):
        found = sorted(path.glob(pattern))
        indices = sorted(path.glob(f"{pattern}.index.json"))
        if len(indices) == 1:
            named = sorted(set(json.loads(indices[0].read_text())["weight_map"].values()))
            missing = [name for name in named if not (path / name).is_file()]
            if missing:
                raise DataError(f"{path} lacks {len(missing)} of {len(named)} shards, first {missing[0]}: fetch them")
            return [path / name for name in named]
        if len(found) == 1:
            return found
        if found:
            raise DataError(f"{path} holds {len(found)} files {pattern} and no index: name the file itself")
    raise DataError(f"{path} holds no {', '.join(SUFFIXES)} file: fetch the weights first (`pbs weights fetch`)")


def _open(path: Path) -> dict[str, tuple[tuple[int, ...], Read]]:
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix == ".npz":
            arrays = dict(np.load(path, allow_pickle=False))
            return {name: (array.shape, functools.partial(_given, array)) for name, array in arrays.items()}
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is damaged or not what its name says ({error}): fetch it again") from error
    return _torch(path)


def _given(array: np.ndarray) -> np.ndarray:
    return array


def held(arrays: Mapping[str, np.ndarray], path: Path) -> Source:
    """Arrays that are in memory already, as read from `path`."""
    return Source({name: (array.shape, path, functools.partial(_given, array)) for name, array in arrays.items()})


def _safetensors(path: Path) -> dict[str, tuple[tuple[int, ...], Read]]:
    """Own reader: the package copies, and its numpy side lacks bfloat16."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError("its header is cut short")
        header = json.loads(file.read(length))
    found: dict[str, tuple[tuple[int, ...], Read]] = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        start, stop = facts["data_offsets"]
        dtype, shape = DTYPES[facts["dtype"]], tuple(facts["shape"])
        if 8 + length + stop > size or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name} is cut short")

        def read(at: int = 8 + length + start, dtype: Any = dtype, shape: tuple[int, ...] = shape) -> np.ndarray:
            if not math.prod(shape):
                return np.zeros(shape, dtype)
            return np.memmap(path, dtype, "r", at, shape)

        found[name] = (shape, read)
    return found


def _torch(path: Path) -> dict[str, tuple[tuple[int, ...], Read]]:
    import torch

    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path) or None)
    except Exception as error:  # torch's unpickler, the zip reader and the file system each raise their own
        reason = str(error).splitlines()[0][:120]
        raise DataError(f"{path} does not load as plain tensors ({reason}): convert it to safetensors") from error
    tensors = unwrap(loaded)
    found: dict[str, tuple[tuple[int, ...], Read]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):

            def read(tensor: Any = tensor) -> np.ndarray:
                if tensor.dtype == torch.bfloat16:
                    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
                return tensor.numpy()

            found[name] = (tuple(tensor.shape), read)
    return found


def unwrap(loaded: Any) -> Mapping[str, Any]:
    """The weights inside what a trainer saved: nested under a key of WRAPPERS, beside step counters and the like."""
    while isinstance(loaded, Mapping):
        inner = next((loaded[key] for key in WRAPPERS if isinstance(loaded.get(key), Mapping)), None)
        if inner is None:
            return loaded
        loaded = inner
    raise DataError(f"the file holds a {type(loaded).__name__}, not a dictionary of tensors")


def dinov2_name(name: str) -> str | None:
    """DINOv2's hub name for each spelling in use: trainer prefixes, chunked blocks, three LayerScales; None for heads."""
    name = re.sub(r"^(module\.|teacher\.|backbone\.|dinov2\.(?=embeddings|encoder|layernorm))*", "", name)
    if re.match(r"(dino_head|ibot_head|head|classifier)\.", name):
        return None
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
    name = re.sub(r"^(blocks\.\d+\.)(?:ls|layer_scale)([12])\.(?:gamma|weight|lambda1)$", r"\1ls\2.gamma", name)
    return name


def decoder_name(name: str) -> str | None:
    """Both layouts of Hugging Face's Qwen2.5-VL (and the text-only models') as `model.*`; None for the vision model."""
    if re.match(r"(model\.)?visual\.", name):
        return None
    return re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", name).replace(
        "language_model.lm_head", "lm_head"
    )
