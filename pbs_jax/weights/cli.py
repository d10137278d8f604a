"""`pbs weights fetch | import | export | verify`: published weights in, trained ones out, and the proof."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from data_prep.schema import DataError

FAMILIES = ("dinobloom", "blip2", "bert", "qwen2_5_vl", "gguf-llama", "qc", "official")


def add_parser(subparsers: Any) -> None:
    weights = subparsers.add_parser("weights", help="take weights from and to PyTorch, and compare the two")
    commands = weights.add_subparsers(metavar="COMMAND", dest="command", required=True)

    importer = commands.add_parser(
        "import",
        help="published weights -> a workdir to start from",
        description="Every tensor of the source is used once and every parameter filled once, or it stops with their "
        "names. --out can then stand in --config.init_from.*.",
    )
    importer.add_argument("family", choices=FAMILIES)
    importer.add_argument("source", type=Path, nargs="?", metavar="SOURCE", help="weight file or snapshot folder")
    importer.add_argument("--out", type=Path, required=True, metavar="DIR", help="workdir to write")
    importer.add_argument(
        "--size", choices=("nano", "small", "3b", "7b"), help="size it is for (7b; small of gguf-llama)"
    )
    importer.add_argument("--heads", type=int, metavar="N", help="attention heads, where no config.json says it")
    importer.add_argument("--offset", type=float, metavar="X", help="dinobloom: position interpolation's offset")
    importer.add_argument(
        "--antialias", action=argparse.BooleanOptionalAction, help="dinobloom: position interpolation's antialias"
    )
    importer.add_argument("--ln-vision", action="store_true", help="blip2: keep the file's norm of the image tokens")
    importer.add_argument("--data", type=Path, metavar="DIR", help="official: OUT of `pbs data run` (nano, small)")
    importer.add_argument("--tokenizer", type=Path, metavar="DIR", help="bert, blip2: folder of BERT's tokenizer.json")
    importer.set_defaults(run=_import)

    fetch = commands.add_parser(
        "fetch",
        help="download the published weights of a size, at pinned revisions",
        description="Resumes where it stopped. Without a network it says which files to put where.",
    )
    fetch.add_argument("--size", default="7b", choices=("small", "3b", "7b"), help="size (7b)")
    fetch.add_argument("--out", type=Path, default=Path("weights"), metavar="DIR", help="folder (weights)")
    fetch.add_argument("--only", metavar="NAME", help="one of its sources, e.g. dinobloom")
    fetch.set_defaults(run=_fetch)

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
    verify.add_argument("--data", type=Path, metavar="DIR", help="OUT of `pbs data run`: whose questions are asked")
    verify.add_argument("--split", default="test", help="split asked (test)")
    verify.add_argument("--n", type=int, default=200, metavar="N", help="number of questions (200)")
    verify.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    verify.add_argument("--workdir", type=Path, metavar="DIR", help="the exported phase (default: as export.json says)")
    verify.add_argument(
        "--features", type=Path, metavar="DIR", help="slides: where slide_features lie (default: --data)"
    )
    verify.set_defaults(run=_verify)


def _import(args: argparse.Namespace) -> int:
    from pbs_jax.weights.importers import import_weights, summary

    names = ("size", "heads", "offset", "antialias", "ln_vision", "data", "tokenizer")
    done = import_weights(args.family, args.source, args.out, **{name: getattr(args, name) for name in names})
    print(f"{args.out}: {args.family} as phase {done.phase}\n{summary(done)}")
    return 0


def _fetch(args: argparse.Namespace) -> int:
    from pbs_jax.weights.fetch import fetch

    return fetch(args.size, args.out, args.only)


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
    from pbs_jax.weights.files import ANSWERS, read_card
    from pbs_jax.weights.verify import verify
    from pbs_jax.weights.verify_part import verify_part

    use_compile_cache()
    card = read_card(args.export)
    if card["phase"] not in ANSWERS:
        return verify_part(args.export, card, args.workdir, args.out)
    if args.data is None:
        raise DataError(f"{args.export} answers questions: give --data, the OUT of `pbs data run` to ask from")
    options = {"split": args.split, "n": args.n, "out": args.out, "workdir": args.workdir, "features": args.features}
    return verify(args.export, args.data, **options)
