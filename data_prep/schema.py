"""The data contracts of the project: record fields, enumerations, ids and the one source of option order.

Everything that crosses a file boundary is named here (DESIGN section 4). Free of jax, so that both sides import it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA_VERSION = "1.0.0"

# Class order is part of the contract: label ids index this tuple.
WHITE_CELL_CLASSES = ("Neutrophil", "Lymphocyte", "Monocyte", "Eosinophil", "Basophil")
OTHERS = "Others"  # a real cell of a type outside the five
ARTIFACT = "Artifact"  # damaged, partial, debris
CELL_LABELS = (*WHITE_CELL_CLASSES, OTHERS, ARTIFACT)
NO_WHITE_CELL, WHITE_CELL = "not a white cell", "white cell"  # what the first of two classifiers tells apart
NOT_WHITE = ("Platelet", "Erythroblast")  # raw types that are Others: the sources keep them in `comments`
LABEL_SOURCES = ("human", "model", "heuristic", "synthetic")

QUESTION_TYPES = ("true_false", "multiple_choice", "fill_blank", "open")
CELL_TASKS = ("morphology", "abnormality", "cell_subtyping", "knowledge", "reasoning")
SLIDE_TASKS = ("morphology", "abnormality", "cell_differential", "knowledge", "diagnosis")
SPLITS = ("train", "val", "test")
DOMAINS = ("id", "ood")

# WBCAtt's eleven attributes, in the authors' column order, with their values.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "cell_size": ("small", "big"),
    "cell_shape": ("round", "irregular"),
    "nucleus_shape": (
        "unsegmented-band",
        "unsegmented-indented",
        "unsegmented-round",
        "segmented-bilobed",
        "segmented-multilobed",
        "irregular",
    ),
    "nuclear_cytoplasmic_ratio": ("low", "high"),
    "chromatin_density": ("densely", "loosely"),
    "cytoplasm_vacuole": ("no", "yes"),
    "cytoplasm_texture": ("clear", "frosted"),
    "cytoplasm_colour": ("light blue", "blue", "purple blue"),
    "granule_type": ("nil", "small", "round", "coarse"),
    "granule_colour": ("nil", "pink", "purple", "red"),
    "granularity": ("no", "yes"),
}

# Square crops, one geometry for every source: the white cell's box, squared on its longer side, times CONTEXT.
CROP_SIDE = 224
CROP_CONTEXT = 1.8


class DataError(ValueError):
    """Bad input: one sentence that names the file, id or parameter and says what to change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """Pixel box, right and bottom exclusive."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        return self.right - self.left

    @property
    def height(self) -> int:
        return self.bottom - self.top

    @property
    def area(self) -> int:
        return max(self.width, 0) * max(self.height, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One white-cell crop (dataset `cells`). `image` holds encoded bytes of a CROP_SIDE square RGB picture."""

    cell_id: str
    split: str
    label: str
    label_source: str
    image: bytes
    patch_id: str = ""
    slide_id: str = ""
    patient_id: str = ""
    bbox: Box = Box(0, 0, 0, 0)  # in the source image
    confidence: float = 1.0
    comments: str = ""
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    caption: str = ""
    geometry: str = ""
    color_enhance: float = 1.0
    domain: str = "id"


@dataclasses.dataclass(frozen=True, slots=True)
class QA:
    """One question (datasets `cell_qa`, `slide_qa`), field names as in the released PBSBench JSONL.

    `options` are stored in the order of writing; `option_order` says how they are shown.
    `provenance` says who wrote it (template, provider and model, or release) and from which facts.
    """

    id: str
    image_id: str
    level: str
    domain: str
    split: str
    task: str
    question_type: str
    question: str
    answer: str
    options: tuple[str, ...] = ()
    image_path: str = ""
    patch_path: str = ""
    feature_path: str = ""
    source: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def stable_hash(*parts: object) -> int:
    """64-bit integer from sha256 of the parts: the seed of every choice that must not depend on order or process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def question_id(*parts: object) -> str:
    """20 lower-case hex characters, the released files' id shape."""
    return hashlib.sha256("\x1f".join(str(part) for part in parts).encode()).hexdigest()[:20]


def option_order(id: str, n: int, seed: int = 0) -> tuple[int, ...]:
    """The order in which a question's `n` options are shown: position k shows options[order[k]].

    Depends on (id, seed) alone, so every consumer (qa, tokens, bench) and every epoch sees the same order.
    """
    return tuple(sorted(range(n), key=lambda k: hashlib.sha256(f"{seed}\x1f{id}\x1f{k}".encode()).digest()))


def shown_options(qa: QA, order: str = "shuffle", seed: int = 0) -> tuple[str, ...]:
    """Options as the model sees them. `order`: "shuffle" (seeded, per id) or "as_released".

    Raises DataError for an unknown order.
    """
    match order:
        case "as_released":
            return tuple(qa.options)
        case "shuffle":
            return tuple(qa.options[k] for k in option_order(qa.id, len(qa.options), seed))
    raise DataError(f'option order "{order}" is unknown: use "shuffle" or "as_released"')


def check_qa(qa: QA, where: str) -> None:
    """Validates enumerations and answers. Raises DataError that begins with `where` (file:line or dataset:id)."""
    tasks = {"cell": CELL_TASKS, "slide": SLIDE_TASKS}.get(qa.level)
    for name, value, allowed in (
        ("level", qa.level, ("cell", "slide")),
        ("domain", qa.domain, DOMAINS),
        ("split", qa.split, SPLITS),
        ("question_type", qa.question_type, QUESTION_TYPES),
        ("task", qa.task, tasks or ()),
    ):
        if value not in allowed:
            raise DataError(f'{where}: {name} "{value}" is not one of {", ".join(allowed)}')
    if not qa.question.strip() or not qa.answer.strip():
        raise DataError(f"{where}: question {qa.id} has an empty question or answer")
    if qa.question_type == "true_false" and qa.answer not in ("True", "False"):
        raise DataError(f'{where}: true/false question {qa.id} has answer "{qa.answer}", not True or False')
    if qa.question_type == "multiple_choice":
        check_options(qa.options, qa.answer, f"{where}: question {qa.id}")


def qa_from_record(record: Mapping[str, Any], where: str) -> QA:
    """A question from released JSON or a stored record; other fields are left out. Raises DataError naming `where`."""
    values = {name: _plain(record[name]) for name in QA.__dataclass_fields__ if record.get(name) is not None}
    values["options"] = tuple(_plain(option) for option in values.get("options", ()))
    for name in ("source", "provenance"):
        if isinstance(values.get(name), str):
            values[name] = json.loads(values[name]) if values[name] else {}
    try:
        return QA(**values)
    except TypeError as error:
        raise DataError(f"{where} is no question: {record.get('id', '?')} lacks a field ({error})") from error


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def released_record(qa: QA) -> dict[str, Any]:
    """A question in the released files' form: their field names, empty ones left out (options only of choices)."""
    record = {name: value for name in QA.__dataclass_fields__ if (value := getattr(qa, name))}
    if "options" in record:
        record["options"] = list(qa.options)
    return record


def check_options(options: Sequence[str], answer: str, where: str) -> None:
    """Options must be at least two, distinct after case folding, and hold the answer. Raises DataError."""
    folded = [option.strip().casefold() for option in options]
    if len(folded) < 2:
        raise DataError(f"{where} has {len(folded)} options; multiple choice needs at least two")
    if len(set(folded)) != len(folded):
        raise DataError(f"{where} has two equal options: {list(options)}")
    if answer not in options:
        raise DataError(f'{where}: the answer "{answer}" is not among its options {list(options)}')
