"""Datasets on gs:// (or any fsspec address) brought to this host and checked before step 0."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from data_prep.files import open_remote
from data_prep.io import verify
from data_prep.progress import progress
from data_prep.schema import DataError


def is_remote(address: str) -> bool:
    return "://" in address


def stage(address: str, cache: Path) -> Path:
    """Copies everything under `address` into a folder of `cache` and returns that folder.

    Files already there with the right size are kept, so a broken-off staging goes on. Every dataset's counts and hashes are
    checked against its manifest; raises DataError when one does not hold, or when nothing is there.
    """
    filesystem, root = open_remote(address)
    try:
        found: dict[str, Any] = filesystem.find(root, detail=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{address} cannot be read ({error}): check the address and the access of this machine"
        ) from error
    if not found:
        raise DataError(f"{address} holds no files: name the folder that `pbs data run --out` wrote")
    target = cache / hashlib.sha256(address.encode()).hexdigest()[:16]
    for name, facts in progress(sorted(found.items()), desc=f"staging {address}"):
        path = target / name[len(root) :].lstrip("/")
        if path.is_file() and path.stat().st_size == facts["size"]:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        with filesystem.open(name, "rb") as source, part.open("wb") as copy:
            shutil.copyfileobj(source, copy, 2**22)
        part.replace(path)
    folders = sorted({path.parent for path in target.rglob("manifest.json")})
    half = sorted({path.parent for path in target.rglob("*.array_record*")} - set(folders))
    problems = [f"{folder} has shards and no manifest.json" for folder in half]
    problems += [problem for folder in folders for problem in verify(folder)]
    if problems:
        raise DataError(
            f"{address} is not whole: {problems[0]} ({len(problems)} such; the upload may not have finished)"
        )
    return target
