"""Checkpoints are read whole or refused with a reason: safetensors, sharded folders, torch files, npz."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from data_prep.schema import DataError
from pbs_jax.weights.source import open_source

TENSORS = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array([1.5, -2], ml_dtypes.bfloat16),
    "step": np.array(7, np.int64),
}


def equal(found: object, wanted: dict[str, np.ndarray] = TENSORS) -> None:
    assert set(found) == set(wanted)  # type: ignore[call-overload]
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and np.array_equal(found[name], value), name  # type: ignore[index]


def test_safetensors_are_mapped_with_their_dtypes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    equal(source)
    assert isinstance(source["a.weight"], np.memmap) and source.shapes["b"] == (2,)


def test_a_sharded_folder_is_whole_or_refused(tmp_path: Path) -> None:
    index = {"a.weight": "m-1.safetensors", "b": "m-2.safetensors", "step": "m-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "m-1.safetensors")
    with pytest.raises(DataError, match=r"lacks 1 of 2 shards, first m-2\.safetensors"):
        open_source(tmp_path)
    save_file({name: TENSORS[name] for name in ("b", "step")}, tmp_path / "m-2.safetensors")
    equal(open_source(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(DataError, match=r"holds 2 files .* and no index"):
        open_source(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"model\.safetensors is damaged .*cut short"):
        open_source(file)
    with pytest.raises(DataError, match="does not exist"):
        open_source(tmp_path / "absent")


def test_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"a.weight": TENSORS["a.weight"]})
    equal(open_source(tmp_path / "x.npz"), {"a.weight": TENSORS["a.weight"]})
    np.savez(tmp_path / "object.npz", a=np.array([{}], object))
    with pytest.raises(DataError, match="damaged or not what its name says"):
        open_source(tmp_path / "object.npz")


@pytest.mark.torch
def test_torch_files_hold_tensors_or_are_refused(tmp_path: Path) -> None:
    import torch

    tensors = {"a.weight": torch.from_numpy(TENSORS["a.weight"]), "b": torch.tensor([1.5, -2], dtype=torch.bfloat16)}
    wanted = {name: TENSORS[name] for name in tensors}
    torch.save({"teacher": tensors, "iteration": 3}, tmp_path / "new.pth")
    torch.save({"model": tensors}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("new.pth", "old.bin"):
        equal(open_source(tmp_path / name), wanted)
    torch.save({"model": Path("x")}, tmp_path / "object.pth")
    with pytest.raises(DataError, match=r"object\.pth does not load as plain tensors"):
        open_source(tmp_path / "object.pth")
