"""Whether a submission can be trusted with a rank: every question asked once, in the declared order, of the declared data.

All problems are listed, not only the first. Gold answers and options that a file brings along are never used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_prep.schema import QA, DataError
from pbs_jax.bench.extract import extract
from pbs_jax.bench.records import ANSWER_MODES, PROTOCOLS, STATUSES, Key, Questions
from pbs_jax.bench.score import PREDICTIONS, RUN_CARD
from pbs_jax.bench.tables import MANY_INVALID, MIN_COVERAGE

CARD_FIELDS = ("name", "model", "protocol", "modality", "dataset_id", "prompt_set")
ALIKE = 0.99  # share of equal replies, or of replies equal to the gold, that is worth a warning


@dataclasses.dataclass(frozen=True)
class Validation:
    """`problems` refuse a submission, `warnings` don't. `facts` identify it: name, hashes, protocol, coverage."""

    path: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def valid(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {"valid": self.valid, **dataclasses.asdict(self)}


def validate(path: Path, questions: Questions, protocol: str | None = None) -> Validation:
    """Checks a run folder or a predictions file against the questions it should answer.

    Args:
      protocol: what was declared, where no run.json says it.
    Raises DataError for a missing file or an unknown protocol; everything else is a problem listed.
    """
    path = Path(path)
    file = path / PREDICTIONS if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{file} does not exist: give a run folder or a predictions file")
    if protocol not in (None, *PROTOCOLS):
        raise DataError(f'protocol "{protocol}" is unknown: use {", ".join(PROTOCOLS)}')
    content = file.read_bytes()
    problems: list[str] = []
    records = list(_records(content, problems))
    card, missing = _card(file)
    problems += missing
    declared = protocol or card.get("protocol")
    if protocol and card.get("protocol") not in (None, protocol):
        problems.append(f'run.json declares protocol "{card["protocol"]}", the command "{protocol}"')
    if card.get("dataset_id") not in (None, questions.dataset_id):
        ids = f"{str(card['dataset_id'])[:12]}, the questions {questions.dataset_id[:12]}"
        problems.append(f"run.json names dataset {ids}: other questions were asked")
    if declared in PROTOCOLS:
        problems += _keys(records, questions.items, declared)
    else:
        problems.append(f"no protocol is declared ({', '.join(PROTOCOLS)}): in run.json or with --protocol")
    problems += _modes(records, questions.items)
    answered = sum(record.get("status", "ok") != "error" for record in records)
    expected = sum(_count(qa, declared) for qa in questions.items)
    coverage = answered / expected
    if coverage < MIN_COVERAGE:
        problems.append(
            f"{answered:,} of {expected:,} questions have an answer ({coverage:.1%}, at least 99.5 % is asked)"
        )
    facts = {
        "name": str(card.get("name") or file.stem),
        "sha256": hashlib.sha256(content).hexdigest(),
        "dataset_id": questions.dataset_id,
        "protocol": declared,
        "modality": card.get("modality", "image"),
        "answers": len(records),
        "coverage": coverage,
    }
    warnings = [*map(str, dict(card.get("model") or {}).get("remarks", [])), *_warnings(records, questions.items)]
    return Validation(str(path), tuple(problems), tuple(warnings), facts)


def _count(qa: QA, protocol: str | None) -> int:
    return max(len(qa.options), 1) if protocol == "circular" else 1


def _records(content: bytes, problems: list[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("id"), str):
            problems.append(f'line {number} is no JSON object with an "id"')
        elif not isinstance(record.get("prediction"), str):
            problems.append(f'line {number} ({record["id"]}) has no "prediction" that is a text')
        elif record.get("status", "ok") not in STATUSES or record.get("answer_mode", "generate") not in ANSWER_MODES:
            problems.append(f"line {number} ({record['id']}) has an unknown status or answer_mode")
        else:
            yield record


def _card(file: Path) -> tuple[dict[str, Any], list[str]]:
    """run.json and what it lacks."""
    path = file.with_name(RUN_CARD)
    if file.name != PREDICTIONS or not path.is_file():
        return {}, [f"{RUN_CARD} is missing beside {PREDICTIONS}: it says which model answered, and how"]
    try:
        card = json.loads(path.read_text())
    except ValueError as error:
        return {}, [f"{RUN_CARD} is no JSON ({error})"]
    return card, [f'{RUN_CARD} has no "{name}"' for name in CARD_FIELDS if not card.get(name)]


def _keys(records: Sequence[dict[str, Any]], items: Sequence[QA], protocol: str) -> list[str]:
    """Problems of ids and option orders against those of the protocol."""
    from pbs_jax.bench.run import presentations

    stored = {qa.id: qa for qa in items}
    wanted = {item.key for qa in items for item in presentations(qa, protocol)}
    given: Counter[Key] = Counter()
    unlike = []
    for record in records:
        qa = stored.get(record["id"])
        perm = tuple(record.get("perm") or range(len(qa.options) if qa else 0))
        given[record["id"], perm] += record.get("status", "ok") != "error"
        shown = [qa.options[k] for k in perm] if qa and sorted(perm) == list(range(len(qa.options))) else None
        if record.get("options") and shown is not None and list(record["options"]) != shown:
            unlike.append(record["id"])
    groups = {
        "are no question's id": [id for id, _ in given if id not in stored],
        f"have an option order that is not {protocol}'s": [
            key[0] for key in given if key[0] in stored and key not in wanted
        ],
        "are answered twice in one order": [id for (id, _), count in given.items() if count > 1],
        "are missing": [id for id, _ in sorted(wanted - given.keys())],
        "show other options than the question's": unlike,
    }
    return [f"{len(ids):,} {what}: {_some(ids)}" for what, ids in groups.items() if ids]


def _some(ids: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(ids[:3])) + (" …" if len(ids) > 3 else "")


def _modes(records: Sequence[dict[str, Any]], items: Sequence[QA]) -> list[str]:
    kinds = {qa.id: qa.question_type for qa in items}
    modes: dict[str, set[str]] = {}
    for record in records:
        if record["id"] in kinds:
            modes.setdefault(kinds[record["id"]], set()).add(record.get("answer_mode", "generate"))
    mixed = {kind: sorted(found) for kind, found in modes.items() if len(found) > 1}
    return [f"{kind} answers mix the modes {', '.join(found)}" for kind, found in mixed.items()]


def _warnings(records: Sequence[dict[str, Any]], items: Sequence[QA]) -> list[str]:
    """What a reader should look at: unreadable, constant or all-too-right answers."""
    stored = {qa.id: qa for qa in items}
    by_type: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record["id"] in stored and record.get("status", "ok") != "error":
            by_type.setdefault(stored[record["id"]].question_type, []).append(record)
    out = []
    for kind, found in by_type.items():
        unread = sum(_unread(record, stored[record["id"]]) for record in found)
        if unread > MANY_INVALID * len(found):
            out.append(f"{unread:,} of {len(found):,} {kind} replies can't be read (robust profile)")
        (text, count), *_ = Counter(record["prediction"].strip() for record in found).most_common(1)
        if len(found) > 1 and count >= ALIKE * len(found):
            out.append(f'{count:,} of {len(found):,} {kind} replies are "{text[:40]}"')
        copied = sum(record["prediction"] == stored[record["id"]].answer for record in found)
        if kind == "open" and copied >= ALIKE * len(found):
            out.append(f"{copied:,} of {len(found):,} open replies are the gold answer to the letter")
    return out


def _unread(record: dict[str, Any], qa: QA) -> bool:
    perm = record.get("perm") or range(len(qa.options))
    options = [qa.options[k] for k in perm] if sorted(perm) == list(range(len(qa.options))) else list(qa.options)
    return extract("robust", qa.question_type, record["prediction"], options).value is None
