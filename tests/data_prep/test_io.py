"""The dataset container: bytes that do not depend on process or order, and damage that is named, never read past."""

import io as std_io
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from data_prep import files, io
from data_prep.records import FLOAT, INT, JPEG, TEXT, TEXTS, array, serializer, tfds_features
from data_prep.schema import DataError

ROOT = Path(__file__).parents[2]
FEATURES = {
    "id": TEXT,
    "split": TEXT,
    "tags": TEXTS,
    "image": JPEG,
    "count": INT,
    "score": FLOAT,
    "tokens": array("int32", 5),
    "vision": array("bfloat16", 3, 4),
    "coords": array("int32", -1, 2),
}


def record(k: int) -> dict:
    encoded = std_io.BytesIO()
    Image.fromarray(np.random.default_rng(k).integers(0, 255, (16, 16, 3), np.uint8)).save(encoded, "JPEG", quality=95)
    return {
        "id": f"S:é{k:03d}",
        "split": ("train", "val", "test")[k % 3],
        "tags": [f"t{j}" for j in range(k % 3)],
        "image": encoded.getvalue(),
        "count": k,
        "score": k / 7,
        "tokens": np.arange(k, k + 5, dtype=np.int32),
        "vision": (np.arange(12).reshape(3, 4) * k / 3).astype(ml_dtypes.bfloat16),
        "coords": np.full((k % 4, 2), k, np.int32),
    }


def write(out: Path, records: list[dict], **options) -> str:
    options = {"id_feature": "id", "config": {"a": 1}, "inputs": {}, "records_per_shard": 4} | options
    return io.write_dataset(out, "things", FEATURES, records, **options)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    write(tmp_path, [record(k) for k in range(30)], records_in=32, rejected={"odd": 2})
    return tmp_path / "things" / io.VERSION


def shard(dataset: Path, split: str = "train", number: int = 1) -> Path:
    return sorted(dataset.glob(f"*-{split}.array_record-*"))[number]


def test_every_field_comes_back(dataset: Path):
    source = io.open_dataset(dataset.parent, "val")
    assert source.ids == [f"S:é{k:03d}" for k in range(1, 30, 3)]
    for position, k in enumerate(range(1, 30, 3)):
        got, want = source[position], record(k)
        assert got.keys() == want.keys()
        for name, value in want.items():
            if isinstance(value, np.ndarray):
                assert got[name].dtype == value.dtype
                np.testing.assert_array_equal(got[name], value)
            elif name == "score":
                assert got[name] == np.float32(value)
            else:
                assert got[name] == value
    assert source.position("S:é004") == 1
    with pytest.raises(DataError, match='no record "S:é003"'):
        source.position("S:é003")
    with pytest.raises(IndexError):
        source[10]


def test_order_of_writing_and_unit_files_do_not_show(tmp_path: Path, dataset: Path):
    again = tmp_path / "again"
    write(again, [record(k) for k in reversed(range(30))], records_in=32, rejected={"odd": 2})
    parts = [[record(k) for k in range(30) if k % 2], [], [record(k) for k in range(30) if not k % 2]]
    units = [io.write_unit(tmp_path / f"unit{n}", FEATURES, part, "id") for n, part in enumerate(parts)]
    by_units = tmp_path / "units"
    options = {"id_feature": "id", "config": {"a": 1}, "inputs": {}, "records_per_shard": 4}
    io.finalise(by_units, "things", FEATURES, units, rejected={"odd": 2}, **options)
    for other in (again, by_units):
        other = other / "things" / io.VERSION
        names = sorted(path.name for path in dataset.iterdir())
        assert sorted(path.name for path in other.iterdir()) == names
        for name in set(names) - {"run.json"}:
            assert (other / name).read_bytes() == (dataset / name).read_bytes(), name
    # A rewrite in place leaves one directory and nothing beside it.
    write(tmp_path, [record(k) for k in range(30)], records_in=32, rejected={"odd": 2})
    assert [path.name for path in dataset.parent.iterdir()] == [io.VERSION]
    assert io.verify(dataset) == []


def test_content_id_moves_with_content_only(tmp_path: Path, dataset: Path):
    base = io.read_manifest(dataset)["content_id"]
    changed = [record(k) | ({"count": 99} if k == 7 else {}) for k in range(30)]
    assert write(tmp_path / "b", changed) != base
    assert write(tmp_path / "c", [record(k) for k in range(30)], config={"a": 2}) == base


def test_serialiser_is_stable_between_processes():
    code = (
        "import hashlib; import tests.data_prep.test_io as t;"
        "print(hashlib.sha256(t.serializer(t.FEATURES)(t.record(5))).hexdigest())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        for _ in range(2)
    ]
    assert len(runs[0].stdout) == 65
    assert runs[0].stdout == runs[1].stdout


def test_bytes_are_those_of_tfds():
    from tensorflow_datasets.core import example_serializer

    described = tfds_features(FEATURES)
    encoder = example_serializer.ExampleSerializer(described.get_serialized_info())
    for k in range(12):  # among them empty lists and empty arrays
        given = record(k)
        tfds_record = given | {
            "image": std_io.BytesIO(given["image"]),
            "vision": given["vision"].view(np.uint16),
        }
        want = encoder.get_tf_example(described.encode_example(tfds_record)).SerializeToString(deterministic=True)
        assert serializer(FEATURES)(given) == want


def test_tfds_opens_it(dataset: Path):
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(dataset)
    source = builder.as_data_source("test", decoders={"image": tfds.decode.SkipDecoding()})
    assert len(source) == 10
    got, want = source[3], record(11)
    assert got["id"].decode() == want["id"]
    assert got["image"] == want["image"]
    np.testing.assert_array_equal(got["vision"].view(ml_dtypes.bfloat16), want["vision"])
    np.testing.assert_array_equal(got["coords"], want["coords"])
    np.testing.assert_array_equal(got["tokens"], want["tokens"])


def test_grain_reads_it_in_batches(dataset: Path):
    import grain

    source = io.open_dataset(dataset, "train")
    pipeline = grain.MapDataset.source(source).shuffle(seed=1).map(lambda r: r["count"]).batch(5)
    assert sorted(int(count) for batch in pipeline for count in batch) == list(range(0, 30, 3))
    assert pickle.loads(pickle.dumps(source))[2]["count"] == 6


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:70_000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    written = np.flatnonzero(np.frombuffer(raw, np.uint8))  # the rest is padding
    raw[written[len(written) // 2]] ^= 0x40
    path.write_bytes(raw)


def swap(path: Path) -> None:
    path.write_bytes(shard(path.parent, "train", 0).read_bytes())


@pytest.mark.parametrize("damage", [cut, empty, flip, swap, Path.unlink], ids=lambda f: f.__name__)
def test_damaged_shard_is_named(dataset: Path, damage):
    path = shard(dataset)
    damage(path)
    with pytest.raises(DataError, match=path.name) as caught:
        source = io.open_dataset(dataset, "train")
        _ = [source[k] for k in range(len(source))]
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=path.name):
        io.open_dataset(dataset, "train", hashes=True)
    assert [path.name in problem for problem in io.verify(dataset)] == [True]
    assert len(io.open_dataset(dataset, "val")) == 10  # the other splits still open


def test_a_flipped_byte_never_gives_wrong_records(dataset: Path):
    path = shard(dataset)
    raw = path.read_bytes()
    want = [r["image"] for r in io.open_dataset(dataset, "train")]
    detected = 0
    for position in [*range(0, 64, 7), *np.random.default_rng(0).integers(0, len(raw), 60)]:
        damaged = bytearray(raw)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            source = io.open_dataset(dataset, "train")
            got = [source[k]["image"] for k in range(len(source))]
            assert got == want, position
        except DataError:
            detected += 1
    assert detected > 5


def test_other_damage_is_a_sentence(dataset: Path):
    with pytest.raises(DataError, match='no split "ood"; it has'):
        io.open_dataset(dataset, "ood")
    with pytest.raises(DataError, match=r"no finished dataset"):
        io.open_dataset(dataset / "absent", "train")
    (dataset / "stray").touch()
    assert [p for p in io.verify(dataset) if "stray" in p]
    ids = dataset / "ids.txt"
    ids.write_text(ids.read_text().replace("S:é003", "S:é033"))
    with pytest.raises(DataError, match=r"ids\.txt does not have"):
        io.open_dataset(dataset, "train")
    (dataset / "manifest.json").write_text("{")
    assert "not valid JSON" in io.verify(dataset)[0]


def test_bad_records_and_lost_records_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="more than once"):
        write(tmp_path, [record(1), record(1)])
    with pytest.raises(DataError, match="records are lost"):
        write(tmp_path, [record(1)], records_in=3, rejected={"odd": 1})
    with pytest.raises(DataError, match="no record was kept"):
        write(tmp_path, [], rejected={"odd": 1})
    for change, message in (
        ({"tokens": np.arange(4, dtype=np.int32)}, r'record S:é001: feature "tokens" wants int32\[5\]'),
        ({"vision": np.zeros((3, 4), np.uint16)}, "wants bfloat16"),
        ({"image": b""}, "cannot hold"),
        ({"extra": 1}, "extra"),
        ({"id": "a\tb"}, "tab or line break"),
    ):
        with pytest.raises(DataError, match=message):
            write(tmp_path, [record(1) | change])
    assert not list(tmp_path.rglob("*.array_record*"))
    with pytest.raises(DataError, match="differ: score"):
        serializer(FEATURES)({name: value for name, value in record(1).items() if name != "score"})


def test_a_crashed_writer_leaves_no_dataset(tmp_path: Path):
    code = (
        "import os, sys; import tests.data_prep.test_io as t; t.files.publish_directory = lambda *a: os._exit(9);"
        "t.write(t.Path(sys.argv[1]), [t.record(k) for k in range(9)])"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=ROOT).returncode == 9
    with pytest.raises(DataError, match="no finished dataset"):
        io.open_dataset(tmp_path / "things", "train")


def test_atomic_write_is_all_or_nothing(tmp_path: Path):
    path = tmp_path / "deep" / "file.txt"
    files.atomic_write(path, "one")
    with pytest.raises(TypeError):
        files.atomic_write(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "one"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


@pytest.mark.parametrize(
    ("spec", "value", "compressed"),
    [
        (array("bfloat16", 64, 64), np.zeros((64, 64), ml_dtypes.bfloat16), False),
        (array("int32", 64, 32), np.zeros((64, 32), np.int32), True),
    ],
)
def test_tokens_are_stored_as_they_are_read(tmp_path: Path, spec, value: np.ndarray, compressed: bool):
    rows = [{"id": f"{k:02d}", "split": "train", "x": value} for k in range(32)]
    io.write_dataset(tmp_path, "d", {"id": TEXT, "split": TEXT, "x": spec}, rows, id_feature="id", config={}, inputs={})
    stored = sum(shard["bytes"] for shard in io.read_manifest(tmp_path / "d")["shards"])
    assert (stored < 32 * value.nbytes) == compressed


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full:
        def __init__(self, *options: str) -> None:
            pass

        def write(self, raw: bytes) -> None:
            raise RuntimeError("write() failed: No space left on device")

        def close(self) -> None:
            raise RuntimeError("close() failed: No space left on device")

    monkeypatch.setattr(io.array_record_module, "ArrayRecordWriter", Full)
    with pytest.raises(DataError, match=r"cannot be written .*No space left.*check the free space"):
        write(tmp_path, [record(1)])
    assert not list(tmp_path.rglob("manifest.json"))
