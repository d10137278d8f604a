"""Remote data: copied, checked, resumed; half of it never reaches a training step."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from data_prep.io import TEXT, open_dataset, write_dataset
from data_prep.schema import DataError
from pbs_jax.data.staging import stage

ADDRESS = "memory://bucket/data"


@pytest.fixture
def bucket(tmp_path: Path):
    """A dataset of 30 records on a memory file system."""
    records = ({"cell_id": f"{k:03d}", "split": "train"} for k in range(30))
    write_dataset(
        tmp_path / "made",
        "cells",
        {"cell_id": TEXT, "split": TEXT},
        records,
        id_feature="cell_id",
        config={},
        inputs={},
    )
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "made") + "/", "/bucket/data/", recursive=True)
    yield memory
    memory.rm("/bucket", recursive=True)


def test_staged_data_are_the_data_and_are_copied_once(bucket, tmp_path, monkeypatch):
    folder = stage(ADDRESS, tmp_path / "cache")
    assert len(open_dataset(folder / "cells", "train")) == 30
    monkeypatch.setattr("shutil.copyfileobj", lambda *_: pytest.fail("copied again"))
    assert stage(ADDRESS, tmp_path / "cache") == folder


def test_half_staged_data_are_refused_by_name(bucket, tmp_path):
    shard = next(name for name in bucket.find("/bucket") if "array_record" in name)
    with bucket.open(shard, "rb") as file:
        content = file.read()
    with bucket.open(shard, "wb") as file:
        file.write(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"not whole: shard .*array_record.* cut short"):
        stage(ADDRESS, tmp_path / "cache")
    with pytest.raises(DataError, match="holds no files"):
        stage("memory://bucket/nothing", tmp_path / "cache")


def test_shards_without_their_manifest_are_refused(bucket, tmp_path):
    bucket.rm(next(name for name in bucket.find("/bucket") if name.endswith("manifest.json")))
    with pytest.raises(DataError, match="has shards and no manifest"):
        stage(ADDRESS, tmp_path / "cache")
