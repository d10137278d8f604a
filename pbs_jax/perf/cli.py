"""`pbs perf flops|step|input|tile|decode|int8`: measurements, each beside a named peer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    group = subparsers.add_parser(
        "perf", help="measure: FLOPs, step time, input rate, tiles, decoding, int8", description=__doc__
    )
    commands = group.add_subparsers(metavar="COMMAND", required=True)

    flops = commands.add_parser(
        "flops",
        help="FLOPs a question against one question a row",
        description="Builds the batches of phases 3 and 4 from the released questions with Qwen's tokenizer and counts a "
        "training step's FLOPs at size 7b against the released code's form: one question a row, pairs padded to the "
        "longer, logits at every position.",
    )
    flops.add_argument(
        "--shared",
        type=Path,
        default=Path("../shared"),
        metavar="DIR",
        help="holds data/pbsbench and data/qwen_tokenizer",
    )
    flops.add_argument("--images_per_row", type=int, default=3, metavar="N")
    flops.set_defaults(run=run_flops)

    step = commands.add_parser(
        "step",
        help="questions/s of a training step against PyTorch",
        description="Questions a second of phase 3 or 4, or cells a second of phase 1 at the paper's shapes, against PyTorch "
        "with Hugging Face's modules in the released code's form, alternating runs on this machine, and like for like. "
        "Needs the torch extra; with a C++ compiler the compiled peer is measured too. Minutes.",
    )
    step.add_argument("--phase", type=int, choices=(1, 3, 4), default=3)
    step.add_argument("--size", choices=("nano", "small", "7b"), help="default: small, and 7b in phase 1")
    step.add_argument("--cells", type=int, default=8, metavar="N", help="of a step of phase 1")
    step.add_argument("--images_per_row", type=int, default=2, metavar="N")
    step.add_argument("--patches", type=int, default=512, metavar="N", help="of a slide, in phase 4")
    step.add_argument("--rounds", type=int, default=5, metavar="N")
    step.add_argument("--shared", type=Path, default=Path("../shared"), metavar="DIR")
    step.set_defaults(run=run_step)

    rate = commands.add_parser(
        "input",
        help="cells/s of the input pipeline against a torch DataLoader",
        description="Cells a second through the training iterator, as pictures and as cached features, against a torch "
        "DataLoader that decodes and resizes PNG files, with 0 and 2 workers, the better. Needs the torch extra.",
    )
    rate.add_argument("--cells", type=Path, default=Path("../shared/data/cells/pbc_barcelona"), metavar="DIR")
    rate.add_argument("--count", type=int, default=512, metavar="N", help="cells to read")
    rate.add_argument("--rounds", type=int, default=5, metavar="N")
    rate.add_argument("--growth", action="store_true", help="ours over a tenth of them too: does a cell's cost grow?")
    rate.set_defaults(run=run_input)

    tile = commands.add_parser(
        "tile",
        help="tiles/s of the slide pass against the released way",
        description="Tiles a second of reading, scoring, finding cells and writing what is kept, against reading every tile "
        "and writing it as PNG, alternating runs in one process.",
    )
    tile.add_argument("--slide", type=Path, required=True, metavar="FILE")
    tile.add_argument("--mpp", type=float, default=0.0, metavar="UM", help="um/px, where the file says none")
    tile.add_argument("--count", type=int, default=64, metavar="N", help="tiles, at least")
    tile.add_argument("--rounds", type=int, default=3, metavar="N")
    tile.set_defaults(run=run_tile)

    decode = commands.add_parser(
        "decode",
        help="tokens/s and questions/s against transformers",
        description="Greedy decoding of an imported SmolLM2 against transformers on the same weights: like for like, and on the "
        "benchmark's mix of questions about an image, whose prefix ours reads once. Needs the torch extra. Minutes.",
    )
    decode.add_argument(
        "--language_model", type=Path, required=True, metavar="WORKDIR", help="of `pbs weights import gguf-llama`"
    )
    decode.add_argument("--shared", type=Path, default=Path("../shared"), metavar="DIR", help="holds data/pbsbench")
    decode.add_argument("--images", type=int, default=6, metavar="N", help="whose questions are the mix")
    decode.add_argument("--rounds", type=int, default=3, metavar="N")
    decode.set_defaults(run=run_decode)

    int8 = commands.add_parser(
        "int8",
        help="what int8 kernels do to a frozen language model's logits",
        description="KL of the logits of real prompts, before and after. Exit code 1 when the mean is above the limit.",
    )
    int8.add_argument(
        "--language_model", type=Path, required=True, metavar="WORKDIR", help="finished or imported phase 0b"
    )
    int8.add_argument("--data", type=Path, required=True, metavar="DIR", help="holds cell_qa_tokens and tokenizer")
    int8.add_argument("--rows", type=int, default=16, metavar="N")
    int8.set_defaults(run=run_int8)


def run_step(args: argparse.Namespace) -> int:
    if args.phase == 1:
        from pbs_jax.perf.step_phase1 import report as phase1

        print(phase1(args.size or "7b", args.cells, args.rounds))
        return 0
    from pbs_jax.perf.step import report

    print(
        report(args.shared / "data", args.phase, args.size or "small", args.images_per_row, args.rounds, args.patches)
    )
    return 0


def run_input(args: argparse.Namespace) -> int:
    from pbs_jax.perf.input import report

    print(report(args.cells, args.count, args.rounds, args.growth))
    return 0


def run_tile(args: argparse.Namespace) -> int:
    from pbs_jax.perf.tile import report

    print(report(args.slide, args.count, args.rounds, args.mpp))
    return 0


def run_decode(args: argparse.Namespace) -> int:
    from pbs_jax.perf.decode import report

    print(report(args.language_model, args.shared / "data", args.images, args.rounds))
    return 0


def run_int8(args: argparse.Namespace) -> int:
    from pbs_jax.perf.int8 import report

    text, good = report(args.language_model, args.data, args.rows)
    print(text)
    return 0 if good else 1


def run_flops(args: argparse.Namespace) -> int:
    import os

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from pbs_jax.perf.flops import report

    print(report(args.shared / "data", args.images_per_row))
    return 0
