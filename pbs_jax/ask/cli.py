"""`pbs ask IMAGE_OR_SLIDE "question" …`: answers about one picture from finished checkpoints, or the reason why there are none."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "ask",
        help="ask about a cell, a field or a slide",
        description="A single-cell picture goes to a phase-3 checkpoint. On a field or slide the white cells are found after "
        "quality control; a phase-4 checkpoint then answers about a slide, a phase 3 about each cell. Pictures that cannot be "
        "judged are refused with the reason (exit code 1). Nothing leaves this machine.",
        epilog='A question beginning with "(True/False)" is true/false, with --options multiple choice, beginning with Describe '
        "open, else fill in the blank. For research and education only.",
    )
    parser.add_argument("image", type=Path, metavar="IMAGE_OR_SLIDE")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")
    add_checkpoints(parser)
    parser.add_argument("--options", default="", metavar="A|B|…", help="of the questions: makes them multiple choice")
    parser.add_argument(
        "--type", default="auto", choices=("auto", "true_false", "multiple_choice", "fill_blank", "open")
    )
    parser.add_argument("--as", dest="kind", default="auto", choices=("auto", "crop", "field", "slide"))
    parser.add_argument("--mpp", type=float, default=0.0, help="um per pixel, where the file does not say")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--report", type=Path, metavar="PAGE.html", help="differential, cells, evidence and answers")
    parser.add_argument("--evidence", type=Path, metavar="FILE.jpg", help="overlay of what the model looked at")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keeps a slide's datasets for the next question")
    parser.add_argument("--temperature", type=float, default=0.0, help="above 0 samples")
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--penalty", type=float, default=1.0, help="repetition penalty; the official code's is 1.05")
    parser.add_argument("--stop", action="append", default=[], metavar="TOKEN", help="ends an answer (repeatable)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.set_defaults(run=run)


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """The option that says which models answer."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        action="append",
        required=True,
        metavar="WORKDIR",
        help="a finished phase 3 or 4; repeat it for both, and for the phases 2 and 0a that a phase 4 needs",
    )
    parser.add_argument(
        "--int8",
        action="store_const",
        const=True,
        help="language model with int8 kernels, half the memory (default: as the phase was trained)",
    )


def run(args: argparse.Namespace) -> int:
    # Imported here: `pbs --help` must not wait for jax.
    from data_prep.picture import open_picture
    from pbs_jax.ask import page
    from pbs_jax.ask.picture import as_question, ask, load_models, looked_at, ready
    from pbs_jax.compile_cache import use_compile_cache
    from pbs_jax.decode.sampling import Sampling

    use_compile_cache()
    sampling = Sampling(args.penalty, args.temperature, args.top_k, args.top_p, args.seed)
    options = tuple(part.strip() for part in args.options.split("|")) if args.options else ()
    questions = [as_question(text, options, args.type) for text in args.questions]
    models = load_models(args.checkpoint, args.int8)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with _work(args.work) as work:
        picture = open_picture(
            args.image.resolve(), models.prepare, kind=args.kind, mpp=args.mpp, work=work, backbone=models.backbone,
            classify=models.classify, name=args.image.name,
        )  # fmt: skip
        for text in (models.remark, *picture.remarks):
            if text:
                say(f"note: {text}")
        prepared = ready(picture, models)
        answers = []
        for qa in questions:
            if args.json:
                answers.append(ask(prepared, qa, sampling, tuple(args.stop)))
                continue
            print(f"{qa.question}\n  ", end="", flush=True)
            tell = Printer()
            answers.append(ask(prepared, qa, sampling, tuple(args.stop), tell))
            tell(f"{answers[-1].sentence}\n")
            if answers[-1].remark:
                say(f"note: {answers[-1].remark}")
        seen = looked_at(prepared) if args.report or args.evidence or args.json else None
        if args.evidence and seen:
            args.evidence.write_bytes(seen.overlay)
        if args.report:
            page.write_page(args.report, picture, answers, models, seen)
            say(f"report: {args.report}")
        if args.json:
            print(json.dumps(as_json(picture, answers, models, seen), ensure_ascii=False))
        elif picture.kind != "crop":
            say(page.impression(picture))
    return 0


class Printer:
    """Prints a text that grows: each call what is new."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, text: str) -> None:
        print(text[self._printed :], end="", flush=True)
        self._printed = len(text)


def as_json(picture: Any, answers: Any, models: Any, seen: Any) -> dict[str, Any]:
    """What --json prints and `pbs serve` sends: picture, cells, differential, answers, evidence (places, not pixels)."""
    sentence, shares = picture.differential()
    return {
        "image": picture.name,
        "kind": picture.kind,
        "size": list(picture.size),
        "mpp": picture.mpp or None,
        "mpp_source": picture.mpp_source,
        "tiles": {"in": picture.tiles[0], "kept": picture.tiles[1]},
        "cells": [
            {
                "id": cell.cell_id,
                "box": [cell.bbox.left, cell.bbox.top, cell.bbox.right, cell.bbox.bottom],
                "label": cell.label,
                "confidence": round(cell.confidence, 4),
            }
            for cell in picture.cells
        ],
        "counts": picture.counts(),
        "differential": sentence,
        "shares": [dataclasses.asdict(share) for share in shares],
        "remarks": [text for text in (models.remark, *picture.remarks) if text],
        "answers": [
            {
                "question": answer.question,
                "type": answer.question_type,
                "options": list(answer.options),
                "answer": answer.text,
                "sentence": answer.sentence,
                "votes": answer.votes,
                "cells": answer.cells,
                "remark": answer.remark,
            }
            for answer in answers
        ],
        "evidence": seen and {"caption": seen.caption, "top": [list(place) for place in seen.top]},
        "checkpoint": models.name,
    }


@contextlib.contextmanager
def _work(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="pbs-ask-") as folder:
        yield Path(folder)
