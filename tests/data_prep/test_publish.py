"""Publishing to a bucket (a memory file system): whole or not seen, resumable, never over another dataset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from data_prep import publish
from data_prep.io import TEXT, open_dataset, write_dataset
from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.data.staging import stage

ADDRESS = "memory://published/v1"


def write(out: Path, count: int = 30) -> Path:
    for name in ("cells", "cell_qa"):
        records = ({"id": f"{k:03d}", "split": "train"} for k in range(count))
        write_dataset(out, name, {"id": TEXT, "split": TEXT}, records, id_feature="id", config={}, inputs={})
    (out / "tokenizer").mkdir(exist_ok=True)
    (out / "tokenizer" / "tokenizer.json").write_text("{}")
    return out


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/published"):
        memory.rm("/published", recursive=True)


def test_what_is_published_can_be_staged_and_a_second_time_sends_nothing(bucket: Any, tmp_path: Path):
    out = write(tmp_path / "out")
    assert cli.main(["data", "publish", str(out), ADDRESS]) == 0
    folder = stage(ADDRESS, tmp_path / "cache")
    assert open_dataset(folder / "cells", "train").ids == open_dataset(out / "cells", "train").ids
    assert (folder / "tokenizer" / "tokenizer.json").is_file()
    again = publish.publish(out, ADDRESS)
    assert again.sent == 0 and again.there > 6


def test_manifests_come_last_and_a_broken_upload_goes_on(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = write(tmp_path / "out")
    real, seen = publish._upload, []

    def breaks(filesystem: Any, path: Path, place: str) -> bool:
        if path.name == publish.MANIFEST:
            raise OSError("the line went dead")
        seen.append(path.name)
        return real(filesystem, path, place)

    monkeypatch.setattr(publish, "_upload", breaks)
    with pytest.raises(DataError, match=r"broke off.*goes on"):
        publish.publish(out, ADDRESS)
    assert any("array_record" in name for name in seen)
    with pytest.raises(DataError, match="no manifest"):
        stage(ADDRESS, tmp_path / "half")
    monkeypatch.setattr(publish, "_upload", real)
    done = publish.publish(out, ADDRESS)
    assert (done.sent, done.there) == (2, len(seen))


def test_a_file_that_arrives_changed_stops_it(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.copyfileobj", lambda source, copy, size: copy.write(source.read()[:-1]))
    with pytest.raises(DataError, match="reads back differently"):
        publish.publish(write(tmp_path / "out"), ADDRESS)
    assert not [name for name in bucket.find("/published") if name.endswith(publish.MANIFEST)]


def test_another_dataset_at_the_address_stays(bucket: Any, tmp_path: Path):
    publish.publish(write(tmp_path / "first"), ADDRESS)
    before = bucket.find("/published", detail=True)
    with pytest.raises(DataError, match="is another dataset"):
        publish.publish(write(tmp_path / "second", 31), ADDRESS)
    assert {n: f["size"] for n, f in bucket.find("/published", detail=True).items()} == {
        n: f["size"] for n, f in before.items()
    }


def test_a_damaged_dataset_is_not_sent(bucket: Any, tmp_path: Path):
    out = write(tmp_path / "out")
    shard = next(out.glob("cells/*/*.array_record*"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match="nothing was uploaded"):
        publish.publish(out, ADDRESS)
    assert not bucket.exists("/published")
    with pytest.raises(DataError, match="no finished dataset"):
        publish.publish(tmp_path, ADDRESS)
    with pytest.raises(DataError, match="cannot be reached"):
        publish.publish(write(tmp_path / "third"), "nothing-knows-this://a/b")
    assert json.loads((tmp_path / "third" / "cells" / "1.0.0" / "manifest.json").read_text())
