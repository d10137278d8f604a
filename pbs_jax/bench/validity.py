"""Which groups of questions do not measure what their task's name says, and why (benchmark.md section 0).

One list of checks serves the audit (counts) and the score tables (a note under every number of such a group).
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_prep.schema import QA, WHITE_CELL_CLASSES
from pbs_jax.bench import normalize

INVALID = "does not measure the task's name"
CLOSED = ("true_false", "multiple_choice")
ALL = "all"
_TYPES = tuple(name.casefold() for name in WHITE_CELL_CLASSES)
_DIAGNOSIS = re.compile(
    r"\b(?:MDS|AML|APL|CML|CLL|MPN|myelodysplas\w*|myeloproliferat\w*|leuka?emia|lymphoma|ana?emia|polycyth\w*|"
    r"thrombocyth\w*|myelofibrosis)\b",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Counts `hit` among the questions that `concerns`. The group fails at a share of `limit` or more.

    A limit of 0 turns it round: the group fails when nothing is found. `level`, `task` ("all": every task) and `types`
    name the group.
    """

    name: str
    level: str
    task: str
    types: tuple[str, ...]
    hit: Callable[[QA], bool]
    limit: float
    why: str

    def concerns(self, qa: QA) -> bool:
        return qa.level == self.level and self.task in (ALL, qa.task) and qa.question_type in self.types

    def passes(self, found: int, of: int) -> bool:
        return found > 0 if self.limit == 0 else found < self.limit * of


_OTHERS = ("multiple_choice", "fill_blank", "open")
CHECKS = (
    Check(
        "diagnosis questions that name the diagnosis",
        "slide",
        "diagnosis",
        (*CLOSED, "fill_blank", "open"),
        lambda qa: bool(_DIAGNOSIS.search(qa.question)),
        0.5,
        "a feature is asked for, the diagnosis is given",
    ),
    Check(
        "closed diagnosis questions answered by a diagnosis",
        "slide",
        "diagnosis",
        CLOSED,
        lambda qa: bool(_DIAGNOSIS.search(qa.answer)),
        0.0,
        "no closed question asks for the diagnosis",
    ),
    Check(
        "cell-differential choices whose answer is Neutrophils",
        "slide",
        "cell_differential",
        ("multiple_choice",),
        lambda qa: normalize.robust(qa.answer) == "neutrophils",
        0.5,
        "one constant answer wins",
    ),
    Check(
        'answers with "hypersegment"',
        "slide",
        ALL,
        (*CLOSED, "fill_blank", "open"),
        lambda qa: "hypersegment" in qa.answer.casefold(),
        0.2,
        "one finding dominates the answers",
    ),
    Check(
        "questions, true/false apart, that name a white-cell class",
        "cell",
        ALL,
        _OTHERS,
        lambda qa: any(name in qa.question.casefold() for name in _TYPES),
        0.5,
        "the question may give the cell's type away",
    ),
)


def checked(questions: Sequence[QA]) -> list[dict[str, Any]]:
    """Each check that concerns any of the questions: check, task, types, found, of, valid, why, ids found."""
    out = []
    for check in CHECKS:
        pool = [qa for qa in questions if check.concerns(qa)]
        if pool:
            ids = [qa.id for qa in pool if check.hit(qa)]
            out.append(
                {
                    "check": check.name,
                    "task": check.task,
                    "types": list(check.types),
                    "found": len(ids),
                    "of": len(pool),
                    "valid": check.passes(len(ids), len(pool)),
                    "why": check.why,
                    "ids": ids,
                }
            )
    return out


def verdicts(questions: Sequence[QA]) -> Mapping[tuple[str, str, str], tuple[str, ...]]:
    """(track, task or "all", question type) -> why the group does not measure its task, for groups that fail."""
    tracks: dict[str, dict[str, QA]] = defaultdict(dict)
    for qa in questions:
        tracks[f"{qa.level}_{qa.domain}"].setdefault(qa.id, qa)
    out: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for track, items in tracks.items():
        for found in checked(list(items.values())):
            text = f"{INVALID} ({found['found']} of {found['of']} {found['check']}): {found['why']}"
            for question_type in () if found["valid"] else found["types"]:
                key = track, found["task"], question_type
                out[key] = (*out.get(key, ()), text)
    return out
