"""`pbs data plan|doctor|report|evaluate`: what a slide job will cost, whether all is fit for it, what it made, and
how good the cell finder is on annotated fields."""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path
from typing import Any

OK, FAILED, REJECTS = 0, 1, 3


def add_commands(commands: Any) -> None:
    """Adds the commands to the group `data`."""
    plan = commands.add_parser("plan", help="what a slide job will cost, from a few tiles done and timed")
    plan.add_argument("--root", type=Path, required=True, help="folder of the slides")
    plan.add_argument("--table", type=Path, help="CSV of the slides; without it, all slide files below --root")
    plan.add_argument("--qc-threshold", dest="threshold", type=float, default=0.5, help="of a tile (default 0.5)")
    plan.add_argument("--backbone", type=Path, help="of the job: names the cells")
    plan.add_argument("--qc-source", type=Path, help="of the job: judges the tiles")
    plan.add_argument("--cellpose-weights", type=Path, metavar="FILE", help="of the job: finds the cells")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="check the installation, a folder of slides, or datasets")
    doctor.add_argument("--root", type=Path, help="folder of slides: open each, to its last tile")
    doctor.add_argument("--table", type=Path, help="CSV of the slides below --root")
    doctor.add_argument("--out", type=Path, help="the --out of a run: whole, decodable, without leaks?")
    doctor.set_defaults(run=_doctor)

    report = commands.add_parser("report", help="one HTML page on a slide job: QC maps, kept tiles, differential")
    report.add_argument("directory", type=Path, help="the --out of `pbs data run --source slides`")
    report.add_argument("--root", type=Path, required=True, help="folder of the slides, for thumbnails and examples")
    report.add_argument("--out", type=Path, help="HTML file (default: slides.html in the directory)")
    report.set_defaults(run=_report)

    evaluate = commands.add_parser("evaluate", help="score the cell finder, a classifier, differentials")
    evaluate.add_argument(
        "--task",
        required=True,
        choices=("white_cells", "red_cells", "nuclei", "subtype", "white_cell", "differential"),
        help="white_cells: the finder; white_cell: the classifier that tells them from what is none",
    )
    evaluate.add_argument(
        "--root",
        type=Path,
        required=True,
        help="folder that holds fields/ and masks/; subtype: a cell job; white_cell: that or BCCD's root; differential: a slide job",
    )
    evaluate.add_argument("--truth", type=Path, help="differential: the folder of `pbs data mosaic` that the job read")
    evaluate.add_argument(
        "--backbone",
        type=Path,
        help="subtype, white_cell: workdir of the finished phase 0a (subtype only) or `classifier` that is scored",
    )
    evaluate.add_argument(
        "--match-stain",
        action="store_true",
        help="subtype, white_cell: with the cells' stain made that of the classifier's own",
    )
    evaluate.add_argument(
        "--show", type=Path, metavar="PNG", help="white_cells: the test fields where something is wrong"
    )
    evaluate.set_defaults(run=_evaluate)


def _plan(args: argparse.Namespace) -> int:
    from data_prep.slide_plan import make_plan

    options = {name: getattr(args, name) for name in ("backbone", "qc_source", "cellpose_weights")}
    plan = make_plan(args.root, args.table, args.threshold, **options)
    print("\n".join(plan.lines()))
    return REJECTS if plan.rejects else OK


def _doctor(args: argparse.Namespace) -> int:
    from data_prep import doctor

    parts = [doctor.installation()]
    parts += [doctor.slides(args.root, args.table)] if args.root else []
    parts += [doctor.dataset(args.out)] if args.out else []
    bad = 0
    for finding in chain(*parts):
        print(f"{'BAD ' if finding.bad else 'ok  '}{finding.text}")
        bad += finding.bad
    print(f"{bad} to repair" if bad else "nothing to repair")
    return FAILED if bad else OK


def _report(args: argparse.Namespace) -> int:
    from data_prep.slide_report import write_report

    print(write_report(args.directory, args.root, args.out or args.directory / "slides.html"))
    return OK


def _evaluate(args: argparse.Namespace) -> int:
    from data_prep.evaluate import TASKS, Options

    print("\n".join(TASKS[args.task](args.root, Options(args.truth, args.backbone, args.show, args.match_stain))))
    return OK
