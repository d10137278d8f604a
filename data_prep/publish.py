"""`pbs data publish OUT gs://…`: finished datasets to a bucket, so that a reader sees them whole or not at all.

Verified here, uploaded, every byte read back and compared, the manifests last: what stages the address (training does)
refuses shards without a manifest. A broken-off upload goes on with the same command. A bucket's dataset is never
replaced by another one: a new version gets a new address.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data_prep import io
from data_prep.files import open_remote, sha256_file
from data_prep.progress import progress
from data_prep.schema import DataError

MANIFEST = "manifest.json"
BESIDE = ("tokenizer/tokenizer.json", "slides.csv", "rejects.jsonl")  # what training or a reader wants besides datasets
CHUNK = 2**22


@dataclasses.dataclass(frozen=True, slots=True)
class Published:
    """`datasets`: name -> content id. `sent`, `there`: files uploaded, and found uploaded before."""

    datasets: dict[str, str]
    sent: int
    there: int
    size: int


def publish(out: Path, address: str) -> Published:
    """Uploads every dataset under OUT and the files in `BESIDE`.

    Raises:
        DataError: nothing finished under OUT, a dataset that is not whole, another one at the address, an address that
            can't be reached, or bytes that read back differently.
    """
    folders = sorted(path.parent for path in out.glob(f"*/{io.VERSION}/{MANIFEST}"))
    if not folders:
        raise DataError(f"{out} holds no finished dataset: give the --out of a run")
    if problems := [problem for folder in folders for problem in io.verify(folder)]:
        raise DataError(f"nothing was uploaded: {problems[0]} ({len(problems)} such)")
    filesystem, root = open_remote(address)
    try:
        _refuse_others(filesystem, root, out, folders)
        plain = [path for folder in folders for path in sorted(folder.iterdir()) if path.name != MANIFEST]
        plain += [out / name for name in BESIDE if (out / name).is_file()]
        last = [folder / MANIFEST for folder in folders]
        sent = sum(
            _upload(filesystem, path, f"{root}/{path.relative_to(out).as_posix()}")
            for path in progress(plain + last, desc=f"publishing to {address}")
        )
    except OSError as error:
        raise DataError(f"{address}: the upload broke off ({error}): the same command goes on") from error
    ids = {folder.parent.name: io.read_manifest(folder)["content_id"] for folder in folders}
    return Published(ids, sent, len(plain + last) - sent, sum(path.stat().st_size for path in plain + last))


def _refuse_others(filesystem: Any, root: str, out: Path, folders: list[Path]) -> None:
    for folder in folders:
        place = f"{root}/{folder.relative_to(out).as_posix()}/{MANIFEST}"
        if not filesystem.exists(place):
            continue
        with filesystem.open(place, "rb") as file:
            there = json.loads(file.read()).get("content_id")
        if there != (mine := io.read_manifest(folder)["content_id"]):
            raise DataError(
                f"{place} is another dataset ({there[:12]}, here {mine[:12]}): publish to a new address, readers may "
                "be using that one"
            )


def _upload(filesystem: Any, path: Path, place: str) -> bool:
    """False when the file was there already. Raises DataError when it reads back differently."""
    digest = sha256_file(path)
    if filesystem.exists(place) and _remote_sha256(filesystem, place) == digest:
        return False
    filesystem.makedirs(place.rpartition("/")[0], exist_ok=True)
    with path.open("rb") as source, filesystem.open(place, "wb") as copy:
        shutil.copyfileobj(source, copy, CHUNK)
    if _remote_sha256(filesystem, place) != digest:
        raise DataError(f"{place} reads back differently from {path}: publish again")
    return True


def _remote_sha256(filesystem: Any, place: str) -> str:
    digest = hashlib.sha256()
    with filesystem.open(place, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
