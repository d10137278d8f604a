"""Datasets on gs:// (or any fsspec address) brought to this host and checked before step 0."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data_prep.files import atomic_write, open_remote, sha256_file
from data_prep.io import verify
from data_prep.progress import progress
from data_prep.schema import DataError

MANIFEST = "manifest.json"


def is_remote(address: str) -> bool:
    return "://" in address


def stage(address: str, cache: Path) -> Path:
    """Makes a folder of `cache` what `address` holds and returns that folder.

    Files already there as the bucket's manifests name them are kept: a broken-off staging goes on, and a dataset that was
    replaced in the bucket is replaced here. Every dataset's counts and hashes are checked against its manifest; raises
    DataError when one does not hold, or when nothing is there.
    """
    filesystem, root = open_remote(address)
    try:
        found: dict[str, Any] = filesystem.find(root, detail=True)
        read = {name: filesystem.cat_file(name) for name in found if name.endswith(f"/{MANIFEST}")}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{address} cannot be read ({error}): check the address and the access of this machine"
        ) from error
    if not found:
        raise DataError(f"{address} holds no files: name the folder that `pbs data run --out` wrote")
    target = cache / hashlib.sha256(address.encode()).hexdigest()[:16]
    places = {target / name[len(root) :].lstrip("/"): name for name in sorted(found)}
    for path in list(target.rglob("*")):
        if path.is_file() and path not in places:
            path.unlink()  # no longer in the bucket
    manifests = {path: read[name] for path, name in places.items() if name in read}
    for path, name in progress(places.items(), len(places), f"staging {address}"):
        manifest = manifests.get(path.with_name(MANIFEST))
        if path in manifests or _kept(path, found[name]["size"], manifest):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        with filesystem.open(name, "rb") as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy, 2**22)
        part.replace(path)
    for path, manifest in manifests.items():
        atomic_write(path, manifest)  # last: one that is here says that its dataset is
    half = sorted({path.parent for path in target.rglob("*.array_record*")} - {path.parent for path in manifests})
    problems = [f"{folder} has shards and no manifest.json" for folder in half]
    for path in sorted(manifests):
        if wrong := verify(path.parent):
            problems += wrong
            path.unlink()  # the next staging looks at each file's hash
    if problems:
        raise DataError(
            f"{address} is not whole: {problems[0]} ({len(problems)} such; the upload may not have finished)"
        )
    return target


def _kept(path: Path, size: int, manifest: bytes | None) -> bool:
    """Whether the file here is the bucket's; `manifest`: its dataset's, as it is in the bucket."""
    if manifest is None or not path.is_file() or path.stat().st_size != size:
        return False  # what lies outside datasets (a tokenizer) has no hash to be known by, and is small
    here = path.with_name(MANIFEST)
    if here.is_file() and here.read_bytes() == manifest:
        return True  # `verify` hashes it: once is enough
    try:
        content = json.loads(manifest)
        hashes = content["files"] | {shard["name"]: shard["sha256"] for shard in content["shards"]}
    except (ValueError, KeyError, TypeError):
        return False  # `verify` says what is wrong with it
    return path.name in hashes and sha256_file(path) == str(hashes[path.name])
