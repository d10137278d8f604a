"""Questions in, predictions out: the two files of the benchmark (DESIGN section 4).

Questions come from the released JSONL or from our `cell_qa`/`slide_qa` datasets. Predictions are JSON lines, one per
(id, perm), each flushed to disk before the next question is asked; a run that died is continued by key, a line cut
short by the crash is dropped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.files import json_lines, read_jsonl
from data_prep.schema import QA, SPLITS, DataError, check_qa, qa_from_record, released_record

STATUSES = ("ok", "refusal", "truncated", "error")  # error: no answer was had; missing data, asked again on resume
ANSWER_MODES = ("generate", "letter_likelihood")
CLUSTERS = ("auto", "image", "slide", "patient", "question")  # units of resampling
PROTOCOLS = ("as_released", "shuffle", "circular")

Key = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Questions:
    """A question set and the id that its scores carry."""

    items: tuple[QA, ...]
    dataset_id: str
    split_level: str = ""  # what the split keeps apart: patient, slide, image; "" where the data don't say


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """One asked question. `qa.options` are as shown: option k shown is stored option perm[k]."""

    qa: QA
    perm: tuple[int, ...]
    prediction: str
    status: str = "ok"
    answer_mode: str = "generate"
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what it cost, why it failed; never scored

    @property
    def key(self) -> Key:
        return self.qa.id, self.perm


def load_questions(path: Path, split: str | None = None) -> Questions:
    """Questions of a JSONL file, a folder of them, or a dataset (OUT/cell_qa, or OUT with cell_qa in it).

    Args:
      split: only this split; None takes all.
    Raises DataError for a missing path, a broken line, a repeated id or an invalid question.
    """
    path = Path(path)
    split_level = ""
    if path.is_file():
        items = read_jsonl(path)
        source = hashlib.sha256(path.read_bytes()).hexdigest()
    elif path.is_dir() and (found := dataset_of(path)):
        from data_prep.io import open_dataset, read_manifest  # slow to import, and not needed for JSONL

        manifest = read_manifest(found)
        splits = [name for name in SPLITS if name in manifest["splits"] and split in (None, name)]
        if not splits:
            raise DataError(f'{found} has no split "{split}": it has {", ".join(manifest["splits"])}')
        sources = [open_dataset(found, name) for name in splits]
        items = [qa_from_record(source[k], str(found)) for source in sources for k in range(len(source))]
        source, split_level = str(manifest["content_id"]), manifest["split"]["level"]
    elif path.is_dir() and (files := sorted(path.glob("*.jsonl"))):
        items = [qa for file in files for qa in read_jsonl(file)]
        source = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    else:
        raise DataError(f"{path} is neither a JSONL file, a folder of them nor a dataset with manifest.json")
    chosen = tuple(qa for qa in items if split in (None, qa.split))
    if not chosen:
        raise DataError(f'{path} has no question of split "{split}"')
    _refuse_repeats((qa.id for qa in chosen), path)
    for qa in chosen:
        check_qa(qa, str(path))
    return Questions(chosen, source, split_level)


def dataset_of(path: Path) -> Path | None:
    """The question dataset at `path` or inside it; None where there is none."""
    for candidate in (path / "cell_qa", path / "slide_qa", path):
        if (candidate / "manifest.json").is_file() or (candidate != path and any(candidate.glob("*/manifest.json"))):
            return candidate
    return path if any(path.glob("[0-9]*/manifest.json")) else None


def _refuse_repeats(keys: Iterable[Any], path: Path) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise DataError(f"{path} holds {key} twice: each may stand once")
        seen.add(key)


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """The JSON object of one predictions line: the question's fields, options as shown, and the answer."""
    record = released_record(prediction.qa)
    own = {name: getattr(prediction, name) for name in ("perm", "prediction", "status", "answer_mode")}
    detail = {"detail": dict(prediction.detail)} if prediction.detail else {}
    return record | own | {"perm": list(prediction.perm)} | detail


def load_predictions(path: Path, questions: Questions | None = None) -> list[Prediction]:
    """Reads predictions.jsonl; bare {id, prediction} lines take the rest from `questions` (options in stored order).

    With `questions`, options and gold always come from there, so a submission can't bring its own. An error line
    followed by an answer to the same key is superseded. Raises DataError for repeated keys, unknown ids or impossible
    perms.
    """
    path = Path(path)
    known = {qa.id: qa for qa in questions.items} if questions else None
    found: dict[Key, Prediction] = {}
    for number, record in json_lines(path, torn_tail=True):
        item = _prediction(record, known, f"{path}:{number}")
        earlier = found.pop(item.key, None)
        if earlier is not None and earlier.status != "error":
            raise DataError(f"{path}:{number} answers {item.key[0]} (perm {list(item.perm)}) a second time")
        found[item.key] = item
    if not found:
        raise DataError(f"{path} holds no prediction")
    return list(found.values())


def _prediction(record: Mapping[str, Any], known: Mapping[str, QA] | None, where: str) -> Prediction:
    status, mode = record.get("status", "ok"), record.get("answer_mode", "generate")
    if status not in STATUSES or mode not in ANSWER_MODES:
        raise DataError(f'{where}: status "{status}" or answer_mode "{mode}" is unknown')
    if "prediction" not in record:
        raise DataError(f'{where}: no "prediction"; an unanswered question has an empty one and status "error"')
    if known is None:
        qa = qa_from_record(record, where)
        perm = tuple(record.get("perm") or range(len(qa.options)))
    elif record["id"] in known:
        stored = known[record["id"]]
        perm = tuple(record.get("perm") or range(len(stored.options)))
        if sorted(perm) != list(range(len(stored.options))):
            raise DataError(f"{where}: perm {list(perm)} does not order {len(stored.options)} options")
        qa = dataclasses.replace(stored, options=tuple(stored.options[k] for k in perm))
        if record.get("options") and tuple(record["options"]) != qa.options:
            raise DataError(f"{where}: the options shown are not the question's options in the order of perm")
    else:
        raise DataError(f"{where}: question {record['id']} is not in the question set")
    check_qa(qa, where)
    return Prediction(qa, perm, str(record["prediction"] or ""), status, mode, record.get("detail") or {})


def protocol_of(predictions: Sequence[Prediction]) -> str:
    """as_released (stored order throughout), circular (several orders of one question) or shuffle."""
    if len({item.qa.id for item in predictions}) < len(predictions):
        return "circular"
    stored = all(item.perm == tuple(range(len(item.perm))) for item in predictions)
    return "as_released" if stored else "shuffle"


def questions_id(predictions: Iterable[Prediction]) -> str:
    """Dataset id made of the questions themselves: for prediction files that stand alone."""
    lines = {"\x1f".join((p.qa.id, p.qa.question, p.qa.answer, *sorted(p.qa.options))) for p in predictions}
    return hashlib.sha256("\x1e".join(sorted(lines)).encode()).hexdigest()


class PredictionLog:
    """Append-only predictions.jsonl. `done` holds the keys answered before; `append` returns once all is on disk."""

    def __init__(self, path: Path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.done: set[Key] = set()
        if path.exists() and path.stat().st_size:
            _mend_tail(path)
        if path.exists() and path.stat().st_size:
            self.done = {item.key for item in load_predictions(path) if item.status != "error"}
        self._file = path.open("ab")

    def append(self, predictions: Iterable[Prediction]) -> None:
        """One batch, one fsync."""
        lines = [json.dumps(prediction_record(item), ensure_ascii=False) + "\n" for item in predictions]
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> PredictionLog:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _mend_tail(path: Path) -> None:
    """Makes the file end with a whole line: a last line without newline is closed if it is whole, else cut off."""
    content = path.read_bytes()
    if content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    try:
        json.loads(content[start:])
    except ValueError:
        os.truncate(path, start)
        return
    with path.open("ab") as file:
        file.write(b"\n")
