"""Files that are either whole or absent: atomic writes, directories published by rename, hashes, canonical JSON, JSON lines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.schema import QA, DataError, check_qa, qa_from_record, released_record


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and a final newline: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable (fsync of the directory itself)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def atomic_write(path: Path, content: bytes | str) -> None:
    """Writes the whole file or nothing: a temporary file beside it, fsync, rename. Parents are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextlib.contextmanager
def alone(out: Path, *, shared: bool = False) -> Iterator[None]:
    """Keeps other processes that call this from writing the datasets in OUT, and clears what killed ones left half-written.

    shared: several may hold it so at a time (`--shard`), and nothing is cleared. Raises DataError when another holds it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another run is writing {out}: wait for it, or give another --out") from error
        except OSError as error:  # network file systems may know no locks
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        if not shared:
            for left in (*out.glob("*/.*.tmp"), *out.glob("*/.unit.*")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield


def json_lines(path: Path, *, torn_tail: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object with an "id") of each line. With `torn_tail` an unreadable last line without newline, which
    a crash leaves, is passed over. Raises DataError that names file and line.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    lines = path.read_bytes().split(b"\n")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if torn_tail and number == len(lines):
                break
            raise DataError(f"{path}:{number} is not valid JSON ({error})") from error
        if not isinstance(record, dict) or "id" not in record:
            raise DataError(f'{path}:{number} is not an object with an "id"')
        out.append((number, record))
    return out


def read_jsonl(path: Path) -> list[QA]:
    """The questions of a released file (or of our own JSONL). Raises DataError that names file and line."""
    questions = []
    for number, record in json_lines(path):
        questions.append(qa := qa_from_record(record, f"{path}:{number}"))
        check_qa(qa, f"{path}:{number}")
    return questions


def write_jsonl(path: Path, questions: Iterable[QA]) -> None:
    """Writes questions in the released form, one a line."""
    lines = (json.dumps(released_record(qa), ensure_ascii=False) + "\n" for qa in questions)
    atomic_write(path, "".join(lines))


def publish_directory(finished: Path, target: Path) -> None:
    """Renames a finished directory to its place. One already there is moved aside first and deleted last."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in finished.rglob("*"):
        if path.is_file():
            sync_file(path)
    sync_directory(finished)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old")
    if target.exists():
        os.rename(target, aside)
    os.rename(finished, target)
    sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def open_remote(address: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of gs://, s3://, memory:// ... Raises DataError for one that can't be reached."""
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(address)
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f"{address} cannot be reached ({error}): check the address and what is installed") from error
    return filesystem, root
