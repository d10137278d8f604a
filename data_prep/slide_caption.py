"""Captions of slides: the differential to the nearest ten, and the pattern's letter where there is one.

Like a cell's, a slide's caption fits 30 tokens of the nano tokenizer, so that it can stand in the language model's
32-token visual slot in phase 0b; it holds what every question about the differential asks.
"""

from __future__ import annotations

from data_prep.schema import WHITE_CELL_CLASSES, DataError, stable_hash
from data_prep.slide_qa_bank import FEWEST_CELLS, SlideCells, tens

VARIANTS = 2  # classes by share, classes in the schema's order


def slide_caption(slide: SlideCells, variant: int | None = None) -> str:
    """One line such as "B: Lymphocyte 50, Neutrophil 20, Monocyte 10, Eosinophil 10, Basophil 10."; the order follows
    from the slide's id unless `variant` (0: by share, 1: the schema's) is given.

    Raises DataError for a slide with too few white cells to have a differential.
    """
    if slide.total < FEWEST_CELLS:
        raise DataError(f"slide {slide.slide_id} has {slide.total} white cells; a differential needs {FEWEST_CELLS}")
    chosen = stable_hash("slide caption", slide.slide_id) % VARIANTS if variant is None else variant
    names = WHITE_CELL_CLASSES if chosen else sorted(WHITE_CELL_CLASSES, key=lambda name: -slide.share(name))
    text = ", ".join(f"{name} {tens(slide.share(name))}" for name in names)
    return f"{slide.pattern}: {text}." if slide.pattern else f"{text}."
