"""Captions hold every fact in readable words; the caption processor equals the official one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from data_prep import qa_bank
from data_prep.caption import VARIANTS, caption_text, cell_caption
from data_prep.schema import ATTRIBUTES, Cell, DataError
from tests.data_prep.wbcatt import expert_cells, made_cells


def _facts_in(caption: str, cell: Cell) -> list[str]:
    """The facts whose canonical words the caption lacks."""
    text = f" {caption_text(caption).replace(',', ' ,')} "
    words = {
        fact: qa_bank.option(fact, cell.attributes[fact])
        if fact == "cytoplasm_vacuole"
        else qa_bank.answer(fact, cell.attributes[fact])
        for fact in ATTRIBUTES
        if fact != "granularity"
    }
    words = {fact: "no granules" if word == "none" else word for fact, word in words.items()}
    return [fact for fact, word in (words | {"label": cell.label.lower()}).items() if f" {word} " not in text]


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_every_variant_names_the_type_and_every_attribute(variant: int) -> None:
    for cell in made_cells(20):
        assert _facts_in(cell_caption(cell, variant), cell) == []


def test_caption_of_a_known_cell_reads_as_english() -> None:
    cell = next(cell for cell in made_cells(20) if cell.label == "Eosinophil")
    attributes = dict(cell.attributes) | {
        "cell_size": "big",
        "cell_shape": "round",
        "nucleus_shape": "segmented-bilobed",
        "chromatin_density": "densely",
        "cytoplasm_vacuole": "no",
    }
    assert cell_caption(dataclasses.replace(cell, attributes=attributes), variant=0) == (
        "Big round Eosinophil with bilobed nucleus, dense chromatin, low nuclear-cytoplasmic ratio, "
        "clear light blue cytoplasm, no vacuoles, round red granules."
    )


def test_caption_depends_on_the_id_alone_and_all_variants_occur(shared: Path) -> None:
    cells = expert_cells(shared)
    assert [cell_caption(cell) for cell in reversed(cells)] == [cell.caption for cell in reversed(cells)]
    openings = {
        (cell.caption.split()[0].rstrip(",").casefold() == cell.label.casefold(), "cell." in cell.caption)
        for cell in cells
    }
    assert openings == {(False, False), (True, False), (True, True)}


def test_cells_without_attributes_get_their_type_only() -> None:
    def caption(label: str) -> str:
        return cell_caption(Cell("a", "test", label, "human", b""))

    assert caption("Eosinophil") == "An Eosinophil."
    assert caption("Others") == "A white blood cell of another type."
    assert caption("Artifact") == "A damaged or partial cell."


def test_missing_or_unknown_attributes_are_named() -> None:
    cell = made_cells(10)[0]
    some = {name: value for name, value in cell.attributes.items() if name != "cell_size"}
    with pytest.raises(DataError, match=r"made:Neutrophil:0: attributes cell_size are missing"):
        cell_caption(dataclasses.replace(cell, attributes=some))
    with pytest.raises(DataError, match=r'made:Neutrophil:0: cell_size "huge" is not one of small, big'):
        cell_caption(dataclasses.replace(cell, attributes=some | {"cell_size": "huge"}))


def test_caption_processor_equals_the_official_one(shared: Path) -> None:
    cases = json.loads((shared / "data/goldens/cases.json").read_text())["qformer"]["caption_processor"]
    assert len(cases) >= 8
    assert [caption_text(case["in"]) for case in cases] == [case["out"] for case in cases]
