"""Writes `slide_qa` and `slide_qa_tokens` of a slide job's folder (`pbs data qa`).

With --truth (a mosaic's folder) the questions are about what was pasted; slides without a truth file are asked about
what the pipeline counted, and their provenance says "model".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep import derived, io
from data_prep.files import atomic_write, sha256_file
from data_prep.schema import WHITE_CELL_CLASSES, DataError
from data_prep.slide_datasets import Slide, read_slides
from data_prep.slide_qa import slide_questions
from data_prep.slide_qa_bank import FEWEST_CELLS, SlideCells
from data_prep.sources import Reject

REJECTS = "slide_qa_rejects.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`lines`: the summary for the user. `rejects`: slides and questions that were left out."""

    content_ids: dict[str, str]
    rejects: Sequence[Reject]
    lines: Sequence[str]


def slide_cells(slide: Slide, truth: Path | None) -> SlideCells:
    """What is known of the slide's white cells, from truth/<slide_id>.json if it is there, else from the pipeline.

    Raises DataError for a truth file that is not one.
    """
    path = truth / "truth" / f"{slide.slide_id}.json" if truth else None
    if path is None or not path.is_file():
        counts = {name: slide.counts.get(name, 0) for name in WHITE_CELL_CLASSES}
        return SlideCells(slide.slide_id, slide.split, counts, "model", slide.pattern, diagnosis=slide.diagnosis)
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        counts = {str(name): int(count) for name, count in record["counts"].items()}
        attributes = [dict(cell["attributes"]) for cell in record["cells"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no truth file ({error!r}): write the mosaic again") from error
    return SlideCells(
        slide.slide_id, slide.split, counts, "truth", slide.pattern, attributes, diagnosis=slide.diagnosis
    )


def write_slide_questions(
    out: Path,
    tokenizer: Path,
    *,
    truth: Path | None = None,
    bin_length: int = 320,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Writes OUT/{slide_qa, slide_qa_tokens, tokenizer} from OUT/slides.

    Raises DataError when no slide can be asked about, or when the text alone answers too much.
    """
    slides = sorted(read_slides(out), key=lambda slide: slide.slide_id)
    manifest = io.read_manifest(out / "slides")
    known = [slide_cells(slide, truth) for slide in slides if slide.tiles_kept]
    rejects = [
        Reject(slide.slide_id, "no usable tiles", f"slide {slide.slide_id} has no usable tile: nothing to ask about")
        for slide in slides
        if not slide.tiles_kept
    ]
    rejects += [
        Reject(
            s.slide_id, "few white cells", f"slide {s.slide_id} has {s.total} white cells, fewer than {FEWEST_CELLS}"
        )
        for s in known
        if s.total < FEWEST_CELLS
    ]
    questions = slide_questions(known, seed=seed)
    if not questions:
        raise DataError(f"{out / 'slides'} has no slide with at least {FEWEST_CELLS} white cells: nothing to ask about")
    derived.run_probe(questions, say)
    inputs = {"slides": manifest["content_id"]} | _truth_input(known, truth)
    level = manifest["split"]["level"]
    loaded = derived.make_tokenizer(out, tokenizer, (), ())
    ids = {"slide_qa": derived.write_questions(out, questions, {"seed": seed}, inputs, level, "slide_qa")}
    ids["slide_qa_tokens"], too_long = derived.write_tokens(
        out,
        questions,
        loaded,
        bin_length=bin_length,
        seed=seed,
        qa_id=ids["slide_qa"],
        level=level,
        name="slide_qa",
    )
    rejects += too_long
    atomic_write(out / REJECTS, "".join(json.dumps(dataclasses.asdict(reject)) + "\n" for reject in rejects))
    sources = Counter(s.source for s in known)
    counts = Counter((qa.split, qa.question_type) for qa in questions)
    lines = [f"{split} {kind}: {count}" for (split, kind), count in sorted(counts.items())]
    lines += [f"slides: {sources['truth']} with known truth, {sources['model']} as the pipeline counted them"]
    lines += [f"{name}: {content_id[:16]}" for name, content_id in ids.items()]
    return Outcome(ids, rejects, lines)


def _truth_input(known: Sequence[SlideCells], truth: Path | None) -> dict[str, str]:
    """The truth files that were used, as one sha256."""
    names = [slide.slide_id for slide in known if slide.source == "truth"]
    if truth is None or not names:
        return {}
    hashes = "".join(f"{name}\t{sha256_file(truth / 'truth' / f'{name}.json')}\n" for name in names)
    return {"truth": hashlib.sha256(hashes.encode()).hexdigest()}
