"""`pbs weights export | verify`: trained weights to PyTorch, and the proof that they are the same there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    weights = subparsers.add_parser("weights", help="take weights to PyTorch, and compare the two")
    commands = weights.add_subparsers(metavar="COMMAND", dest="command", required=True)

    export = commands.add_parser(
        "export",
        help="write a finished phase as safetensors",
        description="Writes OUT/model.safetensors (the trainable weights under the official names), OUT/export.json and, "
        "of a question-answering phase, what PyTorch needs to answer alone. The same phase gives the same bytes.",
    )
    export.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="a finished phase of `pbs train`")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    export.add_argument(
        "--frozen",
        action=argparse.BooleanOptionalAction,
        help="also write the frozen backbone and language model (default: of cell_qa at the small sizes)",
    )
    export.set_defaults(run=_export)

    verify = commands.add_parser(
        "verify",
        help="reload an export in PyTorch and compare it with JAX",
        description="Same pictures, same questions, both frameworks: differences stage by stage, and answers. Exit code "
        "1 when they disagree.",
    )
    verify.add_argument("--export", type=Path, required=True, metavar="DIR", help="what `pbs weights export` wrote")
    verify.add_argument("--data", type=Path, required=True, metavar="DIR", help="OUT of `pbs data run`")
    verify.add_argument("--split", default="test", help="split asked (test)")
    verify.add_argument("--n", type=int, default=200, metavar="N", help="number of questions (200)")
    verify.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    verify.add_argument("--workdir", type=Path, metavar="DIR", help="the exported phase (default: as export.json says)")
    verify.set_defaults(run=_verify)


def _export(args: argparse.Namespace) -> int:
    from pbs_jax.weights.export import export

    card = export(args.workdir, args.out, args.frozen)
    print(f"{args.out}: phase {card['phase']}, step {card['step']:,}")
    for name, facts in sorted(card["files"].items()):
        counts = f"{facts['tensors']:>5} tensors {facts['parameters']:>13,} parameters" if "tensors" in facts else ""
        print(f"  {name:<20}{counts:<41}  sha256 {facts['sha256'][:12]}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from pbs_jax.compile_cache import use_compile_cache
    from pbs_jax.weights.verify import verify

    use_compile_cache()
    return verify(args.export, args.data, split=args.split, n=args.n, out=args.out, workdir=args.workdir)
