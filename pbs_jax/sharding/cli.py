"""`pbs compile --config=NAME:size=7b --topology=v5e:2x4`: does a step fit a TPU slice, what does it hold, how fast can it be?

Compiles with the real TPU compiler (libtpu) on this CPU; no TPU is needed and nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from data_prep.schema import DataError
from pbs_jax.config import add_config_flags, from_args

STEPS = ("train", "decode", "features")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compile",
        help="compile a step for TPU slices: fits? memory, FLOPs, roofline",
        description="Compiles the step that `pbs train` would run (or decoding, or backbone features) for TPU slices with the "
        "real TPU compiler on this CPU: memory a chip by part, FLOPs, collectives, and the roofline, a lower bound on the "
        'step\'s time. Minutes of CPU a slice. Needs the extra: pip install "pbs-jax[aot]".',
    )
    add_config_flags(parser)
    parser.add_argument(
        "--topology",
        default="v5e:2x4",
        metavar="KIND:AxB[,...]",
        help="slices, e.g. v5e:2x4,v5p:2x2x1 (default v5e:2x4)",
    )
    parser.add_argument(
        "--smallest", action="store_true", help="try the slices from the smallest up, stop at the first that fits"
    )
    parser.add_argument(
        "--remat", action="store_true", help="training: find the least recomputation that fits (--config.remat)"
    )
    parser.add_argument("--step", choices=STEPS, default="train", help="what to compile (default: train)")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="training: chips that share a layer (1; at most 4 at 7b)"
    )
    parser.add_argument(
        "--row",
        metavar="IMAGES,LENGTH,ANSWERS,QUESTIONS",
        help="shape of a row of questions (default: three images of the released ones, whatever config.images_per_row is)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every cell as one JSON line")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print what --json appended as one table, compile nothing"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from pbs_jax.sharding.topology import SLICES
    from pbs_jax.train.check import REMATS

    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return 0
    config = from_args(args.config_args)
    slices = SLICES if args.smallest else args.topology.split(",")
    fitting = []
    for topology in slices:
        for how in REMATS if args.remat else (config.remat,):
            config.remat = how
            print(f"compiling {args.step} for {topology}: minutes at 7b", file=sys.stderr, flush=True)
            cell = _compile(config, args, topology)
            print(describe(cell), flush=True)
            if args.json:
                more = {"bound_s": cell.bound_s, "mfu": cell.mfu, "int8": config.int8, "remat": config.remat}
                with args.json.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(cell) | more) + "\n")
            if cell.fits:
                break
        if cell.fits:
            fitting.append(topology)
            if args.remat:
                print(f"least recomputation that fits {topology}: --config.remat={config.remat}")
            if args.smallest:
                print(f"smallest slice that fits: {topology}")
                break
    return 0 if fitting else 1


def _compile(config: Any, args: argparse.Namespace, topology: str) -> Any:
    from pbs_jax.sharding import aot
    from pbs_jax.train.abstract import ROWS, Row

    row = ROWS.get(config.phase)
    if args.row:
        try:
            images, length, answers, questions = args.row.split(",")
            row = Row(int(images), int(length), int(answers), float(questions))
        except ValueError as error:
            raise DataError(f"--row={args.row} is not IMAGES,LENGTH,ANSWERS,QUESTIONS, e.g. 3,1536,256,18") from error
    match args.step:
        case "train":
            return aot.compile_train(config, topology, row, args.tensor)
        case "decode":
            return aot.compile_decode(config, topology, row or ROWS["cell_qa"])
        case _:
            return aot.compile_features(config, topology)


def describe(cell: Any) -> str:
    """A cell as a few lines of text."""
    from pbs_jax.sharding.aot import feature_hours
    from pbs_jax.sharding.topology import GIB, chip_of

    chip = chip_of(cell.topology)
    verdict = "fits" if cell.fits else "does NOT fit"
    lines = [
        f"{cell.name} {cell.step} on {cell.topology} ({cell.chips} chips), batch {cell.batch}: {verdict}, "
        f"{cell.needed / GIB:.2f} of {chip.usable / GIB:.2f} GiB a chip (compiled in {cell.compile_s:.0f} s)",
        "  memory a chip, GiB: " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in cell.parts.items()),
    ]
    if cell.message:
        return "\n".join([*lines, f"  {cell.message}"])
    moved = ", ".join(f"{k} {cell.counts[k]:.0f}x {v / GIB:.2f} GiB" for k, v in sorted(cell.collectives.items()))
    lines += [
        f"  {cell.flops / 1e12:.1f} TFLOP a step ({cell.model_flops / 1e12:.1f} without recomputation); collectives a chip: "
        + (moved or "none"),
        f"  roofline: compute {cell.compute_s:.3f} s, memory {cell.memory_s:.3f} s, links {cell.links_s:.3f} s -> at least "
        f"{cell.bound_s:.3f} s a step, at most {cell.per_step / cell.bound_s:,.0f} {cell.unit}/s, MFU at most {cell.mfu:.0%}",
    ]
    if cell.step == "features":
        lines.append(f"  353 slides x 2,048 patches: at least {feature_hours(cell.per_step / cell.bound_s):.2g} h")
    return "\n".join(lines)


def table(cells: list[dict[str, Any]]) -> str:
    """Markdown of --json's lines: a row a step, a column a slice, in the order in which they come first."""
    from pbs_jax.sharding.topology import GIB, chip_of

    slices = list(dict.fromkeys(cell["topology"] for cell in cells))
    steps = list(dict.fromkeys((cell["name"], cell["step"]) for cell in cells))
    found = {(cell["name"], cell["step"], cell["topology"]): cell for cell in cells}
    heads = [f"{name} ({chip_of(name).usable / GIB:.2f} GiB)" for name in slices]
    lines = ["| " + " | ".join(["step", *heads]) + " |", "|---" * (len(slices) + 1) + "|"]
    for name, step in steps:
        texts = [_text(found[key]) if (key := (name, step, one)) in found else "-" for one in slices]
        lines.append("| " + " | ".join([f"{name}, {step}", *texts]) + " |")
    return "\n".join(lines)


def _text(cell: dict[str, Any]) -> str:
    from pbs_jax.sharding.aot import feature_hours
    from pbs_jax.sharding.topology import GIB

    again = f", remat {cell['remat']}" if cell.get("remat") else ""
    batch = f"{'int8, ' if cell['int8'] else ''}batch {cell['batch']}{again}: "
    if not cell["fits"]:
        return f"{batch}does not fit, {cell['needed'] / GIB:.1f} GiB"
    rate = cell["per_step"] / cell["bound_s"]
    text = f"{batch}{cell['needed'] / GIB:.2f} GiB, ≥ {cell['bound_s']:.3g} s, ≤ {rate:,.0f} {cell['unit']}/s"
    if cell["step"] == "features":
        return f"{text}, ≥ {feature_hours(rate):.2g} h"
    return text if cell["step"] == "decode" else f"{text}, MFU ≤ {cell['mfu']:.0%}"
