"""The slide job: slides -> tiles with scores -> cells -> classes, as the datasets `slides`, `patches` and `cells`.

OUT/{slides, patches, cells} are whole or absent; OUT/qc/ holds every tile's score, kept or not; OUT/rejects.jsonl names
each slide that was not kept and each tile that did not decode; OUT/state.json says what all was made from, so that a
second run finds nothing to do. Tiles below the QC threshold are no faults: they are counted in the identity only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data_prep import io, qc, qc_haemorasis, slide_cellpose, slide_table, subtype
from data_prep.executors import Quarantined, run_units, take_shard
from data_prep.files import alone, atomic_write, canonical_json, sha256_file
from data_prep.pipeline import Outcome, code_sha256, finished
from data_prep.progress import progress
from data_prep.schema import SCHEMA_VERSION, DataError
from data_prep.slide_readers import files_of
from data_prep.slide_table import SlideRow
from data_prep.slide_units import UNDECODABLE, BandUnit, Look, LookUnit, band, is_done, look, why_failed
from data_prep.slide_write import DATASETS, NO_TILES, Done, SlideJob, write_datasets, write_scores
from data_prep.sources import Reject
from data_prep.tiling import Grid

BAD_TILES = 0.2  # share of undecodable tiles from which the whole slide is rejected
NUCLEAR = 0.2  # share of the stained area that is nuclear: smears have up to 0.1, H&E tissue 0.34-0.49 here
FEW_KEPT = 1 / 3  # of the tiles that are not blank; a smear rich in white cells keeps more


def run(job: SlideJob, say: Callable[[str], None] = print) -> Outcome:
    """Makes the datasets, or finds them made.

    Raises:
        DataError: an option, table or root that cannot be used, or an identity that does not hold. Slides that cannot
            be used are rejects of the outcome, also when that is all of them.
    """
    if job.root is None:
        raise DataError("--source slides needs --root, the folder that holds the slides")
    _check(job)
    with alone(job.out, shared=bool(job.shard)):
        return _run(job, job.root, say)


def _run(job: SlideJob, root: Path, say: Callable[[str], None]) -> Outcome:
    rows = slide_table.load(root, job.table, job.seed)
    if job.qc_source:
        qc_haemorasis.refuse_shared(job.qc_source, [row.slide_id for row in rows])
    work = job.out / ".units"
    networks = _networks(job)
    if job.shard:
        rows = list(take_shard(rows, job.shard))  # hashes, opens and does these only
        part = _process(job, root, dict(zip(rows, _hashes(root, rows), strict=True)), networks, work)[0]
        return Outcome(True, {}, {}, [f"shard {job.shard}: {len(part)} slides done; without --shard the rest follows"])
    hashes = _hashes(root, rows)
    inputs = _inputs(job, rows, hashes, networks)
    key = hashlib.sha256(canonical_json([SCHEMA_VERSION, job.config(), inputs, code_sha256()]).encode()).hexdigest()
    if (done := _up_to_date(job.out, key)) is not None:
        shutil.rmtree(work, ignore_errors=True)  # of a run that was killed at its end
        return done
    (job.out / "state.json").unlink(missing_ok=True)
    copies = _copies(rows, hashes)
    once = {row: digest for row, digest in zip(rows, hashes, strict=True) if row.slide_id not in copies}
    slides, rejects, pace = _process(job, root, once, networks, work)
    rejects += copies.values()
    for slide in slides:
        if slide.look.facts["odd"]:
            say(f"note: {slide.look.row.path}: {slide.look.facts['odd']}")
    atomic_write(job.out / "run.json", canonical_json(pace))  # no part of the result: two runs differ in it
    write_scores(job.out, slides)
    slides, refused = _judge(slides)
    failures = [
        Reject(f"{slide.look.row.slide_id}:{x}_{y}", f"tile {why_failed(error)}", error)
        for slide in slides
        for x, y, error in slide.failures
    ]
    rejects = sorted([*rejects, *refused, *failures], key=lambda reject: (reject.id, reject.reason))
    lines = write_datasets(job, rows, slides, rejects, inputs, say)
    atomic_write(job.out / "rejects.jsonl", "".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rejects))
    ids = {name: io.read_manifest(job.out / name)["content_id"] for name in DATASETS if (job.out / name).is_dir()}
    rejected = dict(Counter(reject.reason for reject in rejects))
    atomic_write(job.out / "state.json", canonical_json({"key": key, "content_ids": ids, "rejected": rejected}))
    shutil.rmtree(work, ignore_errors=True)
    lines += [f"reject: {reject.detail}" for reject in rejects[:10]]
    lines += [f"and {len(rejects) - 10} more in {job.out / 'rejects.jsonl'}"] if len(rejects) > 10 else []
    return Outcome(True, ids, rejected, lines + [f"{name}: {id[:16]}" for name, id in ids.items()])


def _check(job: SlideJob) -> None:
    if job.white_cells and not job.backbone:
        raise DataError("--white-cells only leaves out what is no white cell: give --backbone, which names the rest")
    if job.workers < 1:
        raise DataError(f"--workers is {job.workers}: give 1 or more")
    if not 0 <= job.threshold <= 1 or not 0 <= job.min_confidence <= 1:
        raise DataError("--qc-threshold and --min-confidence are scores: give 0 to 1")
    if job.grid_offset < 0 or job.grid_offset % 2:
        raise DataError(f"--grid-offset is {job.grid_offset}: give an even number of pixels, 0 or more")
    if job.root is not None and job.out.resolve().is_relative_to(job.root.resolve()):
        raise DataError(f"--out {job.out} lies in --root {job.root}: give a folder outside the slides'")
    if (job.out / "cells" / io.VERSION / "manifest.json").is_file():
        there = io.read_manifest(job.out / "cells")["config"].get("source")
        if there != job.source:
            raise DataError(f"--out {job.out} holds the datasets of source {there}: give slides another folder")


def _hashes(root: Path, rows: Sequence[SlideRow]) -> list[str]:
    """sha256 of each slide's files."""
    hashes = []
    for row in progress(rows, len(rows), "hashing slides"):
        hashes.append(" ".join(map(sha256_file, files_of(root / row.path))))
    return hashes


def _copies(rows: Sequence[SlideRow], hashes: Sequence[str]) -> dict[str, Reject]:
    """Slides whose files are those of another one, by id: they would count its cells twice, or stand in two splits."""
    first: dict[str, SlideRow] = {}
    found = {}
    for row, digest in zip(rows, hashes, strict=True):
        same = first.setdefault(digest, row)
        if same is not row:
            detail = f"{row.path} and {same.path} (slide {same.slide_id}) are the same: leave one out of the table"
            found[row.slide_id] = Reject(row.slide_id, "copy of another slide", detail)
    return found


def _networks(job: SlideJob) -> dict[str, str]:
    """Name -> sha256 of what judges tiles and finds cells in place of the classical ways. Raises DataError when it is not there."""
    judge = {"qc": qc_haemorasis.source_sha256(job.qc_source)} if job.qc_source else {}
    finder = job.cellpose_weights
    return judge | ({"cellpose": slide_cellpose.weights_sha256(finder)} if finder else {})


def _inputs(
    job: SlideJob, rows: Sequence[SlideRow], hashes: Sequence[str], networks: Mapping[str, str]
) -> dict[str, str]:
    """Name -> sha256 of what is read: all slide files together, what the table says, the networks, the classifiers."""
    lines = [f"{row.slide_id}\t{digest}\n" for row, digest in zip(rows, hashes, strict=True)]
    listed = canonical_json([dataclasses.asdict(row) | {"path": ""} for row in rows])
    inputs = {"slides": hashlib.sha256("".join(lines).encode()).hexdigest()}
    inputs["table"] = hashlib.sha256(listed.encode()).hexdigest()
    first = {"white_cells": subtype.classifier_sha256(job.white_cells, "white_cell")} if job.white_cells else {}
    second = {"classifier": subtype.classifier_sha256(job.backbone)} if job.backbone else {}
    return {**inputs, **networks, **first, **second}


def _up_to_date(out: Path, key: str) -> Outcome | None:
    done = finished(out, key)
    return dataclasses.replace(done, lines=[NO_TILES]) if done and not done.lines else done


def _process(
    job: SlideJob,
    root: Path,
    hashes: Mapping[SlideRow, str],
    networks: Mapping[str, str],
    work: Path,
) -> tuple[list[Done], list[Reject], dict[str, float]]:
    """All slides through all their bands, in the order of the rows whatever the workers' order; and how fast it went:
    seconds, the tiles done in them, the bands, and those that an interrupted run had left."""
    started, tiles, rows = time.monotonic(), 0, list(hashes)
    looks: dict[int, Look] = {}
    rejects: list[Reject] = []
    units = [LookUnit(root, row, job.qc_source) for row in rows]
    for number, seen in progress(run_units(look, units, job.workers), len(units), "opening slides"):
        if isinstance(seen, Look):
            looks[number] = seen
        else:
            rejects.append(_died(rows[number], seen) if isinstance(seen, Quarantined) else seen)
    slides = [Done(looks[n], Grid(*looks[n].size, job.grid_offset), {}) for n in sorted(looks)]
    bands = [(slide, number) for slide in slides for number in range(slide.grid.bands)]
    code = code_sha256() + "".join(networks.values())
    keys = {row.slide_id: _unit_key(job, row, digest, code) for row, digest in hashes.items()}
    jobs = [
        BandUnit(
            root,
            slide.look,
            slide.grid,
            number,
            work / f"{keys[slide.look.row.slide_id]}.{number:05d}",
            job.threshold,
            job.qc_source,
            job.cellpose_weights,
        )
        for slide, number in bands
    ]
    left = {number for number, unit in enumerate(jobs) if is_done(unit)}
    dead: dict[str, Reject] = {}
    for number, report in progress(run_units(band, jobs, job.workers, job.beam), len(jobs), "tiles, bands"):
        slide = bands[number][0]
        if isinstance(report, Quarantined):
            dead[slide.look.row.slide_id] = _died(slide.look.row, report)
        else:
            slide.reports[bands[number][1]] = report
            tiles += 0 if number in left else len(report.tiles) + len(report.failures)
    pace = {"bands": len(jobs), "bands_done_before": len(left), "tiles": tiles, "workers": job.workers}
    alive = [slide for slide in slides if slide.look.row.slide_id not in dead]
    return alive, [*rejects, *dead.values()], pace | {"seconds": time.monotonic() - started}


def _unit_key(job: SlideJob, row: SlideRow, digest: str, code: str) -> str:
    """The name of a slide's unit files: over all that decides their content, and over no other slide."""
    parts = [SCHEMA_VERSION, job.config(), dataclasses.asdict(row), digest, code]
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:24]


def _died(row: SlideRow, fate: Quarantined) -> Reject:
    return Reject(row.slide_id, "worker died", f"{row.path}: {fate.reason}")


def _judge(slides: Sequence[Done]) -> tuple[list[Done], list[Reject]]:
    """Slides that can be used, and why the others cannot."""
    kept, rejects = [], []
    for slide in slides:
        if verdict := _verdict(slide):
            rejects.append(Reject(slide.look.row.slide_id, verdict[0], f"{slide.look.row.path}: {verdict[1]}"))
        else:
            kept.append(slide)
    return kept, rejects


def _verdict(slide: Done) -> tuple[str, str] | None:
    """(reason, sentence) why a slide is not used, or None."""
    tiles, bad = slide.tiles, len(slide.failures)
    if bad > BAD_TILES * (len(tiles) + bad):
        error = slide.failures[0][2]
        why = why_failed(error)
        advice = "copy it again" if why == UNDECODABLE else "check --cellpose-weights"
        return why, f"{bad} of {len(tiles) + bad} tiles failed ({error}): {advice}"
    reasons = Counter(tile.reason for tile in tiles if tile.reason)
    shown = [tile for tile in tiles if tile.reason != qc.BLANK]
    stained = sum(1 - tile.parts["background"] for tile in shown)
    nuclear = sum(tile.parts["nuclear stain"] for tile in shown)
    if nuclear > NUCLEAR * stained and slide.kept <= FEW_KEPT * len(shown):
        share = f"{nuclear / stained:.0%} of what is stained is nuclear and {slide.kept} of {len(shown)} tiles are good"
        return "not a blood smear", f"{share}, as in tissue: take it out of the table"
    if not slide.kept:
        parts = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items())) or "none is whole"
        return NO_TILES, f"{NO_TILES} of {len(tiles)} ({parts}): scan it again, or see the scores in qc/"
    return None
