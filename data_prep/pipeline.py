"""The cell job: source -> crops -> split -> captions -> questions -> tokens, as datasets under one folder.

OUT/{cells, cell_qa, cell_qa_tokens, tokenizer} are whole or absent; OUT/rejects.jsonl names every item that was not
kept; OUT/state.json says what they were made from, so that a second run finds nothing to do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from array_record.python import array_record_module

from data_prep import crops, derived, io, qa, split, tokens
from data_prep.caption import cell_caption
from data_prep.datasets import CELL_FEATURES, record_cell
from data_prep.executors import Quarantined, run_units, take_shard
from data_prep.files import alone, atomic_write, canonical_json, sha256_file
from data_prep.progress import progress
from data_prep.records import parser
from data_prep.schema import QUESTION_TYPES, SCHEMA_VERSION, SPLITS, Cell, DataError, stable_hash
from data_prep.sources import Listing, Reject, SourceCell, bccd, external, pbc, synthetic
from data_prep.units import CELLS_PER_UNIT, CropUnit, UnitReport, crop_unit

SOURCES = ("pbc", "bccd", *external.NAMES, "synthetic")
DATASETS = ("cells", "cell_qa", "cell_qa_tokens")


@dataclasses.dataclass(frozen=True, slots=True)
class CellJob:
    """What `pbs data run` was asked for. `tokenizer`: folder of one to use instead of training it on this data."""

    source: str
    out: Path
    root: Path | None = None
    workers: int = 1
    seed: int = 0
    bin_length: int = 320
    limit: int | None = None
    n_per_class: int = 200
    tokenizer: Path | None = None
    fill: str = "reflect"
    color_enhance: float = 1.0
    shard: str = ""  # "i/n": only that part of the units, without the datasets
    beam: str = ""

    def config(self) -> dict[str, Any]:
        """What decides the content: no path, no number of workers."""
        names = ["source", "seed", "bin_length", "limit", "fill", "color_enhance"]
        names += ["n_per_class"] if self.source == "synthetic" else []
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`fresh`: whether anything was made. `rejected`: reason -> count. `lines`: the summary for the user."""

    fresh: bool
    content_ids: Mapping[str, str]
    rejected: Mapping[str, int]
    lines: Sequence[str]


def run(job: CellJob, say: Callable[[str], None] = print) -> Outcome:
    """Makes the datasets, or finds them made.

    Raises:
        DataError: an option or a root that cannot be used, no cell kept, or a gate (identity, probe, leaks) that fails.
    """
    for name in ("workers", "bin_length", "limit"):
        if (value := getattr(job, name)) is not None and value < 1:
            raise DataError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
    with alone(job.out, shared=bool(job.shard)):
        return _run(job, say)


def _run(job: CellJob, say: Callable[[str], None]) -> Outcome:
    _refuse_other_source(job)
    found = list_source(job)
    inputs = _inputs(job, found)
    key = hashlib.sha256(canonical_json([SCHEMA_VERSION, job.config(), inputs, code_sha256()]).encode()).hexdigest()
    work = job.out / ".units" / key[:16]
    if (done := finished(job.out, key)) is not None:
        shutil.rmtree(work.parent, ignore_errors=True)  # of a run that was killed at its end
        return done
    for note in found.notes:
        say(f"note: {note}")
    reports, crop_rejects = _crop(job, found, work)
    if job.shard:
        return Outcome(
            True, {}, {}, [f"shard {job.shard}: {len(reports)} units done; without --shard the rest follows"]
        )
    (job.out / "state.json").unlink(missing_ok=True)
    if clipped := sum(report.clipped for report in reports):
        say(f"note: {clipped} boxes reached over their picture's edge and were clipped")
    assignment = split.assign([item for report in reports for item in report.items], job.seed)
    for sentence in assignment.leakage:
        say(f"leakage: {sentence}")
    rejects = [*found.rejects, *crop_rejects, *assignment.rejects]
    cells = _captioned(reports, assignment.splits)
    ids = {
        "cells": derived.write_cells(
            job.out,
            cells,
            rejects,
            records_in=found.items,
            config=job.config(),
            inputs=inputs,
            licences=found.licences,
            split_level=assignment.level,
            details={"boxes_clipped": clipped, "geometry": crops.geometry_name(job.fill), "notes": list(found.notes)},
        )
    }
    questions = qa.cell_questions(cells, seed=job.seed)
    derived.run_probe(questions, say)
    made_from = {"cells": ids["cells"]}
    ids["cell_qa"] = derived.write_questions(job.out, questions, {"seed": job.seed}, made_from, assignment.level)
    tokenizer = derived.make_tokenizer(job.out, job.tokenizer, cells, questions)
    ids["cell_qa_tokens"], unpacked = derived.write_tokens(
        job.out,
        questions,
        tokenizer,
        bin_length=job.bin_length,
        seed=job.seed,
        qa_id=ids["cell_qa"],
        level=assignment.level,
    )
    if leaks := split.leaks(job.out):
        raise DataError(f"the written datasets leak ({len(leaks)}): {'; '.join(leaks[:3])}")
    say("leak check over the written datasets: no leak")
    rejects = sorted([*rejects, *unpacked], key=lambda reject: (reject.id, reject.reason))
    atomic_write(job.out / "rejects.jsonl", "".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rejects))
    rejected = dict(Counter(reject.reason for reject in rejects))
    atomic_write(job.out / "state.json", canonical_json({"key": key, "content_ids": ids, "rejected": rejected}))
    shutil.rmtree(work.parent)
    return Outcome(True, ids, rejected, summary(job.out, rejects))


def _refuse_other_source(job: CellJob) -> None:
    """One folder holds one source's datasets: a slip in --out must not replace another source's."""
    if not (job.out / "cells" / io.VERSION / "manifest.json").is_file():
        return
    there = io.read_manifest(job.out / "cells")["config"].get("source")
    if there != job.source:
        raise DataError(f"--out {job.out} holds the datasets of source {there}: give {job.source} another folder")


def list_source(job: CellJob) -> Listing:
    """The source's listing, cut to `limit` cells chosen by hash. Raises DataError for a missing root or no cells."""
    if job.source == "synthetic":
        found = synthetic.listing(job.n_per_class, job.seed)
    elif job.root is None:
        raise DataError(f"--source {job.source} needs --root, the folder that holds its data")
    elif job.source in external.NAMES:
        found = external.listing(job.root, job.source)
    else:
        found = {"pbc": pbc.listing, "bccd": bccd.listing}[job.source](job.root)
    if job.limit is None:
        return found
    chosen = sorted(found.cells, key=lambda cell: stable_hash("limit", job.seed, cell.cell_id))[: job.limit]
    return dataclasses.replace(found, cells=sorted(chosen, key=lambda cell: cell.cell_id))


def code_sha256() -> str:
    """sha256 over this package's sources: changed code makes the data again."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256("".join(map(sha256_file, files)).encode()).hexdigest()


def _inputs(job: CellJob, found: Listing) -> dict[str, str]:
    """Name -> sha256 of what is read: all pictures together, and what the source lists about them."""

    def picture(cell: SourceCell) -> str:
        path = (job.root or Path()) / cell.path
        if cell.image or not path.is_file():
            return hashlib.sha256(cell.image).hexdigest()
        return sha256_file(path)

    pictures = "".join(f"{cell.cell_id}\t{picture(cell)}\n" for cell in found.cells)
    listed = [dataclasses.asdict(cell) | {"image": ""} for cell in found.cells]
    listed += [dataclasses.asdict(reject) for reject in found.rejects]
    texts = {"pictures": pictures, "listing": canonical_json(listed)}
    inputs = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return inputs | ({"tokenizer": tokens.load_tokenizer(job.tokenizer).sha256} if job.tokenizer else {})


def finished(out: Path, key: str) -> Outcome | None:
    """What an earlier run under this key left in OUT, if state.json, every dataset it names and the tokenizer are whole."""
    path = out / "state.json"
    if not path.is_file():
        return None
    state = json.loads(path.read_bytes())
    ids = state["content_ids"]
    if state["key"] != key or any(io.verify(out / name) for name in ids):
        return None
    if io.job_problems(out, {name: io.read_manifest(out / name) for name in ids}):
        return None
    return Outcome(False, ids, state["rejected"], [f"up to date: {name} {id[:16]}" for name, id in ids.items()])


def _crop(job: CellJob, found: Listing, work: Path) -> tuple[list[UnitReport], list[Reject]]:
    """All units, in order of units whatever the workers' order; the cells of a quarantined unit become rejects."""
    cells = sorted(found.cells, key=lambda cell: cell.cell_id)
    chunks = [tuple(cells[start : start + CELLS_PER_UNIT]) for start in range(0, len(cells), CELLS_PER_UNIT)]
    root = job.root or Path()
    units = [
        CropUnit(chunk, root, work / f"unit-{number:06d}.array_record", job.fill, job.color_enhance)
        for number, chunk in enumerate(chunks)
    ]
    units = list(take_shard(units, job.shard))
    reports: dict[int, UnitReport] = {}
    rejects = []
    for number, result in progress(run_units(crop_unit, units, job.workers, job.beam), len(units), "crops, units"):
        if isinstance(result, Quarantined):
            rejects += [Reject(cell.cell_id, "worker died", result.reason) for cell in units[number].cells]
        else:
            reports[number] = result
    ordered = [reports[number] for number in sorted(reports)]
    return ordered, rejects + [reject for report in ordered for reject in report.rejects]


def _captioned(reports: Sequence[UnitReport], splits: Mapping[str, str]) -> list[Cell]:
    """The cells that the split kept, with split and caption, in id order."""
    cells = (cell for report in reports for cell in unit_cells(report.unit) if cell.cell_id in splits)
    placed = (dataclasses.replace(cell, split=splits[cell.cell_id]) for cell in cells)
    captioned = (dataclasses.replace(cell, caption=cell_caption(cell)) for cell in placed)
    return sorted(captioned, key=lambda cell: cell.cell_id)


def unit_cells(unit: io.Unit) -> Iterator[Cell]:
    if unit.keys:  # an ArrayRecord file without records does not open
        parse = parser(CELL_FEATURES)
        reader = array_record_module.ArrayRecordReader(str(unit.path))
        yield from (record_cell(parse(raw)) for raw in reader.read_all())
        reader.close()


def summary(out: Path, rejects: Sequence[Reject]) -> list[str]:
    """The table a run ends with: per split the cells and questions, then the identity and the rejects by reason."""
    cells, questions, bins = (io.read_manifest(out / name) for name in DATASETS)
    per_type = questions["details"]["questions"]
    lines = [f"{'split':8}{'cells':>8}" + "".join(f"{kind:>17}" for kind in QUESTION_TYPES) + f"{'bins':>8}"]
    for name in (name for name in SPLITS if name in cells["splits"]):
        counts = "".join(f"{per_type.get(f'{name} {kind}', 0):>17}" for kind in QUESTION_TYPES)
        lines.append(f"{name:8}{cells['splits'][name]:>8}{counts}{bins['splits'].get(name, 0):>8}")
    identity = cells["identity"]
    parts = [f"{count} {reason}" for reason, count in sorted(identity["rejected"].items())]
    lines.append(f"identity: {identity['in']} in = {' + '.join([f'{identity["kept"]} kept', *parts])}")
    lines.append(
        f"split level: {cells['split']['level']}" + (", donors unknown" if cells["split"]["level"] == "image" else "")
    )
    shown = rejects[:10]
    lines += [f"reject: {reject.detail}" for reject in shown]
    if len(rejects) > len(shown):
        lines.append(f"and {len(rejects) - len(shown)} more in {out / 'rejects.jsonl'}")
    return lines + [f"{name}: {io.read_manifest(out / name)['content_id'][:16]}" for name in DATASETS]
