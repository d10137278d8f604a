"""`pbs data materialize|publish|labels`: released records to datasets, datasets to a bucket, crops to experts and back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OK, FAILED, REJECTS = 0, 1, 3


def add_commands(commands: Any) -> None:
    """Adds the commands to the group `data`."""
    build = commands.add_parser("materialize", help="released PBSInstr/PBSBench records and their pictures -> datasets")
    build.add_argument(
        "--records", type=Path, nargs="+", required=True, help="released JSONL files, or folders of them"
    )
    build.add_argument(
        "--source",
        dest="sources",
        action="append",
        required=True,
        metavar="NAME=FOLDER",
        help="where a data set lies: S-BIAD440, AML-Cytomorphology_LMU, APL, WBC_LISC; once for each",
    )
    build.add_argument(
        "--masks",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="expert masks of an external data set: its cells are cropped by them (WBC_LISC)",
    )
    build.add_argument("--out", type=Path, required=True)
    build.add_argument("--tokenizer", type=Path, help="folder of a tokenizer.json to use instead of training one")
    build.add_argument("--bin-length", type=int, default=320, help="tokens of a packed row (default 320)")
    build.add_argument("--color-enhance", type=float, default=1.3, help="saturation of slide pixels (official 1.3)")
    build.add_argument("--seed", type=int, default=0)
    add_executor_arguments(build)
    build.set_defaults(run=_materialize)

    send = commands.add_parser("publish", help="upload finished datasets, verified, manifests last")
    send.add_argument("out", type=Path, help="the --out of a run")
    send.add_argument("address", help="gs://bucket/folder, or any address that fsspec knows")
    send.set_defaults(run=_publish)

    labels = commands.add_parser("labels", help="sheets on which experts label crops, and their labels read back")
    labels.add_argument("--root", type=Path, required=True, help="the --out of a job")
    labels.add_argument("--out", type=Path, help="folder for the sheet, or for the labelled cells")
    labels.add_argument(
        "--purpose",
        choices=("training", "acceptance"),
        default="training",
        help="training: 20000 crops by slide (default); acceptance: 300 by the machine's class",
    )
    labels.add_argument("--count", type=int, help="crops (default 20000 or 300)")
    labels.add_argument("--seed", type=int, default=0)
    labels.add_argument("--labels", type=Path, help="a filled labels.csv: with --out write the cells, else compare")
    labels.set_defaults(run=_labels)


def add_executor_arguments(parser: argparse.ArgumentParser) -> None:
    """--workers, --shard and --beam, alike for every job."""
    parser.add_argument(
        "--workers", type=int, default=1, help="processes (default 1); the result does not depend on it"
    )
    parser.add_argument(
        "--shard", default="", metavar="I/N", help="do only this part of the units (0/4 … 3/4), then once without"
    )
    parser.add_argument("--beam", default="", metavar="OPTIONS", help='Apache Beam: "local" or "--runner=NAME …"')


def _named_folders(texts: Sequence[str], option: str) -> dict[str, Path]:
    from data_prep.schema import DataError

    found: dict[str, Path] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in found:
            raise DataError(f'{option} "{text}" is not NAME=FOLDER, or {name} stands twice')
        found[name] = Path(folder)
    return found


def _materialize(args: argparse.Namespace) -> int:
    from data_prep.materialize import MaterializeJob, run

    fields = {name: value for name, value in vars(args).items() if name in MaterializeJob.__dataclass_fields__}
    fields |= {
        "records": tuple(args.records),
        "sources": _named_folders(args.sources, "--source"),
        "masks": _named_folders(args.masks, "--masks"),
    }
    outcome = run(MaterializeJob(**fields))
    print("\n".join(outcome.lines))
    return REJECTS if outcome.rejected else OK


def _publish(args: argparse.Namespace) -> int:
    from data_prep.publish import publish

    done = publish(args.out, args.address)
    for name, content_id in done.datasets.items():
        print(f"{name}: {content_id[:16]}")
    print(f"{done.sent} files uploaded, {done.there} were there; {done.size / 1e6:.1f} MB in all: {args.address}")
    return OK


def _labels(args: argparse.Namespace) -> int:
    from data_prep import label_sheet
    from data_prep.schema import DataError

    if args.labels and args.out:
        print(f"cells: {label_sheet.labelled(args.root, args.labels, args.out)[:16]}")
    elif args.labels:
        for row in label_sheet.agreement(args.root, args.labels):
            share = row.agreed / row.total if row.total else float("nan")
            print(f"{row.label:12} {row.agreed:4} of {row.total:4}  {share:.3f}  {row.low:.3f}-{row.high:.3f}")
    elif args.out:
        chosen = label_sheet.write_label_sheet(args.root, args.out, args.purpose, args.count, args.seed)
        strata = len({item.stratum for item in chosen})
        print(f"{len(chosen)} crops of {strata} strata: {args.out}/labels-000.html, labels go into {label_sheet.SHEET}")
    else:
        raise DataError("give --out to write a sheet, or --labels to read one")
    return OK
