"""Answers kept by what was asked, not by its id: model, settings, mode, prompt and the pictures' own bytes.

Another picture under the same id, another revision or another prompt is another key. Only answers are kept, never
errors. One JSON line per answer, on disk before the next question; several runs may share a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.schema import DataError
from pbs_jax.bench.adapters import Adapter, Request, Response

KEPT = ("ok", "refusal", "truncated")


class Cached:
    """An adapter that asks another one only what the folder's answers.jsonl does not hold."""

    def __init__(self, adapter: Adapter, folder: Path):
        self._adapter, self._path = adapter, folder / "answers.jsonl"
        self.name, self.seed, self.card, self.at_once = adapter.name, adapter.seed, adapter.card, adapter.at_once
        self._model = json.dumps({k: v for k, v in adapter.card.items() if k != "remarks"}, sort_keys=True, default=str)
        folder.mkdir(parents=True, exist_ok=True)
        self._known = _load(self._path)

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        keys = [self._key(request, mode) for request in requests]
        missing = {key: k for k, key in enumerate(keys) if key not in self._known}
        if missing:
            asked = [requests[k] for k in missing.values()]
            answers = dict(zip(missing, self._adapter.generate(asked, mode), strict=True))
            self._keep({key: answer for key, answer in answers.items() if answer.status in KEPT})
            return [answers.get(key) or self._again(key) for key in keys]
        return [self._again(key) for key in keys]

    def close(self) -> None:
        if hasattr(self._adapter, "close"):
            self._adapter.close()

    def _again(self, key: str) -> Response:
        record = self._known[key]
        return Response(record["text"], record["status"], {"cached": key[:16]})

    def _key(self, request: Request, mode: str) -> str:
        images = [hashlib.sha256(image).hexdigest() for image in request.images]
        parts = [self._adapter.name, self._model, mode, request.question_type, request.text, *images]
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()

    def _keep(self, answers: dict[str, Response]) -> None:
        records = {key: {"key": key, "text": a.text, "status": a.status} for key, a in answers.items()}
        with self._path.open("ab") as file:
            file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records.values()).encode())
            file.flush()
            os.fsync(file.fileno())
        self._known |= records


def _load(path: Path) -> dict[str, dict[str, Any]]:
    """Records by key; a last line that a crash cut short is taken off the file. Raises DataError for another bad line."""
    content = path.read_bytes() if path.is_file() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    known = {}
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            record = json.loads(line)
            known[record["key"]] = {"text": str(record["text"]), "status": str(record["status"])}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number} is no cached answer ({error}): delete that line") from error
    return known
