"""The question set without cell names (paper section 12): "this neutrophil" becomes "this cell".

A model that answers worse here read the answer off the question's hint, not off the image. Ids stay, so that answers
pair; the dataset id is another, so that tables refuse to mix the two sets.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from data_prep.files import write_jsonl
from data_prep.schema import QA, WHITE_CELL_CLASSES, DataError

_NAME = re.compile(
    r"\b(?P<determiner>(?:this|that|the|an?)\s+)?(?:(?:segmented|band)\s+)?"
    rf"(?:{'|'.join(name.casefold() for name in WHITE_CELL_CLASSES)})(?P<plural>s)?\b",
    re.IGNORECASE,
)
_ASKS_TYPE = "cell_subtyping"  # without its name, nothing is left of such a question


def without_names(question: str) -> str:
    """The question with white-cell names made general: "this cell", "cells of this type"."""
    return _NAME.sub(_general, question)


def _general(match: re.Match[str]) -> str:
    if match["plural"]:
        return (match["determiner"] or "") + "cells of this type"
    text = "this cell" if match["determiner"] else "cell"
    return text.capitalize() if match.group()[0].isupper() and match["determiner"] else text


def variant(questions: Sequence[QA]) -> list[QA]:
    """The questions that name a cell, without the name; questions for the type itself are left out."""
    pairs = [(qa, without_names(qa.question)) for qa in questions if qa.task != _ASKS_TYPE]
    return [dataclasses.replace(qa, question=text) for qa, text in pairs if text != qa.question]


def write(questions: Sequence[QA], out: Path) -> int:
    """Writes the variant as JSONL; returns its number of questions. Raises DataError when no question names a cell."""
    found = variant(questions)
    if not found:
        raise DataError("no question names a white cell: there is nothing to replace")
    write_jsonl(out, found)
    return len(found)
