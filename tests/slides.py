"""A small slide dataset written through data_prep.io from cells that are at hand: real layout, no slide pipeline needed."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from pathlib import Path

from PIL import Image

from data_prep.datasets import CELL_FEATURES, QA_FEATURES, cell_record, qa_record, read_cells
from data_prep.io import read_manifest, write_dataset
from data_prep.schema import QA, WHITE_CELL_CLASSES, Cell, question_id
from data_prep.slide_datasets import PATCH_FEATURES, Patch, patch_id, patch_record
from data_prep.tokens import load_tokenizer, pack, token_features

SIDE = 512
CELLS_A_PATCH, PATCHES_A_SLIDE = 2, 3  # the last patch of a slide has no cell


def write_slides(source: Path, out: Path, slides: int = 2) -> Path:
    """OUT/{patches, cells, slide_qa, slide_qa_tokens, tokenizer}: `slides` slides a split, made of source's cells."""
    made: list[tuple[list[Patch], list[Cell]]] = []
    for split in read_manifest(source / "cells")["splits"]:
        cells = [cell for cell in read_cells(source, split) if cell.label in WHITE_CELL_CLASSES]
        of_slide = CELLS_A_PATCH * (PATCHES_A_SLIDE - 1)
        for number in range(slides):
            part = [cells[(number * of_slide + k) % len(cells)] for k in range(of_slide)]
            made.append(_slide(f"S:{split}{number}", part))
    patches = [patch for of_slide, _ in made for patch in of_slide]
    cells = [cell for *_, of_slide in made for cell in of_slide]
    config: dict[str, object] = {"test": True}
    write_dataset(
        out, "patches", PATCH_FEATURES, map(patch_record, patches), id_feature="patch_id", config=config, inputs={}
    )
    write_dataset(out, "cells", CELL_FEATURES, map(cell_record, cells), id_feature="cell_id", config=config, inputs={})
    questions = [qa for *_, of_slide in made for qa in _questions(of_slide)]
    write_dataset(
        out, "slide_qa", QA_FEATURES, map(qa_record, questions), id_feature="id", config=config, inputs={},
        split_level="slide",
    )  # fmt: skip
    tokenizer = load_tokenizer(source / "tokenizer")
    (out / "tokenizer").mkdir(parents=True)
    (out / "tokenizer" / "tokenizer.json").write_bytes((source / "tokenizer" / "tokenizer.json").read_bytes())
    split_of = {qa.image_id: qa.split for qa in questions}
    bins = [
        record | {"split": split_of[record["image_id"]]}
        for record in pack(questions, tokenizer, bin_length=256, too_long=[])
    ]
    features, inputs = token_features(256), {"tokenizer": tokenizer.sha256}
    write_dataset(out, "slide_qa_tokens", features, bins, id_feature="bin_id", config=config, inputs=inputs)
    return out


def _slide(slide_id: str, given: list[Cell]) -> tuple[list[Patch], list[Cell]]:
    """Cells two by two on pale patches, and one patch without any."""
    patches, cells = [], []
    for p in range(PATCHES_A_SLIDE):
        canvas = Image.new("RGB", (SIDE, SIDE), (235, 215, 210))
        of_patch = []
        for k, cell in enumerate(given[p * CELLS_A_PATCH : (p + 1) * CELLS_A_PATCH]):
            canvas.paste(Image.open(io.BytesIO(cell.image)).resize((128, 128)), (64 + 256 * k, 192))
            cell_id = f"{slide_id}:{SIDE * p}_0:{k:04d}"
            place = {"patch_id": patch_id(slide_id, SIDE * p, 0), "slide_id": slide_id}
            of_patch.append(dataclasses.replace(cell, cell_id=cell_id, **place))
        encoded = io.BytesIO()
        canvas.save(encoded, "JPEG", quality=95, subsampling=0)
        ids = tuple(cell.cell_id for cell in of_patch)
        patches.append(
            Patch(patch_id(slide_id, SIDE * p, 0), slide_id, given[0].split, SIDE * p, 0, 0.9, encoded.getvalue(), ids)
        )
        cells += of_patch
    return patches, cells


def _questions(cells: list[Cell]) -> list[QA]:
    """The dominant cell as multiple choice and in words, a statement about it, and the slide's caption."""
    first = cells[0]
    dominant = Counter(cell.label for cell in cells).most_common(1)[0][0]
    options = tuple(dict.fromkeys([dominant, *WHITE_CELL_CLASSES]))[:4]
    asked = {
        "multiple_choice": ("Which white cell is the most frequent on this slide?", dominant, options),
        "fill_blank": ("What is the most frequent white cell?", dominant, ()),
        "open": ("Describe the white blood cell differential of this slide.", f"Mostly {dominant}.", ()),
        "true_false": (f"(True/False) {dominant} cells are the most frequent.", "True", ()),
    }
    return [
        QA(
            id=question_id(first.slide_id, kind),
            image_id=first.slide_id,
            level="slide",
            domain="id",
            split=first.split,
            task="cell_differential",
            question_type=kind,
            question=question,
            answer=answer,
            options=options,
            provenance={"facts": [f"dominant={dominant}"]},
        )
        for kind, (question, answer, options) in asked.items()
    ]
