"""`pbs data ...`: makes, checks and shows datasets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

OK, FAILED, REJECTS = 0, 1, 3


def add_parser(subparsers: Any) -> None:
    """Adds the group `data` with its commands."""
    group = subparsers.add_parser("data", help="make, check and show datasets", description=__doc__)
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="labelled cells -> cells, cell_qa, cell_qa_tokens and a tokenizer")
    run.add_argument("--source", required=True, choices=("pbc", "bccd", "synthetic"))
    run.add_argument("--root", type=Path, help="folder that holds the source's data (not for synthetic)")
    run.add_argument("--out", required=True, type=Path, help="folder for the datasets")
    run.add_argument("--workers", type=int, default=1, help="processes (default 1); the result does not depend on it")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--bin-length", type=int, default=320, help="tokens of a packed row (default 320)")
    run.add_argument("--limit", type=int, help="only so many cells, chosen by hash")
    run.add_argument("--n-per-class", type=int, default=200, help="synthetic cells of each class (default 200)")
    run.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json to use instead of training one")
    run.set_defaults(run=_run)

    features = commands.add_parser("features", help="backbone tokens of every cell, computed once (needs jax)")
    features.add_argument("--root", type=Path, required=True, help="folder of the cells dataset")
    features.add_argument("--backbone", type=Path, required=True, help="workdir of a finished phase 0a")
    features.add_argument("--out", type=Path, help="folder for cell_features (default: --root)")
    features.set_defaults(run=_features)

    verify = commands.add_parser("verify", help="recount and rehash datasets, and look for leaks between splits")
    verify.add_argument("directory", type=Path, help="the --out of a run, or one dataset")
    verify.set_defaults(run=_verify)

    inspect = commands.add_parser("inspect", help="show one cell with its caption and questions")
    inspect.add_argument("directory", type=Path, help="the --out of a run")
    inspect.add_argument("id", help="cell id, e.g. PBC:Basophil/BA_101611")
    inspect.add_argument("--image", type=Path, help="write the crop to this file")
    inspect.set_defaults(run=_inspect)

    synth = commands.add_parser("synth", help="write synthetic cells as class folders, laid out like PBC")
    synth.add_argument("--out", required=True, type=Path)
    synth.add_argument("--n-per-class", type=int, default=200)
    synth.add_argument("--seed", type=int, default=0)
    synth.set_defaults(run=_synth)


def _run(args: argparse.Namespace) -> int:
    from data_prep.pipeline import CellJob, run

    options = {name: value for name, value in vars(args).items() if name in CellJob.__dataclass_fields__}
    outcome = run(CellJob(**options))
    print("\n".join(outcome.lines))
    if outcome.rejected:
        print(f"finished with {sum(outcome.rejected.values())} rejects: {args.out / 'rejects.jsonl'}")
        return REJECTS
    return OK


def _features(args: argparse.Namespace) -> int:
    from pbs_jax.data.features import write_features

    content_id = write_features(args.root, args.backbone, args.out or args.root)
    print(f"cell_features: {content_id[:16]}")
    return OK


def _verify(args: argparse.Namespace) -> int:
    from data_prep import io, split

    found = sorted(path.parent for path in args.directory.glob(f"*/{io.VERSION}")) or [args.directory]
    problems = []
    for dataset in found:
        here = io.verify(dataset)
        problems += here
        if not here:
            manifest = io.read_manifest(dataset)
            print(
                f"{manifest['dataset']}: whole, {manifest['identity']['kept']} records, {manifest['content_id'][:16]}"
            )
    if not problems and (args.directory / "cells").is_dir():
        problems += split.leaks(args.directory)
    for problem in problems:
        print(problem, file=sys.stderr)
    return FAILED if problems else OK


def _inspect(args: argparse.Namespace) -> int:
    from data_prep.datasets import read_questions
    from data_prep.files import atomic_write
    from data_prep.io import open_dataset, read_manifest
    from data_prep.schema import DataError, shown_options

    for split in read_manifest(args.directory / "cells")["splits"]:
        source = open_dataset(args.directory / "cells", split)
        if args.id in source.ids:
            break
    else:
        raise DataError(f'{args.directory / "cells"} has no cell "{args.id}"')
    record = source[source.position(args.id)]
    image = record.pop("image")
    for name, value in record.items():
        print(f"{name}: {value}")
    for qa in read_questions(args.directory, split):
        if qa.image_id == args.id:
            options = f" [{' | '.join(shown_options(qa))}]" if qa.options else ""
            print(f"{qa.question_type}: {qa.question}{options} -> {qa.answer}")
    if args.image:
        atomic_write(args.image, image)
    return OK


def _synth(args: argparse.Namespace) -> int:
    from data_prep.sources import synthetic

    print(f"{synthetic.write_folders(args.out, args.n_per_class, args.seed)} pictures under {args.out}")
    return OK
