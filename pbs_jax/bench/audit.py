"""What a question set gives away before any model sees it: positions, truth balance, lengths, leakage, task validity.

Reads the released JSONL files or our datasets. A number here is a score that needs no image; where it is high, the
real score of a model says little (reference/benchmark.md section 0).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.schema import QA, QUESTION_TYPES
from pbs_jax.bench import blind, contract, normalize, paper, validity
from pbs_jax.bench.evaluate import cluster_of
from pbs_jax.bench.metrics import score_answer
from pbs_jax.bench.records import dataset_of, load_questions

PINNED = {  # sha256 of the released files that the reference figures were made from
    "cell_id_test.jsonl": "10c1cd073671c826d4dd5d0ebaf8091d64ecb3a1f4e32657fc12923e38b6cbb9",
    "cell_ood_test.jsonl": "55386f45b2f40e4c4eace6da430b2b5456ddac019ca71a086f55cd4e38e8d8b9",
    "cell_val.jsonl": "12ad20de8e0e70381605b3cf3f5450b96211a196d409b9b44709cd2a578b6458",
    "slide_id_test.jsonl": "f4885012408e965ac7417a09eafa9583f0b02b71f944fe7482544beed1624908",
    "slide_train.jsonl": "0b53b9d26690e34bc6a632c7b3a2a594750d68a99310e9062cf0347ad639403c",
    "slide_val.jsonl": "595f830a0dd21668769fc508330e3269539302fe9afc2db63f5b69d199cfd5ce",
}
OFTEN = 20  # a statement asked this often shows whether it is balanced
Group = tuple[str, str, str]  # level, domain, split


def audit(path: Path) -> dict[str, Any]:
    """The audit of all questions under `path` as one JSON-ready object. Raises DataError as `load_questions` does."""
    questions = load_questions(path)
    groups: dict[Group, list[QA]] = {}
    for qa in questions.items:
        groups.setdefault((qa.level, qa.domain, qa.split), []).append(qa)
    files = _files(Path(path))
    here = {file["name"] for file in files}
    return {
        "dataset_id": questions.dataset_id,
        "files": files,
        "missing": sorted(PINNED.keys() - here) if Path(path).is_dir() and here & PINNED.keys() else [],
        "groups": [_group(key, items, _pool(key, groups)) for key, items in sorted(groups.items())],
        "leakage": _leakage(groups),
        "validity": [check for key, items in sorted(groups.items()) for check in _validity(key, items)],
        "contract": contract.check(questions.items),
        "duplicates": _duplicates(groups),
        "paper": {"counts": _against_paper(groups), "std": paper.std_check()},
    }


def _files(path: Path) -> list[dict[str, Any]]:
    """sha256 of the JSONL files read (none for a dataset); `as_pinned` is None for a name the release doesn't have."""
    files = [path] if path.is_file() else [] if dataset_of(path) else sorted(path.glob("*.jsonl"))
    out = []
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        pinned = PINNED.get(file.name)
        out.append({"name": file.name, "sha256": digest, "as_pinned": pinned and pinned == digest})
    return out


def _pool(key: Group, groups: Mapping[Group, list[QA]]) -> list[QA]:
    """Questions that a text-only reader may have learned from: same level, in-domain train, else val."""
    for split in ("train", "val"):
        if split != key[2] and (pool := groups.get((key[0], "id", split))):
            return pool
    return []


def _group(key: Group, items: Sequence[QA], pool: Sequence[QA]) -> dict[str, Any]:
    by_type = {name: [qa for qa in items if qa.question_type == name] for name in QUESTION_TYPES}
    choice, truth = by_type["multiple_choice"], by_type["true_false"]
    first = Counter(qa.options.index(qa.answer) for qa in choice)
    printed = paper.counts(f"{key[0]}_{key[1]}") if key[2] == "test" else None
    return {
        "level": key[0],
        "domain": key[1],
        "split": key[2],
        "questions": len(items),
        "images": len({qa.image_id for qa in items}),
        "clusters": len({cluster_of(qa, "auto") for qa in items}),
        "by_type": {name: len(found) for name, found in by_type.items()},
        "by_type_in_paper": dict(printed) if printed else None,
        "true": sum(qa.answer == "True" for qa in truth),
        "answer_positions": [first[k] for k in range(max(first, default=-1) + 1)],
        "chance": share(sum(1 / len(qa.options) for qa in choice), len(choice)),
        "longest_option": share(sum(_longest_share(qa) for qa in choice), len(choice)),
        "first_longest_option": share(sum(max(qa.options, key=len) == qa.answer for qa in choice), len(choice)),
        "largest_statement_imbalance": _imbalance(truth),
        "repeated_ids": len(items) - len({qa.id for qa in items}),
        "repeated_questions_of_an_image": len(items) - len({(qa.image_id, _text(qa), qa.options) for qa in items}),
        "questions_whose_text_recurs": len(items) - len({_text(qa) for qa in items}),
        "text_only": _text_only(by_type, pool),
    }


def share(count: float, total: int) -> float | None:
    """count / total; None over nothing."""
    return count / total if total else None


def _text(qa: QA) -> str:
    return normalize.robust(qa.question)


def _longest_share(qa: QA) -> float:
    """What picking a longest option scores, ties shared."""
    size = max(map(len, qa.options))
    ties = [option for option in qa.options if len(option) == size]
    return (qa.answer in ties) / len(ties)


def _imbalance(truth: Iterable[QA]) -> float | None:
    """Largest |share true - 1/2| over statements asked at least OFTEN times; None where none is."""
    counts: dict[str, list[bool]] = {}
    for qa in truth:
        counts.setdefault(_text(qa), []).append(qa.answer == "True")
    return max((abs(sum(v) / len(v) - 0.5) for v in counts.values() if len(v) >= OFTEN), default=None)


def _text_only(by_type: Mapping[str, Sequence[QA]], pool: Sequence[QA]) -> dict[str, float] | None:
    """Scores of the nearest question's answer: balanced accuracy, accuracy, EMatch."""
    if not pool:
        return None
    out = {}
    for name, column in (("true_false", "right"), ("multiple_choice", "right"), ("fill_blank", "exact")):
        items = by_type[name]
        replies = blind.nearest_question(items, pool)
        right = [
            (qa.answer, score_answer("robust", name, reply or "", qa.answer, qa.options).columns[column])
            for qa, reply in zip(items, replies, strict=True)
        ]
        kinds = sorted({answer for answer, _ in right}) if name == "true_false" else [None]
        parts = [[value for answer, value in right if kind in (None, answer)] for kind in kinds]
        if items:
            out[name] = sum(sum(part) / len(part) for part in parts) / len(parts)
    return out


def _leakage(groups: Mapping[Group, Sequence[QA]]) -> list[dict[str, Any]]:
    """For every two splits: images, slides or patients, and question texts of the second that the first holds too."""
    out = []
    order = sorted(groups, key=lambda key: (("train", "val", "test").index(key[2]), key))
    for a, b in itertools.combinations(order, 2):
        sides: dict[str, Callable[[QA], str]] = {"images": lambda qa: qa.image_id, "slides": _slide, "texts": _text}
        shared: dict[str, Any] = {"first": "/".join(a), "second": "/".join(b)}
        for name, of in sides.items():
            seen = {of(qa) for qa in groups[a]} - {""}
            units = [of(qa) for qa in groups[b]] if name == "texts" else sorted({of(qa) for qa in groups[b]} - {""})
            shared[name] = [sum(unit in seen for unit in units), len(units)]
        if any(shared[name][0] for name in sides):
            out.append(shared)
    return out


def _duplicates(groups: Mapping[Group, Sequence[QA]]) -> list[dict[str, Any]]:
    """By group, with their ids: questions asked twice of one image, images under two ids, and ids that stand twice."""
    out = []
    for key, items in sorted(groups.items()):
        asked: dict[Any, list[str]] = {}
        for qa in items:
            asked.setdefault((qa.image_id, _text(qa), tuple(sorted(qa.options))), []).append(qa.id)
        found = {
            "questions asked twice of an image": [ids for ids in asked.values() if len(ids) > 1],
            "images under several ids": contract.same_file(items),
        }
        out += [{"group": "/".join(key), "what": what, "found": len(ids), "ids": ids} for what, ids in found.items()]
    return out


def _against_paper(groups: Mapping[Group, Sequence[QA]]) -> list[dict[str, Any]]:
    """Questions by type and task of every test group that the paper's Table 4 has: in these files, in the paper."""
    out = []
    for key, items in sorted(groups.items()):
        track = f"{key[0]}_{key[1]}"
        for task in paper.tasks(track) if key[2] == "test" else ():
            mine = Counter(qa.question_type for qa in items if task in ("all", qa.task))
            here = {name: mine[name] for name in QUESTION_TYPES}
            out.append(
                {"group": "/".join(key), "task": task, "here": here, "paper": dict(paper.counts(track, task) or {})}
            )
    return out


def _slide(qa: QA) -> str:
    return str(qa.source.get("slide_id") or qa.source.get("patient_id") or "")


def _validity(key: Group, items: Sequence[QA]) -> list[dict[str, Any]]:
    return [{"group": "/".join(key), **found} for found in validity.checked(items)]
