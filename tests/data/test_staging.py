"""What was replaced in a bucket by as many bytes is never trained on as it was; every folder of a config is staged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from data_prep.io import TEXT, VERSION, open_dataset, read_manifest, write_dataset
from data_prep.schema import DataError
from pbs_jax.config import load
from pbs_jax.data.staging import stage
from pbs_jax.train.loop import staged

ADDRESS = "memory://replaced/data"
FEATURES = {"cell_id": TEXT, "split": TEXT}


def upload(folder: Path, ids: list[str]) -> str:
    """Puts a dataset of two splits in the place of the bucket's; returns its content id. Only `train` has `ids`."""
    shutil.rmtree(folder, ignore_errors=True)
    records = [{"cell_id": id, "split": "train"} for id in ids] + [{"cell_id": "same", "split": "val"}]
    content_id = write_dataset(folder, "cells", FEATURES, records, id_feature="cell_id", config={}, inputs={})
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(f'"{ids[0]}"')
    memory = fsspec.filesystem("memory")
    if memory.exists("/replaced"):
        memory.rm("/replaced", recursive=True)
    memory.put(f"{folder}/", "/replaced/data/", recursive=True)
    return content_id


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Names of the files that were fetched; two records, "a0" and "a1", are staged."""
    upload(tmp_path / "made", ["a0", "a1"])
    stage(ADDRESS, tmp_path)
    names: list[str] = []
    real = shutil.copyfileobj

    def told(source: Any, copy: Any, size: int) -> None:
        names.append(Path(copy.name).name)
        real(source, copy, size)

    monkeypatch.setattr("pbs_jax.data.staging.shutil.copyfileobj", told)
    yield names
    fsspec.filesystem("memory").rm("/replaced", recursive=True)


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "run.json"}


def test_a_dataset_replaced_by_as_many_bytes_is_fetched_again(tmp_path: Path, copied: list[str]) -> None:
    before = sizes(tmp_path / "made")
    content_id = upload(tmp_path / "made", ["b0", "b1"])
    assert sizes(tmp_path / "made") == before
    folder = stage(ADDRESS, tmp_path)
    assert open_dataset(folder / "cells", "train").ids == ["b0", "b1"]
    assert read_manifest(folder / "cells")["content_id"] == content_id
    assert (folder / "tokenizer" / "tokenizer.json").read_text() == '"b0"'
    fetched = {name for name in copied if "array_record" in name}
    assert len(fetched) == 1 and "train" in fetched.pop(), "the shard of val is the same"


def test_a_replacement_that_was_broken_off_goes_on(
    tmp_path: Path, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(tmp_path / "made", ["b0", "b1"])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("pbs_jax.data.staging.atomic_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        stage(ADDRESS, tmp_path)
    copied.clear()
    assert open_dataset(stage(ADDRESS, tmp_path) / "cells", "train").ids == ["b0", "b1"]
    assert not any("array_record" in name for name in copied)


def test_what_left_the_bucket_leaves_the_copy(tmp_path: Path, copied: list[str]) -> None:
    folder = stage(ADDRESS, tmp_path)
    (folder / "cells" / VERSION / "cells-test.array_record-00000-of-00001").write_bytes(b"of a larger one")
    stage(ADDRESS, tmp_path)
    assert not list(folder.rglob("*test*"))


def test_a_copy_that_was_damaged_is_mended_by_the_next_staging(tmp_path: Path, copied: list[str]) -> None:
    shard = next(stage(ADDRESS, tmp_path).rglob("cells-train.array_record*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="not whole"):
        stage(ADDRESS, tmp_path)
    assert stage(ADDRESS, tmp_path) and shard.read_bytes() == content


def test_all_folders_of_a_config_are_staged(tmp_path: Path, copied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flags = [f"--config.data.{name}={ADDRESS}" for name in ("root", "features", "slides")]
    data = staged(load("phase0_language_model", flags)).data
    for folder in (data.root, data.features, data.slides):
        assert open_dataset(Path(folder) / "cells", "train").ids == ["a0", "a1"]
