"""`pbs data instruct|quality|review|stats|card`: writes captions and questions, judges them, counts them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.llm_options import add_llm_arguments

if TYPE_CHECKING:
    from data_prep.schema import QA

OK, FAILED, REJECTS = 0, 1, 3


def add_commands(commands: Any) -> None:
    """Adds the commands to the group `data`."""
    instruct = commands.add_parser("instruct", help="captions and questions by templates or a language model")
    instruct.add_argument("--root", type=Path, required=True, help="the --out of a cell or slide job")
    instruct.add_argument("--out", type=Path, required=True, help="another folder, for the new datasets")
    instruct.add_argument("--level", choices=("cell", "slide"), default="cell")
    instruct.add_argument("--parts", choices=("both", "captions", "questions"), default="both", help="what to write")
    instruct.add_argument(
        "--captions",
        type=Path,
        help="slides: the --out of instruct on their cells, which the summaries are written from",
    )
    instruct.add_argument("--limit", type=int, help="only so many images, chosen by hash")
    instruct.add_argument("--seed", type=int, default=0)
    instruct.add_argument("--bin-length", type=int, default=320, help="tokens of a packed row (default 320)")
    instruct.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json (default: that of --root)")
    instruct.add_argument(
        "--knowledge",
        type=float,
        default=2.0,
        help="template: background questions per cell (default 2: a tenth of all)",
    )
    instruct.add_argument("--model", help="name of the language model (openai, replay)")
    instruct.add_argument("--store", type=Path, help="folder of its answers (default: OUT/llm)")
    instruct.add_argument("--max-tokens", type=int, default=1500, help="of an answer (default 1500)")
    instruct.add_argument("--temperature", type=float, help="default: the service's")
    instruct.add_argument("--questions", type=int, help="asked for per image (default: 8 for cells, 6 for slides)")
    instruct.add_argument("--plain-json", action="store_true", help="for services without structured output")
    instruct.add_argument("--batch", action="store_true", help="send through the service's batch interface")
    instruct.add_argument("--dry-run", action="store_true", help="print what it would cost and send nothing")
    add_llm_arguments(instruct, ("template", "openai", "replay"))
    instruct.set_defaults(run=_instruct)

    quality = commands.add_parser("quality", help="run questions through the quality rules; balance released files")
    quality.add_argument("path", type=Path, help="a JSONL file, a folder of them, or the --out of a job")
    quality.add_argument("--root", type=Path, help="job whose cells and slides say what is recorded (default: PATH)")
    quality.add_argument("--rejects", type=Path, help="write the rejected questions with their reasons to this JSONL")
    quality.add_argument("--rebalance", type=Path, metavar="OUT", help="write balanced derivatives of JSONL files here")
    quality.add_argument("--seed", type=int, default=0)
    quality.set_defaults(run=_quality)

    review = commands.add_parser("review", help="write a review sheet, or read its verdicts")
    review.add_argument("--root", type=Path, help="the --out of a job: write a sheet from it")
    review.add_argument("--out", type=Path, help="folder for review.html and review.csv")
    review.add_argument("--pictures", type=Path, help="job that holds the cells or patches (default: --root)")
    review.add_argument("--kind", choices=("captions", "questions"), default="captions")
    review.add_argument("--count", type=int, default=200, help="things to judge (default 200, as in the paper)")
    review.add_argument("--seed", type=int, default=0)
    review.add_argument("--verdicts", type=Path, help="a filled review.csv: print how many were accepted")
    review.set_defaults(run=_review)

    stats = commands.add_parser("stats", help="Tables 1 and 4 of the paper for any question set")
    stats.add_argument("path", type=Path, help="a JSONL file, a folder of them, or the --out of a job")
    stats.add_argument("--format", choices=("text", "csv", "latex"), default="text")
    stats.add_argument("--out", type=Path, help="write to this file instead of printing")
    stats.set_defaults(run=_stats)

    card = commands.add_parser("card", help="a card with the limits, for a question set or a trained model")
    card.add_argument("path", type=Path, help="the --out of a data job, or the workdir of a finished phase")
    card.add_argument("--out", type=Path, help="default: PATH/CARD.md")
    card.set_defaults(run=_card)


def _instruct(args: argparse.Namespace) -> int:
    from data_prep import llm, providers, synthesis
    from data_prep.schema import DataError

    fields = synthesis.InstructJob.__dataclass_fields__
    job = synthesis.InstructJob(**{name: value for name, value in vars(args).items() if name in fields})
    if args.provider == "template":
        outcome = synthesis.run(job, providers.Template(args.seed, args.knowledge))
    else:
        if not args.model:
            raise DataError(f"--provider {args.provider} needs --model NAME")
        counts = {} if args.questions is None else {"cell_count": args.questions, "slide_count": args.questions}
        with llm.client_from_args(args, args.store or args.out / "llm", batch=args.batch) as client:
            writer = providers.Model(
                client,
                args.model,
                name=args.provider,
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                structured=not args.plain_json,
                seed=args.seed,
                **counts,
            )
            if args.dry_run:
                captions, questions = writer.estimate(synthesis.load_cases(job), {})
                print(f"captions: {captions}\nquestions: {questions}")
                return OK
            outcome = synthesis.run(job, writer)
            print(f"spent so far: {client.store.room()}")
    print("\n".join(outcome.lines))
    if outcome.unfinished:
        print(f"{outcome.unfinished} answers are still lacking: the same command goes on", file=sys.stderr)
    if outcome.gate:
        print(outcome.gate, file=sys.stderr)
        return FAILED
    return REJECTS if outcome.unfinished or outcome.rejected else OK


def questions_at(path: Path) -> list[QA]:
    """Questions of a JSONL file, a folder of them, or a job's folder. Raises DataError where there are none."""
    from data_prep import datasets, files
    from data_prep.schema import DataError

    if path.is_file():
        return files.read_jsonl(path)
    if stored := datasets.stored_questions(path):
        return stored
    found = sorted(path.glob("*.jsonl")) if path.is_dir() else []
    if not found:
        raise DataError(f"{path} holds neither questions in .jsonl files nor cell_qa or slide_qa")
    return [qa for file in found for qa in files.read_jsonl(file)]


def _quality(args: argparse.Namespace) -> int:
    from data_prep import claims, datasets, quality, released, slide_datasets
    from data_prep.files import atomic_write
    from data_prep.schema import DataError

    if args.rebalance:
        for line in released.write_rebalanced(args.path, args.rebalance, args.seed):
            print(line)
        return OK
    questions = questions_at(args.path)
    facts = released.released_facts(questions)
    root = args.root or args.path
    if (root / "cells").is_dir():
        facts |= {cell.cell_id: claims.cell_facts(cell) for cell in datasets.read_cells(root)}
    if (root / "slides").is_dir():
        facts |= {slide.slide_id: claims.slide_facts(slide) for slide in slide_datasets.read_slides(root)}
    elif args.root and not (root / "cells").is_dir():
        raise DataError(f"--root {root} holds neither cells nor slides: give the --out of a job")
    groups: dict[tuple[str, str, str], list[QA]] = {}
    for qa in questions:
        groups.setdefault((qa.level, qa.domain, qa.split), []).append(qa)
    screened = {name: quality.screen(group, facts) for name, group in groups.items()}
    names = ["/".join(name) for name in screened]
    print(_aligned([("", *names)] + [
        (title, *(str(part.counts()[rule]) for part in screened.values())) for rule, title in quality.TITLES.items()
    ] + [("kept", *(str(len(part.kept)) for part in screened.values())),
         ("in", *(str(len(groups[name])) for name in screened))]))  # fmt: skip
    if args.rejects:
        lines = [quality.reject_record(item) for part in screened.values() for item in part.rejected]
        atomic_write(args.rejects, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return REJECTS if any(part.rejected for part in screened.values()) else OK


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(v.rjust(w) for v, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def _review(args: argparse.Namespace) -> int:
    from data_prep import review
    from data_prep.schema import DataError

    if args.verdicts:
        found = review.acceptance(args.verdicts)
        rows = [("", "accepted", "rejected", "unsure", "share", "95 % interval")]
        rows += [
            (a.stratum, str(a.accepted), str(a.rejected), str(a.unsure), f"{a.share:.3f}", f"{a.low:.3f}-{a.high:.3f}")
            for a in found
        ]
        print(_aligned(rows))
        for id, reason in review.rejected_ids(args.verdicts).items():
            print(f"rejected {id}: {reason or 'no reason given'}")
        return OK
    if not args.root or not args.out:
        raise DataError("give --root and --out to write a sheet, or --verdicts to read one")
    chosen = review.write_sheet(args.root, args.out, args.kind, args.count, args.seed, args.pictures)
    strata = Counter(item.stratum for item in chosen)
    print(
        f"{len(chosen)} {args.kind} of {len(strata)} strata: {args.out / review.PAGE}, verdicts go into {review.SHEET}"
    )
    return OK


def _stats(args: argparse.Namespace) -> int:
    from data_prep import qa_stats
    from data_prep.files import atomic_write

    text = qa_stats.render(qa_stats.tables(questions_at(args.path)), args.format)
    if args.out:
        atomic_write(args.out, text)
    else:
        print(text, end="")
    return OK


def _card(args: argparse.Namespace) -> int:
    from data_prep import cards
    from data_prep.files import atomic_write
    from data_prep.schema import DataError

    if (args.path / "instruct.json").is_file():
        text = cards.data_card(args.path.resolve().name, json.loads((args.path / "instruct.json").read_text()))
    elif (args.path / "handover.json").is_file():
        text = cards.run_card(args.path)
    else:
        if not (summary := cards.job_summary(args.path)):
            raise DataError(
                f"{args.path} holds no dataset, instruct.json or handover.json: give a finished job's folder"
            )
        text = cards.data_card(args.path.resolve().name, summary)
    target = args.out or args.path / "CARD.md"
    atomic_write(target, text)
    print(f"written: {target}")
    return OK
