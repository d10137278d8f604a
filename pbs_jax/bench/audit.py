"""What a question set gives away before any model sees it: positions, truth balance, lengths, leakage, task validity.

Reads the released JSONL files or our datasets. A number here is a score that needs no image; where it is high, the
real score of a model says little (reference/benchmark.md section 0).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.schema import QA, QUESTION_TYPES, WHITE_CELL_CLASSES
from pbs_jax.bench import blind, normalize
from pbs_jax.bench.evaluate import cluster_of
from pbs_jax.bench.metrics import score_answer
from pbs_jax.bench.records import dataset_of, load_questions
from pbs_jax.bench.tables import Table

PINNED = {  # sha256 of the released files that the reference figures were made from
    "cell_id_test.jsonl": "10c1cd073671c826d4dd5d0ebaf8091d64ecb3a1f4e32657fc12923e38b6cbb9",
    "cell_ood_test.jsonl": "55386f45b2f40e4c4eace6da430b2b5456ddac019ca71a086f55cd4e38e8d8b9",
    "cell_val.jsonl": "12ad20de8e0e70381605b3cf3f5450b96211a196d409b9b44709cd2a578b6458",
    "slide_id_test.jsonl": "f4885012408e965ac7417a09eafa9583f0b02b71f944fe7482544beed1624908",
    "slide_train.jsonl": "0b53b9d26690e34bc6a632c7b3a2a594750d68a99310e9062cf0347ad639403c",
    "slide_val.jsonl": "595f830a0dd21668769fc508330e3269539302fe9afc2db63f5b69d199cfd5ce",
}
# Questions by type (true/false, choice, blank, open) in Table 4 of the paper; the release differs.
PAPER_COUNTS = {
    ("cell", "id", "test"): (957, 1088, 916, 699),
    ("cell", "ood", "test"): (727, 1493, 1075, 1200),
    ("slide", "id", "test"): (35, 55, 22, 26),
}
INVALID = "does not measure the task's name"
OFTEN = 20  # a statement asked this often shows whether it is balanced
_DIAGNOSIS = re.compile(
    r"\b(?:MDS|AML|APL|CML|CLL|MPN|myelodysplas\w*|myeloproliferat\w*|leuka?emia|lymphoma|ana?emia|polycyth\w*|"
    r"thrombocyth\w*|myelofibrosis)\b",
    re.IGNORECASE,
)
Group = tuple[str, str, str]  # level, domain, split


def audit(path: Path) -> dict[str, Any]:
    """The audit of all questions under `path` as one JSON-ready object. Raises DataError as `load_questions` does."""
    questions = load_questions(path)
    groups: dict[Group, list[QA]] = {}
    for qa in questions.items:
        groups.setdefault((qa.level, qa.domain, qa.split), []).append(qa)
    return {
        "dataset_id": questions.dataset_id,
        "files": _files(Path(path)),
        "groups": [_group(key, items, _pool(key, groups)) for key, items in sorted(groups.items())],
        "leakage": _leakage(groups),
        "validity": [check for key, items in sorted(groups.items()) for check in _validity(key, items)],
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
    paper = PAPER_COUNTS.get(key)
    return {
        "level": key[0],
        "domain": key[1],
        "split": key[2],
        "questions": len(items),
        "images": len({qa.image_id for qa in items}),
        "clusters": len({cluster_of(qa, "auto") for qa in items}),
        "by_type": {name: len(found) for name, found in by_type.items()},
        "by_type_in_paper": dict(zip(QUESTION_TYPES, paper, strict=True)) if paper else None,
        "true": sum(qa.answer == "True" for qa in truth),
        "answer_positions": [first[k] for k in range(max(first, default=-1) + 1)],
        "chance": _share(sum(1 / len(qa.options) for qa in choice), len(choice)),
        "longest_option": _share(sum(_longest_share(qa) for qa in choice), len(choice)),
        "first_longest_option": _share(sum(max(qa.options, key=len) == qa.answer for qa in choice), len(choice)),
        "largest_statement_imbalance": _imbalance(truth),
        "repeated_ids": len(items) - len({qa.id for qa in items}),
        "repeated_questions_of_an_image": len(items) - len({(qa.image_id, _text(qa), qa.options) for qa in items}),
        "questions_whose_text_recurs": len(items) - len({_text(qa) for qa in items}),
        "text_only": _text_only(by_type, pool),
    }


def _share(count: float, total: int) -> float | None:
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


def _slide(qa: QA) -> str:
    return str(qa.source.get("slide_id") or qa.source.get("patient_id") or "")


def _validity(key: Group, items: Sequence[QA]) -> list[dict[str, Any]]:
    """Checks for groups of questions that do not measure what their task's name says: too many (`limit`) are found."""
    diagnosis = [qa for qa in items if qa.task == "diagnosis"]
    closed = [qa for qa in diagnosis if qa.question_type in ("true_false", "multiple_choice")]
    counts = [qa for qa in items if qa.task == "cell_differential" and qa.question_type == "multiple_choice"]
    types = [name.casefold() for name in WHITE_CELL_CLASSES]
    checks: list[tuple[str, Sequence[QA], Callable[[QA], bool], float, str]] = [
        (
            "diagnosis questions that name the diagnosis",
            diagnosis,
            lambda qa: bool(_DIAGNOSIS.search(qa.question)),
            0.5,
            "a feature is asked for, the diagnosis is given",
        ),
        (
            "closed diagnosis questions answered by a diagnosis",
            closed,
            lambda qa: bool(_DIAGNOSIS.search(qa.answer)),
            0.0,
            "no closed question asks for the diagnosis",
        ),
        (
            "cell-differential choices whose answer is Neutrophils",
            counts,
            lambda qa: normalize.robust(qa.answer) == "neutrophils",
            0.5,
            "one constant answer wins",
        ),
        (
            'answers with "hypersegment"',
            items if key[0] == "slide" else (),
            lambda qa: "hypersegment" in qa.answer.casefold(),
            0.2,
            "one finding dominates the answers",
        ),
        (
            "questions, true/false apart, that name a white-cell class",
            [qa for qa in items if qa.question_type != "true_false"] if key[0] == "cell" else (),
            lambda qa: any(name in qa.question.casefold() for name in types),
            0.5,
            "the question may give the cell's type away",
        ),
    ]
    out = []
    for name, pool, hit, limit, why in checks:
        found = sum(map(hit, pool))
        valid = found > 0 if limit == 0 else found < limit * len(pool)
        if pool:
            counted = {"group": "/".join(key), "check": name, "found": found, "of": len(pool)}
            out.append(counted | {"valid": valid, "why": why})
    return out


def to_tables(found: Mapping[str, Any]) -> list[Table]:
    """The audit for reading: gold balance, text-only scores, leakage, validity."""
    groups = found["groups"]
    header = (
        "",
        "questions",
        "images",
        "T/F true",
        'always "True"',
        "MCQ first option",
        'always "A"',
        "answer positions",
    )
    balance = [
        (
            _name(group),
            str(group["questions"]),
            str(group["images"]),
            _of(group["true"], group["by_type"]["true_false"]),
            _percent(_share(group["true"], group["by_type"]["true_false"])),
            _of(sum(group["answer_positions"][:1]), group["by_type"]["multiple_choice"]),
            _percent(_share(sum(group["answer_positions"][:1]), group["by_type"]["multiple_choice"])),
            ", ".join(map(str, group["answer_positions"])) or "-",
        )
        for group in groups
    ]
    shortcut_header = (
        "", "MCQ chance", "longest option", "first of the longest", "text-only T/F bal. acc", "text-only MCQ",
        "text-only FB EMatch", "largest T/F imbalance", "recurring texts", "repeats",
    )  # fmt: skip
    shortcuts = [
        (
            _name(group),
            *(_percent(group[key]) for key in ("chance", "longest_option", "first_longest_option")),
            *(_percent((group["text_only"] or {}).get(name)) for name in QUESTION_TYPES[:3]),
            _percent(group["largest_statement_imbalance"]),
            str(group["questions_whose_text_recurs"]),
            str(group["repeated_ids"] + group["repeated_questions_of_an_image"]),
        )
        for group in groups
    ]
    tables = [
        Table("Gold balance: what a constant answer scores", header, tuple(balance), _paper_notes(found)),
        Table(
            "Shortcuts in the text",
            shortcut_header,
            tuple(shortcuts),
            ("text-only: the answer of the nearest training (else validation) question by TF-IDF.",),
        ),
    ]
    if found["leakage"]:
        rows = [
            (f"{x['first']} in {x['second']}", *(_of(*x[name]) for name in ("images", "slides", "texts")))
            for x in found["leakage"]
        ]
        tables.append(Table("Leakage between splits", ("", "images", "slides/patients", "question texts"), tuple(rows)))
    if found["validity"]:
        rows = [
            (x["group"], x["check"], _of(x["found"], x["of"]), "" if x["valid"] else f"{INVALID}: {x['why']}")
            for x in found["validity"]
        ]  # fmt: skip
        tables.append(Table("Task validity", ("", "check", "count", "verdict"), tuple(rows)))
    return tables


def _paper_notes(found: Mapping[str, Any]) -> tuple[str, ...]:
    files = tuple(
        f"{file['name']}: {'as pinned' if file['as_pinned'] else 'NOT as released'}, sha256 {file['sha256'][:12]}"
        for file in found["files"]
        if file["as_pinned"] is not None
    )
    return files + tuple(
        f"{_name(group)}: paper's Table 4 has "
        + ", ".join(f"{kind} {count}" for kind, count in group["by_type_in_paper"].items())
        + "; these files "
        + ", ".join(f"{kind} {count}" for kind, count in group["by_type"].items())
        for group in found["groups"]
        if found["files"] and group["by_type_in_paper"] and group["by_type_in_paper"] != group["by_type"]
    )


def _name(group: Mapping[str, Any]) -> str:
    return f"{group['level']}/{group['domain']}/{group['split']}"


def _of(found: int, total: int) -> str:
    return f"{found:,} of {total:,}" if total else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
