"""`pbs bench baselines | variant | validate | leaderboard`: parsers and the files each command writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_board_parsers(commands: Any, add_scoring: Callable[[argparse.ArgumentParser], None]) -> None:
    """Adds the commands; `add_scoring` gives a parser the options that all scoring commands share."""
    from pbs_jax.bench.records import PROTOCOLS

    registry = commands.add_parser("baselines", help="the 18 models of the paper's Tables 2 and 3, and how each is run")
    registry.add_argument("--json", action="store_true", help="print the registry as JSON")
    registry.set_defaults(run=_baselines)

    altered = commands.add_parser("variant", help='the questions that name a cell, with "this cell" in its place')
    altered.add_argument("data", type=Path, help="released JSONL, a folder of it, or a dataset")
    altered.add_argument("--split", default="test", help="split taken (default: test)")
    altered.add_argument("--out", type=Path, required=True, help="JSONL file for `pbs bench run --questions`")
    altered.set_defaults(run=_variant)

    checking = commands.add_parser("validate", help="whether a submission can be ranked: ids, orders, protocol, data")
    checking.add_argument("submission", type=Path, help="run folder (predictions.jsonl and run.json)")
    checking.add_argument("--data", type=Path, required=True, help="the questions it should answer")
    checking.add_argument("--split", help="split of --data (default: all)")
    checking.add_argument("--protocol", choices=PROTOCOLS, help="the option orders declared, where run.json has none")
    checking.add_argument("--out", type=Path, help="JSON file for the findings")
    checking.set_defaults(run=_validate)

    board = commands.add_parser("leaderboard", help="a page from validated submissions to one question set")
    board.add_argument("runs", type=Path, nargs="+", help="run folders; those of one name are seeds of one model")
    add_scoring(board)
    board.add_argument("--title", default="PBSBench leaderboard")
    board.set_defaults(run=_leaderboard)


def _baselines(args: argparse.Namespace) -> int:
    import datetime

    from pbs_jax.bench import baselines, tables

    entries = baselines.baselines()
    if args.json:
        print(json.dumps(baselines.to_json(entries), indent=1, ensure_ascii=False))
    else:
        print(tables.to_markdown(baselines.to_table(entries, datetime.date.today())))
    return 0


def _variant(args: argparse.Namespace) -> int:
    from pbs_jax.bench import variant
    from pbs_jax.bench.records import load_questions

    questions = load_questions(args.data, args.split).items
    count = variant.write(questions, args.out)
    print(f"{args.out}: {count:,} of {len(questions):,} questions name a cell and stand here without the name")
    return 0


def _validate(args: argparse.Namespace) -> int:
    from data_prep.files import atomic_write
    from pbs_jax.bench.records import load_questions
    from pbs_jax.bench.validate import validate

    found = validate(args.submission, load_questions(args.data, args.split), args.protocol)
    for kind, lines in (("problem", found.problems), ("warning", found.warnings)):
        for line in lines:
            print(f"{kind}: {line}")
    print(f"{args.submission}: {'valid' if found.valid else 'NOT valid'}, sha256 {found.facts['sha256'][:12]}")
    if args.out:
        atomic_write(args.out, json.dumps(found.to_json(), indent=1, ensure_ascii=False) + "\n")
    return 0 if found.valid else 1


def _leaderboard(args: argparse.Namespace) -> int:
    from data_prep.schema import DataError
    from pbs_jax.bench import leaderboard
    from pbs_jax.bench.cli import settings_of, train_of
    from pbs_jax.bench.records import load_questions

    if args.data is None:
        raise DataError("--data is needed: submissions are checked against the questions they should answer")
    out = args.out or args.runs[0].parent
    questions = load_questions(args.data, args.split)
    found = leaderboard.write(out, args.runs, questions, settings_of(args), train=train_of(args), title=args.title)
    refused = [item for item in found if not item.valid]
    for item in refused:
        print(f"refused: {item.path} ({len(item.problems)} problems; the first: {item.problems[0]})")
    print(f"written: {out}/leaderboard.html, leaderboard.md, leaderboard.json, leaderboard.csv")
    return 3 if refused else 0
