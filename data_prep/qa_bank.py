"""Words for the facts of a cell: canonical answers, statements, questions and option phrases of the template writer.

A fact is the cell's type ("label") or one WBCAtt attribute. Every answer maps back to the recorded value (`value_of`),
so that scores can be read per attribute value. Wordings are few on purpose: many would make text-only probes unstable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from data_prep.schema import ARTIFACT, ATTRIBUTES, OTHERS, WHITE_CELL_CLASSES, Cell, DataError

LABEL = "label"
FACTS = (LABEL, *ATTRIBUTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """How one fact is asked. `statement` and `option` are formatted with the answer; the maps override some values."""

    task: str
    blanks: tuple[str, ...]
    statement: str
    choices: tuple[str, ...] = ()  # empty: multiple choice only in combination with a second attribute
    option: str = "{}"
    answers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    statements: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


WORDINGS: dict[str, Wording] = {
    LABEL: Wording(
        "cell_subtyping",
        ("What type of white blood cell is this?", "Name the type of this white blood cell."),
        "This white blood cell is a {}.",
        ("Which type of white blood cell is shown?", "Which of these white blood cell types is this?"),
        statements={"Eosinophil": "This white blood cell is an Eosinophil."},
    ),
    "cell_size": Wording("morphology", ("How big is this cell?",), "The cell is {}.", option="{} cell"),
    "cell_shape": Wording(
        "morphology", ("What is the shape of this cell?",), "The cell shape is {}.", option="{} shape"
    ),
    "nucleus_shape": Wording(
        "morphology",
        ("What is the shape of the nucleus?",),
        "The nucleus shape is {}.",
        ("Which nucleus shape is seen?",),
        answers={
            "unsegmented-band": "band",
            "unsegmented-indented": "indented",
            "unsegmented-round": "round",
            "segmented-bilobed": "bilobed",
            "segmented-multilobed": "multilobed",
        },
    ),
    "nuclear_cytoplasmic_ratio": Wording(
        "morphology",
        ("What is the nuclear-cytoplasmic ratio?",),
        "The nuclear-cytoplasmic ratio is {}.",
        option="{} ratio",
    ),
    "chromatin_density": Wording(
        "morphology",
        ("What is the density of the chromatin?",),
        "The chromatin is {}.",
        option="{} chromatin",
        answers={"densely": "dense", "loosely": "loose"},
    ),
    "cytoplasm_vacuole": Wording(
        "morphology",
        ("Are vacuoles present in the cytoplasm?",),
        "Cytoplasmic vacuoles are {}.",
        answers={"no": "absent", "yes": "present"},
        options={"no": "no vacuoles", "yes": "vacuoles"},
    ),
    "cytoplasm_texture": Wording(
        "morphology", ("What is the texture of the cytoplasm?",), "The cytoplasm texture is {}.", option="{} cytoplasm"
    ),
    "cytoplasm_colour": Wording(
        "morphology",
        ("What is the color of the cytoplasm?",),
        "The cytoplasm color is {}.",
        ("Which cytoplasm color is seen?",),
    ),
    "granule_type": Wording(
        "morphology",
        ("What type of granules does the cytoplasm have?",),
        "The granules are {} in type.",
        ("Which type of granules is seen?",),
        option="{} granules",
        answers={"nil": "none"},
        statements={"nil": "No type of granule is seen."},
        options={"nil": "no granules"},
    ),
    "granule_colour": Wording(
        "morphology",
        ("What is the color of the granules?",),
        "The granules are {} in color.",
        ("Which color of granules is seen?",),
        option="{} granules",
        answers={"nil": "none"},
        statements={"nil": "No colored granule is seen."},
        options={"nil": "no granules"},
    ),
    "granularity": Wording(
        "morphology",
        ("Is the cytoplasm granular or agranular?",),
        "The cytoplasm is {}.",
        option="{} cytoplasm",
        answers={"no": "agranular", "yes": "granular"},
    ),
}

# Two-valued attributes are asked in twos, so that a question has four options (all occur in each WBCAtt split).
PAIRS: dict[tuple[str, str], str] = {
    ("cell_size", "cell_shape"): "Which cell size and cell shape are seen?",
    ("cell_size", "cytoplasm_texture"): "Which cell size and cytoplasm texture are seen?",
    ("cell_size", "granularity"): "Which cell size and granularity are seen?",
    ("cell_shape", "cytoplasm_texture"): "Which cell shape and cytoplasm texture are seen?",
    ("cell_shape", "granularity"): "Which cell shape and granularity are seen?",
    ("cell_shape", "nuclear_cytoplasmic_ratio"): "Which cell shape and nuclear-cytoplasmic ratio are seen?",
    ("cell_shape", "chromatin_density"): "Which cell shape and chromatin density are seen?",
    (
        "nuclear_cytoplasmic_ratio",
        "cytoplasm_texture",
    ): "Which nuclear-cytoplasmic ratio and cytoplasm texture are seen?",
    (
        "nuclear_cytoplasmic_ratio",
        "chromatin_density",
    ): "Which nuclear-cytoplasmic ratio and chromatin density are seen?",
    ("cytoplasm_vacuole", "chromatin_density"): "Which vacuoles and chromatin density are seen?",
    ("cytoplasm_vacuole", "cytoplasm_texture"): "Which vacuoles and cytoplasm texture are seen?",
}
DESCRIBE = "Describe the morphology of this cell."


def values(fact: str) -> tuple[str, ...]:
    """The recorded values that a fact can take. Raises DataError for an unknown fact."""
    if fact == LABEL:
        return WHITE_CELL_CLASSES
    if fact not in ATTRIBUTES:
        raise DataError(f'"{fact}" is not a fact: use one of {", ".join(FACTS)}')
    return ATTRIBUTES[fact]


def recorded(cell: Cell, fact: str) -> str | None:
    """The cell's recorded value of a fact; None where nothing is recorded or the type is outside the five.

    Raises DataError that names the cell when the value is not one of the fact's values.
    """
    value = cell.label if fact == LABEL else cell.attributes.get(fact)
    if value is None or value == "" or (fact == LABEL and value in (OTHERS, ARTIFACT)):
        return None
    if value not in values(fact):
        raise DataError(f'cell {cell.cell_id}: {fact} "{value}" is not one of {", ".join(values(fact))}')
    return value


def answer(fact: str, value: str) -> str:
    """Canonical fill-in answer, e.g. ("chromatin_density", "densely") -> "dense"."""
    return WORDINGS[fact].answers.get(value, value)


def value_of(fact: str, text: str) -> str | None:
    """The recorded value behind a canonical answer (case folded), None when the text is no answer to this fact."""
    return {answer(fact, value).casefold(): value for value in values(fact)}.get(text.strip().casefold())


def statement(fact: str, value: str) -> str:
    """A sentence that is true exactly for cells with this value."""
    wording = WORDINGS[fact]
    return wording.statements.get(value) or wording.statement.format(answer(fact, value))


def vocabulary() -> Iterator[str]:
    """Every wording of every value, at the start of a text and within it, for a tokenizer that must know each word."""
    for fact in FACTS:
        for value in values(fact):
            word = answer(fact, value)
            yield from (
                word.lower(),
                word.capitalize(),
                statement(fact, value),
                f"{word.lower()} {option(fact, value)}",
            )


def option(fact: str, value: str) -> str:
    """The value as a multiple-choice option or as half of a combination."""
    wording = WORDINGS[fact]
    return wording.options.get(value) or wording.option.format(answer(fact, value))


def phrase(fact: str, value: str) -> str:
    """The value in words that say which fact it is of, as captions do: "irregular nucleus", "small cell"."""
    noun = {"nucleus_shape": "nucleus", "cytoplasm_colour": "cytoplasm"}.get(fact)
    return f"{answer(fact, value)} {noun}" if noun else option(fact, value)
