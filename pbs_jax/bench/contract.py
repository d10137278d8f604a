"""The release's contract of ids, paths and texts, question by question (reference/official_code.md 1.2-1.3).

`check_qa` refuses what can't be scored; this counts what is odd but can: each line of the audit names its questions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from data_prep.schema import CELL_TASKS, QA
from pbs_jax.bench import normalize

TRUE_FALSE = "(True/False) "
STRAY = CELL_TASKS[-1]  # `reasoning`: 4 released questions, in no table
_ID = re.compile(r"[0-9a-f]{20}")


def check(questions: Sequence[QA]) -> list[dict[str, Any]]:
    """Each rule with the number and ids of the questions that break it: rule, of, broken, ids."""
    out = []
    for rule, (concerns, holds) in _RULES.items():
        pool = [qa for qa in questions if concerns(qa)]
        ids = [qa.id for qa in pool if not holds(qa)]
        if pool:
            out.append({"rule": rule, "of": len(pool), "broken": len(ids), "ids": ids})
    return out


def same_file(questions: Sequence[QA]) -> list[list[str]]:
    """Images that stand under several ids: one file name in several class folders of a patient."""
    places: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for qa in questions:
        parts = str(qa.source.get("path", "")).split("/")
        if len(parts) > 2 and "slide_id" not in qa.source:
            places[str(qa.source.get("dataset")), *parts[:-2], parts[-1]].add(qa.image_id)
    return sorted(sorted(ids) for ids in places.values() if len(ids) > 1)


def _cell_paths(qa: QA) -> bool:
    """image_id, image_path, patch_path and source name the same object."""
    source: Mapping[str, Any] = qa.source
    if "slide_id" not in source:
        path = str(source.get("path", ""))
        return qa.image_id == f"{source.get('dataset')}:{path}" and qa.image_path == f"cells/{source['dataset']}/{path}"
    place = f"{source['patch_x']}_{source['patch_y']}"
    dataset, slide, number = source["dataset"], source["slide_id"], source["object_index"]
    return (
        qa.image_id == f"{dataset}:{slide}:{place}:{number:04d}"
        and qa.image_path == f"cells/{dataset}/{slide}/{place}_{number:04d}.png"
        and qa.patch_path == f"patches/{dataset}/{slide}/{place}.png"
    )


def _slide_paths(qa: QA) -> bool:
    dataset, slide = qa.source.get("dataset"), qa.source.get("slide_id")
    paths = qa.image_path == f"slides/{dataset}/{slide}.tiff" and qa.feature_path == f"{slide}.pt"
    return paths and qa.image_id == f"{dataset}:{slide}"


def _box(qa: QA) -> bool:
    box, side = qa.source["bbox"], qa.source["patch_size"]
    inside = 0 <= box["left"] < box["right"] <= side and 0 <= box["top"] < box["bottom"] <= side
    return bool(inside and qa.source["patch_x"] % side == qa.source["patch_y"] % side == 0)


def _distinct(qa: QA) -> bool:
    return len({normalize.robust(option) for option in qa.options}) == len(qa.options)


def _any(qa: QA) -> bool:
    return True


def _is(question_type: str) -> Callable[[QA], bool]:
    return lambda qa: qa.question_type == question_type


_RULES: dict[str, tuple[Callable[[QA], bool], Callable[[QA], bool]]] = {
    "the id is 20 lower-case hex characters": (_any, lambda qa: bool(_ID.fullmatch(qa.id))),
    "the prefix (True/False) stands before true/false questions and no others": (
        _any,
        lambda qa: qa.question.startswith(TRUE_FALSE) == (qa.question_type == "true_false"),
    ),
    "only multiple choice has options": (_any, lambda qa: bool(qa.options) == (qa.question_type == "multiple_choice")),
    "options differ after normalising": (_is("multiple_choice"), _distinct),
    "multiple choice has at least 4 options": (_is("multiple_choice"), lambda qa: len(qa.options) >= 4),
    "a short answer has at most 10 words": (_is("fill_blank"), lambda qa: len(qa.answer.split()) <= 10),
    "a short answer is not yes or no": (
        _is("fill_blank"),
        lambda qa: normalize.robust(qa.answer) not in ("yes", "no"),
    ),
    f"the task is not the stray {STRAY}": (lambda qa: qa.level == "cell", lambda qa: qa.task != STRAY),
    "cell ids and paths name the same object": (lambda qa: qa.level == "cell" and bool(qa.image_path), _cell_paths),
    "slide ids and paths name the same slide": (lambda qa: qa.level == "slide" and bool(qa.image_path), _slide_paths),
    "the box lies in its 512 px patch on the grid": (lambda qa: "bbox" in qa.source and bool(qa.image_path), _box),
}
