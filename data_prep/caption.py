"""Captions of cells from typed facts, and the official pre-processing of caption text for the Q-Former.

A caption names the type and every recorded attribute in at most 30 tokens of the nano tokenizer, because it stands in
the 32-token visual slot in phase 0b and, with [CLS] and [SEP], in the Q-Former's 32 text positions.
"""

from __future__ import annotations

import re

from data_prep import qa_bank
from data_prep.schema import ARTIFACT, ATTRIBUTES, WHITE_CELL_CLASSES, Cell, DataError, stable_hash

VARIANTS = (
    "{size} {shape} {type} with {nucleus} nucleus, {chromatin} chromatin, {ratio} nuclear-cytoplasmic ratio, "
    "{texture} {colour} cytoplasm, {vacuoles}, {granules}.",
    "{type}, {size} and {shape}, {ratio} nuclear-cytoplasmic ratio, {nucleus} nucleus with {chromatin} chromatin, "
    "{texture} {colour} cytoplasm, {vacuoles}, {granules}.",
    "{type} with {texture} {colour} cytoplasm, {granules} and {vacuoles}, {nucleus} nucleus, {chromatin} chromatin, "
    "{ratio} nuclear-cytoplasmic ratio, {size} {shape} cell.",
)
_PUNCTUATION = re.compile(r"[.!\"()*#:;~]")
MAX_WORDS = 50


def cell_caption(cell: Cell, variant: int | None = None) -> str:
    """One sentence with the type and every attribute; the wording follows from the cell's id unless `variant` is given.

    Without attributes only the type is named. Raises DataError when some of the eleven attributes are missing.
    """
    if not cell.attributes:
        return _type_only(cell.label)
    facts = {fact: qa_bank.recorded(cell, fact) for fact in ATTRIBUTES}
    missing = [fact for fact, value in facts.items() if value is None]
    if missing:
        raise DataError(f"cell {cell.cell_id}: attributes {', '.join(missing)} are missing; give all eleven or none")
    words = {fact: qa_bank.answer(fact, value) for fact, value in facts.items() if value is not None}
    chosen = stable_hash("caption", cell.cell_id) % len(VARIANTS) if variant is None else variant
    text = VARIANTS[chosen].format(
        type=cell.label if cell.label in WHITE_CELL_CLASSES else "white blood cell",
        size=words["cell_size"],
        shape=words["cell_shape"],
        nucleus=words["nucleus_shape"],
        ratio=words["nuclear_cytoplasmic_ratio"],
        chromatin=words["chromatin_density"],
        texture=words["cytoplasm_texture"],
        colour=words["cytoplasm_colour"],
        vacuoles=qa_bank.option("cytoplasm_vacuole", str(facts["cytoplasm_vacuole"])),
        granules=_granules(words),
    )
    return text[0].upper() + text[1:]


def _granules(words: dict[str, str]) -> str:
    """Granules in two or three words; an agranular cell has none, whatever the type and color columns say."""
    kinds = [words[fact] for fact in ("granule_type", "granule_colour") if words[fact] != "none"]
    if words["granularity"] == "agranular" or not kinds:
        return "no granules"
    return " ".join((*kinds, "granules"))


def _type_only(label: str) -> str:
    if label in WHITE_CELL_CLASSES:
        return f"{'An' if label[0] in 'AEIOU' else 'A'} {label}."
    if not label:
        return "A white blood cell."
    return "A damaged or partial cell." if label == ARTIFACT else "A white blood cell of another type."


def caption_text(caption: str) -> str:
    """The official caption processor (BLIP): lower case, .!"()*#:;~ to spaces, runs of spaces to one, 50 words."""
    text = re.sub(r" {2,}", " ", _PUNCTUATION.sub(" ", caption.lower())).rstrip("\n").strip(" ")
    return " ".join(text.split(" ")[:MAX_WORDS])
