"""Datasets on disk: a deterministic TFDS/ArrayRecord writer, its manifest, `verify`, and the random-access reader.

DESIGN section 4. A dataset lies in OUT/<name>/<version>: shards of a fixed record count, TFDS metadata, `ids.txt` (one
"split<TAB>id" line per record, in record order), `manifest.json` written last, and `run.json` with what may differ
between runs (times, host). Workers write unit files; `finalise` merges them in (split, id) order, so neither the number
of workers nor their speed shows in the bytes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import datetime
import hashlib
import json
import operator
import platform
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from array_record.python import array_record_data_source, array_record_module

from data_prep import files
from data_prep.files import atomic_write, sha256_file
from data_prep.records import (
    FLOAT,
    INT,
    JPEG,
    TEXT,
    TEXTS,
    Features,
    FeatureSpec,
    array,
    parser,
    serializer,
    tfds_features,
)
from data_prep.schema import SCHEMA_VERSION, SPLITS, DataError

__all__ = [
    "FLOAT",
    "INT",
    "JPEG",
    "TEXT",
    "TEXTS",
    "FeatureSpec",
    "Features",
    "RecordSource",
    "array",
    "atomic_write",
    "finalise",
    "open_dataset",
    "read_manifest",
    "verify",
    "write_dataset",
    "write_unit",
]

VERSION = "1.0.0"
WRITER_OPTIONS = "group_size:1"  # any other group size makes random access hundreds of times slower
RECORDS_PER_SHARD = 1000
OPEN_UNITS = 128
METADATA = ("dataset_info.json", "features.json", "ids.txt", "manifest.json", "run.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A worker's output file and the (split, id) of each of its records."""

    path: Path
    keys: tuple[tuple[str, str], ...]


def write_unit(path: Path, features: Features, records: Iterable[Mapping[str, Any]], id_feature: str) -> Unit:
    """Serialises records into one ArrayRecord file that appears by rename after a recount.

    Every record names its split under "split"; that key is stored only if it is among the features.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    serialize = serializer(features)
    keys = []
    with _writer(temporary, features) as write:
        for record in records:
            fields = {key: value for key, value in record.items() if key in features or key != "split"}
            try:
                write(serialize(fields))
                keys.append((record["split"], record[id_feature]))
            except (DataError, KeyError) as error:
                raise DataError(f"record {record.get(id_feature)}: {error}") from error
    if keys and _count(temporary) != len(keys):
        raise DataError(f"{path} holds {_count(temporary)} of the {len(keys)} records written; check the free space")
    temporary.replace(path)
    return Unit(path, tuple(keys))


@contextlib.contextmanager
def _writer(path: Path, features: Features) -> Iterator[Callable[[bytes], None]]:
    """Adds serialised records to a new file. Compressed, except tokens: Zstandard takes a fifth off their bytes and four times
    as long to read them. Raises DataError when the disk does not take them."""
    tokens = any(spec.dtype == "bfloat16" for spec in features.values())
    try:
        writer = array_record_module.ArrayRecordWriter(str(path), WRITER_OPTIONS + (",uncompressed" if tokens else ""))
        try:
            yield writer.write
        finally:
            writer.close()
    except RuntimeError as error:
        raise DataError(f"{path} cannot be written ({error}): check the free space, then run this again") from error


def _split_rank(split: str) -> tuple[int, str]:
    return (SPLITS.index(split) if split in SPLITS else len(SPLITS), split)


def _order(units: Sequence[Unit]) -> list[tuple[str, str, int, int]]:
    """(split, id, unit, position) of every record in (split, id) order. Raises DataError on a repeated id."""
    rows = [(split, id, u, k) for u, unit in enumerate(units) for k, (split, id) in enumerate(unit.keys)]
    repeated = [id for id, count in Counter(id for _, id, _, _ in rows).items() if count > 1]
    if repeated:
        raise DataError(f'id "{min(repeated)}" occurs more than once ({len(repeated)} such ids): ids must be unique')
    bad = [id for _, id, _, _ in rows if not id or any(c in id for c in "\t\r\n")]
    if bad:
        raise DataError(f"id {bad[0]!r} is empty or holds a tab or line break")
    return sorted(rows, key=lambda row: (_split_rank(row[0]), row[1]))


def finalise(
    directory: Path,
    name: str,
    features: Features,
    units: Sequence[Unit],
    *,
    id_feature: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    rejected: Mapping[str, int] | None = None,
    records_in: int | None = None,
    licences: Sequence[str] = (),
    split_level: str = "",
    details: Mapping[str, Any] | None = None,
    records_per_shard: int = RECORDS_PER_SHARD,
) -> str:
    """Merges unit files into the dataset DIRECTORY/name/VERSION and returns its content id.

    Args:
        config: everything that decided the content; no paths of this machine, no times.
        inputs: name -> sha256 (or content id) of what was read.
        rejected: reason -> count. With `records_in`, the identity in = kept + sum(rejected) is checked.
        split_level: what the split keeps apart: patient, slide or image.
        details: further facts for the manifest (deterministic ones only).

    Raises:
        DataError: no record at all, a repeated id, or an identity that does not hold.
    """
    started = datetime.datetime.now(datetime.UTC)
    rejected = dict(rejected or {})
    rows = _order(units)
    counted = len(rows) + sum(rejected.values())
    if records_in is not None and records_in != counted:
        raise DataError(
            f"{name}: {records_in} in, {len(rows)} kept + {sum(rejected.values())} rejected: records are lost"
        )
    if not rows:
        raise DataError(f"{name}: no record was kept ({counted} in, rejected: {rejected}), so no dataset was written")
    target = Path(directory) / name / VERSION
    work = target.with_name(f".{VERSION}.{uuid.uuid4().hex}.tmp")
    work.mkdir(parents=True)
    try:
        shards = _write_shards(work, name, features, units, rows, records_per_shard)
        _write_tfds_metadata(work, name, features, shards)
        (work / "ids.txt").write_text("".join(f"{split}\t{id}\n" for split, id, _, _ in rows))
        content_id = _content_id(work, shards)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "dataset": name,
            "version": VERSION,
            "content_id": content_id,
            "id_feature": id_feature,
            "features": {key: spec.to_json() for key, spec in features.items()},
            "splits": {split: sum(s["records"] for s in shards if s["split"] == split) for split in _splits(shards)},
            "shards": [{key: value for key, value in s.items() if key != "stored_bytes"} for s in shards],
            "files": {file: sha256_file(work / file) for file in ("features.json", "dataset_info.json", "ids.txt")},
            "identity": {"in": counted, "kept": len(rows), "rejected": rejected},
            "config": dict(config),
            "inputs": dict(inputs),
            "licences": list(licences),
            "split": {"level": split_level, "sha256": sha256_file(work / "ids.txt")},
            "details": dict(details or {}),
        }
        run = {
            "started": started.isoformat(),
            "seconds": (datetime.datetime.now(datetime.UTC) - started).total_seconds(),
            "host": platform.node(),
            "python": platform.python_version(),
        }
        (work / "run.json").write_text(files.canonical_json(run))
        (work / "manifest.json").write_text(files.canonical_json(manifest))
        files.publish_directory(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return content_id


def write_dataset(
    directory: Path,
    name: str,
    features: Features,
    records: Iterable[Mapping[str, Any]],
    *,
    id_feature: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    **options: Any,
) -> str:
    """`write_unit` and `finalise` in one, for what one process makes; options as there. Returns the content id."""
    unit = Path(directory) / name / f".unit.{uuid.uuid4().hex}"
    try:
        units = [write_unit(unit, features, records, id_feature)]
        return finalise(
            directory, name, features, units, id_feature=id_feature, config=config, inputs=inputs, **options
        )
    finally:
        unit.unlink(missing_ok=True)


def _splits(shards: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(shard["split"] for shard in shards))


def _content_id(directory: Path, shards: Sequence[Mapping[str, Any]]) -> str:
    parts = [SCHEMA_VERSION, sha256_file(directory / "features.json"), *(shard["sha256"] for shard in shards)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _write_shards(
    work: Path,
    name: str,
    features: Features,
    units: Sequence[Unit],
    rows: Sequence[tuple[str, str, int, int]],
    per_shard: int,
) -> list[dict[str, Any]]:
    """Shards of `per_shard` records per split, each reopened and counted."""
    readers: dict[int, Any] = {}  # by unit, the least recently used first
    shards = []
    for split in dict.fromkeys(row[0] for row in rows):
        of_split = [row for row in rows if row[0] == split]
        total = -(-len(of_split) // per_shard)
        for number in range(total):
            path = work / f"{name}-{split}.array_record-{number:05d}-of-{total:05d}"
            chunk = of_split[number * per_shard : (number + 1) * per_shard]
            stored = 0
            with _writer(path, features) as write:
                for _, _, unit, position in chunk:
                    raw = _reader(readers, unit, units[unit].path).read([position])[0]
                    stored += len(raw)
                    write(raw)
            if _count(path) != len(chunk):
                raise DataError(f"{path.name} holds {_count(path)} of {len(chunk)} records; check the free space")
            facts = {"records": len(chunk), "bytes": path.stat().st_size, "sha256": sha256_file(path)}
            shards.append({"name": path.name, "split": split, "stored_bytes": stored, **facts})
    for reader in readers.values():
        reader.close()
    return shards


def _reader(readers: dict[int, Any], unit: int, path: Path) -> Any:
    """The open reader of a unit; at most OPEN_UNITS are, since a job may have more than a process may open files."""
    reader = readers.pop(unit, None) or array_record_module.ArrayRecordReader(str(path))
    while len(readers) >= OPEN_UNITS:
        readers.pop(next(iter(readers))).close()
    readers[unit] = reader
    return reader


def _write_tfds_metadata(work: Path, name: str, features: Features, shards: Sequence[Mapping[str, Any]]) -> None:
    """dataset_info.json and features.json by TFDS's own code (its `folder_dataset` helper would need TensorFlow)."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import dataset_info

    template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
    infos = []
    for split in _splits(shards):
        of_split = [shard for shard in shards if shard["split"] == split]
        file_names = tfds.core.ShardedFileTemplate(
            data_dir=work, dataset_name=name, split=split, filetype_suffix="array_record", template=template
        )
        lengths = [shard["records"] for shard in of_split]
        size = sum(shard["stored_bytes"] for shard in of_split)
        infos.append(
            tfds.core.SplitInfo(name=split, shard_lengths=lengths, num_bytes=size, filename_template=file_names)
        )
    identity = dataset_info.DatasetIdentity(name=name, version=VERSION, data_dir=str(work), module_name="data_prep.io")
    info = tfds.core.DatasetInfo(builder=identity, features=tfds_features(features))
    info.set_file_format("array_record")
    info.set_splits(tfds.core.SplitDict(infos))
    info.write_to_directory(work)


def dataset_directory(directory: Path) -> Path:
    """`directory` itself if it holds a manifest, else its VERSION folder (so OUT/cells works). Raises DataError."""
    directory = Path(directory)
    for candidate in (directory, directory / VERSION):
        if (candidate / "manifest.json").is_file():
            return candidate
    raise DataError(
        f"{directory} holds no finished dataset (no manifest.json): run `pbs data run` with this --out first"
    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a dataset (OUT/<name> or OUT/<name>/<version>). Raises DataError if absent, damaged or newer."""
    path = dataset_directory(directory) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON ({error}): write the dataset again") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema version {manifest.get('schema_version')}, this program reads {SCHEMA_VERSION}: "
            "write the dataset again"
        )
    return manifest


def _count(path: Path) -> int:
    """Records in a shard; -1 if it does not open. A file cut short may also open with 0 records and no error."""
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
        reader.close()
    except (RuntimeError, ValueError, IndexError, OSError):
        return -1
    return count


def _shard_problem(directory: Path, shard: Mapping[str, Any], hashes: bool) -> str | None:
    path = directory / shard["name"]
    if not path.is_file():
        return f"shard {path} is missing: copy it again or write the dataset again"
    size = path.stat().st_size
    if size != shard["bytes"]:
        return f"shard {path} has {size} bytes, the manifest says {shard['bytes']}: it was cut short or changed"
    count = _count(path)
    if count != shard["records"]:
        return f"shard {path} opens with {max(count, 0)} records, the manifest says {shard['records']}: it is damaged"
    if hashes and sha256_file(path) != shard["sha256"]:
        return f"shard {path} does not have the manifest's sha256: its content was changed or damaged"
    return None


def _file_problem(directory: Path, name: str, manifest: Mapping[str, Any]) -> str | None:
    path = directory / name
    if not path.is_file():
        return f"{path} is missing: copy it again or write the dataset again"
    if sha256_file(path) != manifest["files"][name]:
        return f"{path} does not have the manifest's sha256: it was changed or damaged"
    return None


def verify(directory: Path) -> list[str]:
    """Recounts and rehashes a dataset; returns one sentence per problem (empty: all is well)."""
    try:
        directory = dataset_directory(directory)
        manifest = read_manifest(directory)
    except DataError as error:
        return [str(error)]
    problems = [p for shard in manifest["shards"] if (p := _shard_problem(directory, shard, hashes=True))]
    for name, digest in manifest["files"].items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{path} is missing: write the dataset again")
        elif sha256_file(path) != digest:
            problems.append(f"{path} does not have the manifest's sha256: it was changed")
    known = {*METADATA, *(shard["name"] for shard in manifest["shards"])}
    problems += [
        f"{path} is not named in the manifest: delete it" for path in directory.iterdir() if path.name not in known
    ]
    identity = manifest["identity"]
    if identity["in"] != identity["kept"] + sum(identity["rejected"].values()):
        problems.append(f"{directory}: the identity in = kept + rejected does not hold: {identity}")
    if identity["kept"] != sum(shard["records"] for shard in manifest["shards"]):
        problems.append(f"{directory}: the manifest keeps {identity['kept']} records, its shards hold another number")
    if not problems and _content_id(directory, manifest["shards"]) != manifest["content_id"]:
        problems.append(f"{directory}: the content id does not follow from features.json and the shards")
    return problems


class RecordSource:
    """Random access to one split, for Grain or a plain loop: `len(s)`, `s[i] -> dict`, `s.ids`, `s.position(id)`.

    Picklable (Grain workers). Reading damaged bytes, or a record whose id is not the one `ids.txt` gives, raises
    DataError naming the shard.
    """

    def __init__(self, directory: Path, split: str, manifest: Mapping[str, Any]):
        self.directory, self.split, self.content_id = directory, split, manifest["content_id"]
        self.manifest = manifest
        self.features = {name: FeatureSpec.from_json(spec) for name, spec in manifest["features"].items()}
        shards = [shard for shard in manifest["shards"] if shard["split"] == split]
        self._paths = [directory / shard["name"] for shard in shards]
        self._ends = [sum(shard["records"] for shard in shards[: k + 1]) for k in range(len(shards))]
        self._raw = array_record_data_source.ArrayRecordDataSource([str(path) for path in self._paths])
        lines = (line.split("\t", 1) for line in (directory / "ids.txt").read_text().splitlines())
        self.ids = [id for of_split, id in lines if of_split == split]
        if len(self.ids) != len(self._raw):
            raise DataError(
                f"{directory}/ids.txt names {len(self.ids)} {split} records, its shards hold {len(self._raw)}"
            )
        self._positions = {id: position for position, id in enumerate(self.ids)}
        self._id_feature = manifest["id_feature"]
        self._parse: Callable[[bytes], dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[dict[str, Any]]:
        positions = [operator.index(index) for index in indices]
        if not all(0 <= position < len(self) for position in positions):
            raise IndexError(f"{self.directory} {self.split} has {len(self)} records, asked for {positions}")
        return [self._read(position) for position in positions]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._read, range(len(self)))

    def _read(self, position: int) -> dict[str, Any]:
        if self._parse is None:
            self._parse = parser(self.features)
        path = self._paths[bisect.bisect_right(self._ends, position)]
        try:
            record = self._parse(self._raw[position])
        except Exception as error:  # riegeli and protobuf raise their own types for damaged bytes
            raise DataError(
                f"shard {path} is damaged at record {self.ids[position]}: copy it again ({error})"
            ) from error
        if record[self._id_feature] != self.ids[position]:
            raise DataError(
                f"shard {path} holds record {record[self._id_feature]} where ids.txt says {self.ids[position]}"
            )
        return record

    def position(self, id: str) -> int:
        """The index of an id. Raises DataError for an id that the split does not hold (a join never skips)."""
        if id not in self._positions:
            raise DataError(
                f'{self.directory} {self.split} has no record "{id}": the two datasets do not belong together'
            )
        return self._positions[id]

    def __repr__(self) -> str:
        return f"RecordSource({self.manifest['dataset']} {self.split}, {len(self)} records, {self.content_id[:12]})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parse": None}


def job_problems(directory: Path, manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong between whole datasets of a job's folder, `manifests` by name.

    A dataset that state.json names is gone or another, or the tokenizer is not the one that wrote the tokens.
    """
    state = directory / "state.json"
    named = json.loads(state.read_bytes())["content_ids"] if state.is_file() else {}
    problems = [
        f"{directory / name} is not the dataset {id[:16]} that state.json names: copy it again or run the job again"
        for name, id in named.items()
        if manifests.get(name, {}).get("content_id") != id
    ]
    tokenizer = directory / "tokenizer" / "tokenizer.json"
    sha256 = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else "missing"
    for name, manifest in manifests.items():
        if manifest["inputs"].get("tokenizer", sha256) != sha256:
            problems.append(f"{tokenizer} is not the tokenizer that wrote {name}: copy it again or run the job again")
    return problems


def open_dataset(directory: Path, split: str, *, hashes: bool = False) -> RecordSource:
    """Opens one split of OUT/<name> after checking its shards against the manifest.

    Args:
        hashes: also compare each shard's sha256 (reads every byte once), not only sizes and record counts.

    Raises:
        DataError: no such dataset or split, or a shard that is missing, cut short, damaged or miscounted.
    """
    directory = dataset_directory(directory)
    manifest = read_manifest(directory)
    if split not in manifest["splits"]:
        raise DataError(f'{directory} has no split "{split}"; it has {", ".join(manifest["splits"])}')
    for shard in manifest["shards"]:
        if shard["split"] == split and (problem := _shard_problem(directory, shard, hashes)):
            raise DataError(problem)
    if problem := _file_problem(directory, "ids.txt", manifest):
        raise DataError(problem)
    return RecordSource(directory, split, manifest)
