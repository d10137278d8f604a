"""`pbs data ...`: makes, checks and shows datasets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from data_prep import cli_instruct, cli_release, cli_slides

OK, FAILED, REJECTS = 0, 1, 3


def add_parser(subparsers: Any) -> None:
    """Adds the group `data` with its commands."""
    group = subparsers.add_parser("data", help="make, check and show datasets", description=__doc__)
    commands = group.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="cells -> cells, cell_qa, cell_qa_tokens, tokenizer; slides -> slides, patches, cells"
    )
    run.add_argument("--source", required=True, choices=("pbc", "bccd", "lmu", "apl", "lisc", "synthetic", "slides"))
    run.add_argument("--root", type=Path, help="folder that holds the source's data or slides (not for synthetic)")
    run.add_argument("--out", required=True, type=Path, help="folder for the datasets")
    cli_release.add_executor_arguments(run)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--bin-length", type=int, default=320, help="tokens of a packed row (default 320)")
    run.add_argument("--limit", type=int, help="only so many cells, chosen by hash")
    run.add_argument("--n-per-class", type=int, default=200, help="synthetic cells of each class (default 200)")
    run.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json to use instead of training one")
    slides = run.add_argument_group("slides")
    slides.add_argument("--table", type=Path, help="CSV of the slides; without it, all slide files below --root")
    slides.add_argument(
        "--backbone",
        type=Path,
        help="workdir of a finished phase 0a, or of a `classifier` of target subtype: names the cells",
    )
    slides.add_argument(
        "--white-cells",
        type=Path,
        metavar="CLASSIFIER",
        help="workdir of a finished `classifier` of target white_cell: what it calls no white cell is an Artifact",
    )
    slides.add_argument(
        "--qc-source",
        type=Path,
        help="judge tiles as Haemorasis does: --out of `pbs weights import qc`, or a folder of its _quality_control files",
    )
    slides.add_argument(
        "--cellpose-weights",
        type=Path,
        metavar="FILE",
        help="find cells by Cellpose-SAM with these weights (extra: cellpose; GPU advised), else classically",
    )
    slides.add_argument("--qc-threshold", dest="threshold", type=float, default=0.5, help="of a tile (default 0.5)")
    slides.add_argument(
        "--min-confidence", type=float, default=0.0, help="below it a cell is called Others (default 0)"
    )
    slides.add_argument(
        "--match-stain",
        action="store_true",
        help="name cells with each slide's stain made that of the classifier's cells",
    )
    slides.add_argument("--grid-offset", type=int, default=0, help="px by which the tile grid is shifted (default 0)")
    run.set_defaults(run=_run)

    features = commands.add_parser("features", help="frozen features of cells, patches or slides (needs jax)")
    features.add_argument("--root", type=Path, required=True, help="folder of the cells and patches datasets")
    features.add_argument("--backbone", type=Path, required=True, help="workdir of a finished phase 0a")
    features.add_argument(
        "--kind",
        choices=("cell", "patch", "slide", "backbone"),
        default="cell",
        help="backbone tokens of cells (default) or patches; slides by phase 2, or by the raw backbone alone",
    )
    features.add_argument("--alignment", type=Path, help="workdir of a finished phase 2 (for --kind slide)")
    features.add_argument("--out", type=Path, help="folder for the features dataset (default: --root)")
    features.set_defaults(run=_features)

    verify = commands.add_parser("verify", help="recount and rehash datasets, and look for leaks between splits")
    verify.add_argument("directory", type=Path, help="the --out of a run, or one dataset")
    verify.set_defaults(run=_verify)

    inspect = commands.add_parser("inspect", help="show a slide, patch, cell or question with the chain it belongs to")
    inspect.add_argument("directory", type=Path, help="the --out of a run")
    inspect.add_argument("id", help="e.g. PBC:Basophil/BA_101611, or a slide, patch or question id")
    inspect.add_argument("--image", type=Path, help="write its picture to this file")
    inspect.set_defaults(run=_inspect)

    mosaic = commands.add_parser("mosaic", help="small slides of real white cells on real red-cell fields, with truth")
    mosaic.add_argument("--cells", required=True, type=Path, help="folder that holds the PBC data set")
    mosaic.add_argument("--out", required=True, type=Path)
    mosaic.add_argument("--fields", type=Path, help="folder of red-cell pictures (default: below --cells)")
    mosaic.add_argument("--slides", type=int, default=200, help="in all (default 200)")
    mosaic.add_argument("--held-out", type=int, default=60, help="of these, test slides (default 60)")
    mosaic.add_argument("--side", type=int, default=1536, help="px of a slide (default 1536)")
    mosaic.add_argument("--seed", type=int, default=0)
    mosaic.add_argument(
        "--workers", type=int, default=1, help="processes (default 1); the result does not depend on it"
    )
    mosaic.set_defaults(run=_mosaic)

    qa = commands.add_parser("qa", help="template questions about the slides of a slide job: slide_qa, slide_qa_tokens")
    qa.add_argument("out", type=Path, help="the --out of a slide job")
    qa.add_argument(
        "--tokenizer", required=True, type=Path, help="tokenizer of the cell job, so that one model serves both"
    )
    qa.add_argument(
        "--truth", type=Path, help="folder of the mosaics: what was pasted (default: the pipeline's counts)"
    )
    qa.add_argument("--bin-length", type=int, default=320, help="tokens of a packed row (default 320)")
    qa.add_argument("--seed", type=int, default=0)
    qa.set_defaults(run=_qa)

    synth = commands.add_parser(
        "synth", help="write synthetic cells laid out like PBC, or smears laid out like mosaics"
    )
    synth.add_argument("--kind", choices=("cells", "smear"), default="cells")
    synth.add_argument("--out", required=True, type=Path)
    synth.add_argument("--n-per-class", type=int, default=200, help="cells: of each class (default 200)")
    synth.add_argument("--n", type=int, default=20, help="smears (default 20)")
    synth.add_argument("--size", default="3072x1536", help="smears: pixels, WIDTHxHEIGHT (default 3072x1536)")
    synth.add_argument("--cells", type=int, default=60, help="smears: white cells in each, where they find room")
    synth.add_argument("--workers", type=int, default=1)
    synth.add_argument("--seed", type=int, default=0)
    synth.set_defaults(run=_synth)

    cli_instruct.add_commands(commands)

    cli_slides.add_commands(commands)

    cli_release.add_commands(commands)


def _run(args: argparse.Namespace) -> int:
    from data_prep import pipeline, slide_pipeline

    def asked[J](job: type[J]) -> J:
        names = job.__dataclass_fields__  # type: ignore[attr-defined]
        return job(**{name: value for name, value in vars(args).items() if name in names})

    slides = args.source == "slides"
    outcome = slide_pipeline.run(asked(slide_pipeline.SlideJob)) if slides else pipeline.run(asked(pipeline.CellJob))
    print("\n".join(outcome.lines))
    if outcome.rejected:
        print(f"finished with {sum(outcome.rejected.values())} rejects: {args.out / 'rejects.jsonl'}")
        return REJECTS
    return OK


def _features(args: argparse.Namespace) -> int:
    from data_prep.schema import DataError
    from pbs_jax.data import features, slide_features

    out = args.out or args.root
    if (args.alignment is not None) != (args.kind == "slide"):
        raise DataError("--kind slide, and no other, takes --alignment: the workdir of a finished phase 2")
    match args.kind:
        case "cell":
            name, content_id = "cell_features", features.write_features(args.root, args.backbone, out)
        case "patch":
            name, content_id = "patch_features", slide_features.write_patch_features(args.root, args.backbone, out)
        case _:
            name = "slide_features"
            encoder = slide_features.SlideEncoder(args.backbone, args.alignment)
            content_id = slide_features.write_slide_features(args.root, encoder, out)
    print(f"{name}: {content_id[:16]}")
    return OK


def _verify(args: argparse.Namespace) -> int:
    from data_prep import io, split

    found = sorted(path.parent for path in args.directory.glob(f"*/{io.VERSION}")) or [args.directory]
    problems, whole = [], {}
    for dataset in found:
        here = io.verify(dataset)
        problems += here
        if not here:
            manifest = whole[dataset.name] = io.read_manifest(dataset)
            print(
                f"{manifest['dataset']}: whole, {manifest['identity']['kept']} records, {manifest['content_id'][:16]}"
            )
    problems = problems or io.job_problems(args.directory, whole)
    if not problems and (args.directory / "cells").is_dir():
        problems += split.leaks(args.directory)
    for problem in problems:
        print(problem, file=sys.stderr)
    return FAILED if problems else OK


def _inspect(args: argparse.Namespace) -> int:
    from data_prep.files import atomic_write
    from data_prep.inspect_record import describe

    lines, image = describe(args.directory, args.id)
    print("\n".join(lines))
    if args.image and image:
        atomic_write(args.image, image)
    return OK


def _synth(args: argparse.Namespace) -> int:
    from data_prep import smear
    from data_prep.schema import DataError
    from data_prep.sources import synthetic

    if args.kind == "cells":
        print(f"{synthetic.write_folders(args.out, args.n_per_class, args.seed)} pictures under {args.out}")
        return OK
    width, x, height = args.size.partition("x")
    if not (x and width.isdigit() and height.isdigit()):
        raise DataError(f'--size "{args.size}" is not WIDTHxHEIGHT, e.g. 3072x1536')
    size = {"width": int(width), "height": int(height)}
    placed = smear.write_smears(args.out, args.n, args.seed, cells=args.cells, workers=args.workers, **size)
    print(f"{args.n} smears with {placed} white cells and {args.out / 'slides.csv'}")
    return OK


def _mosaic(args: argparse.Namespace) -> int:
    from data_prep.mosaic import MosaicJob, run

    run(MosaicJob(**{name: value for name, value in vars(args).items() if name in MosaicJob.__dataclass_fields__}))
    return OK


def _qa(args: argparse.Namespace) -> int:
    from data_prep.slide_derived import write_slide_questions

    outcome = write_slide_questions(
        args.out, args.tokenizer, truth=args.truth, bin_length=args.bin_length, seed=args.seed
    )
    print("\n".join(outcome.lines))
    for reject in outcome.rejects:
        print(f"reject: {reject.detail}")
    return REJECTS if outcome.rejects else OK
