"""`pbs data materialize`: the released PBSInstr and PBSBench records and the pictures they name -> datasets.

OUT/{cells, patches, cell_qa, cell_qa_tokens, slide_qa, slide_qa_tokens, tokenizer}, whole or absent; OUT/slides.csv is
the table for `pbs data run --source slides`, with ids under which `slide_qa` finds its slides; OUT/rejects.jsonl lists
every picture and question without its file, missing and ambiguous ones apart. The released split is kept: it is by
cell, so cells of one slide lie in several splits (official_code.md 1.8), and the manifest says so.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io as text_io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import derived, io
from data_prep.executors import Quarantined, run_units, take_shard
from data_prep.external_files import FileIndex, NotFound, file_at
from data_prep.files import atomic_write, canonical_json, sha256_file
from data_prep.materialize_units import CELLS, PATCHES, Cut, CutUnit, Picture, cut
from data_prep.pipeline import Outcome, code_sha256, finished
from data_prep.progress import progress
from data_prep.release_records import SLIDES, Release, read_release, release_pictures
from data_prep.schema import SCHEMA_VERSION, Cell, DataError
from data_prep.sources import Reject

PICTURES_PER_UNIT = 32
DATASETS = ("cells", "patches", "cell_qa", "cell_qa_tokens", "slide_qa", "slide_qa_tokens")
LICENCES = (
    "PBSInstr and PBSBench annotations, The PBSBench Authors, CC BY 4.0",
    "pictures: under the terms of the data sets that --source names",
)


@dataclasses.dataclass(frozen=True, slots=True)
class MaterializeJob:
    """`records`: released JSONL files, or folders of them. `sources`: data set -> its folder; `masks`: data set ->
    folder of expert masks, which turn its pictures into crops."""

    records: tuple[Path, ...]
    sources: Mapping[str, Path]
    out: Path
    masks: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    tokenizer: Path | None = None
    workers: int = 1
    seed: int = 0
    bin_length: int = 320
    color_enhance: float = 1.3
    shard: str = ""
    beam: str = ""

    def config(self) -> dict[str, Any]:
        """What decides the content: no path, no number of workers."""
        masked = sorted(self.masks)
        return {"source": "released", "masks": masked} | {
            name: getattr(self, name) for name in ("seed", "bin_length", "color_enhance")
        }


def run(job: MaterializeJob, say: Callable[[str], None] = print) -> Outcome:
    """Makes the datasets, or finds them made; with `shard` only that part of the units.

    Raises:
        DataError: records, an option or a source that cannot be used. Pictures without a usable file are rejects of
            the outcome, also when that is all of them.
    """
    release = read_release(job.records)
    pictures, rejects = release_pictures(release)
    _check(job, release)
    pictures, lost = _located(job, pictures)
    rejects += lost
    slides, lost_slides = _slide_files(job, release)
    inputs = _inputs(job, release, pictures, slides)
    key = hashlib.sha256(canonical_json([SCHEMA_VERSION, job.config(), inputs, code_sha256()]).encode()).hexdigest()
    if (done := finished(job.out, key)) is not None:
        return done
    work = job.out / ".units" / key[:16]
    units = take_shard(_units(pictures, work, job.color_enhance), job.shard)
    cuts, died = _run(job, units)
    if job.shard:
        return Outcome(True, {}, {}, [f"shard {job.shard}: {len(units)} units done; without --shard the rest follows"])
    (job.out / "state.json").unlink(missing_ok=True)
    rejects += [*died, *(reject for made in cuts for reject in made.rejects)]
    ids = _write_pictures(job, cuts, rejects, inputs)
    rejects += lost_slides
    rejects += _write_questions(job, release, {r.id: r for r in rejects}, ids, say)
    _write_table(job, release, slides)
    rejects.sort(key=lambda reject: (reject.id, reject.reason))
    atomic_write(job.out / "rejects.jsonl", "".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rejects))
    rejected = dict(Counter(reject.reason for reject in rejects))
    atomic_write(job.out / "state.json", canonical_json({"key": key, "content_ids": ids, "rejected": rejected}))
    shutil.rmtree(work.parent, ignore_errors=True)
    return Outcome(True, ids, rejected, _summary(job, rejects, ids))


def _check(job: MaterializeJob, release: Release) -> None:
    named = {str(source.get("dataset", "")) for source in release.sources.values()} - {""}
    if lacking := sorted(named - job.sources.keys()):
        raise DataError(
            f"the records name {', '.join(lacking)}: give --source {lacking[0]}=FOLDER, or leave its file out"
        )
    if odd := sorted((job.sources.keys() | job.masks.keys()) - named):
        raise DataError(f"no record names the data set {odd[0]}; they name {', '.join(sorted(named))}")
    if SLIDES in job.masks:
        raise DataError(f"--masks {SLIDES}: its records hold boxes, masks are for external pictures")
    if job.workers < 1 or job.bin_length < 1 or job.color_enhance <= 0:
        raise DataError("--workers, --bin-length and --color-enhance must be above 0")
    there = job.out / "cells"
    if (there / io.VERSION / "manifest.json").is_file():
        source = io.read_manifest(there)["config"].get("source")
        if source != "released":
            raise DataError(f"--out {job.out} holds the datasets of source {source}: give another folder")


def _located(job: MaterializeJob, pictures: Sequence[Picture]) -> tuple[list[Picture], list[Reject]]:
    """The pictures with their files, and those whose file or mask is missing or ambiguous."""
    indexes = {name: FileIndex(root) for name, root in job.sources.items() if name != SLIDES}
    masks = {name: FileIndex(root) for name, root in job.masks.items()}
    found, rejects = [], []
    for picture in pictures:
        try:
            if picture.dataset == SLIDES:
                file = _slide_file(job.sources[SLIDES], picture.path)
            else:
                file = indexes[picture.dataset].find(picture.path)
            mask = masks[picture.dataset].find_mask(picture.path) if picture.dataset in masks else None
        except NotFound as error:
            rejects.append(Reject(picture.image_id, f"file {error.reason}", str(error)))
            continue
        found.append(dataclasses.replace(picture, file=file, mask=mask))
    return found, rejects


def _slide_file(root: Path, path: str) -> Path:
    if (file := file_at(root, path)) is None:
        raise NotFound("missing", f"{path} is not below {root}")
    return file


def _slide_files(job: MaterializeJob, release: Release) -> tuple[dict[str, str], list[Reject]]:
    """Slides that questions are about: image id -> path below the source; and those whose file is missing."""
    found, rejects = {}, []
    for id in sorted({qa.image_id for qa in release.questions.values() if qa.level == "slide"}):
        source = release.sources[id]
        path = str(source.get("path", ""))
        try:
            if source.get("dataset") != SLIDES:
                raise NotFound("missing", f"{id} is not of {SLIDES}, the one data set with slides")
            _slide_file(job.sources[SLIDES], path)
            found[id] = path
        except NotFound as error:
            rejects.append(Reject(id, "slide missing", str(error)))
    return found, rejects


def _inputs(
    job: MaterializeJob, release: Release, pictures: Iterable[Picture], slides: Mapping[str, str]
) -> dict[str, str]:
    """Records by content; pictures and slides by name and size: the slides are 3.5 TB."""
    files = {(p.dataset, str(f.name), f.stat().st_size) for p in pictures for f in (p.file, p.mask) if f is not None}
    listed = canonical_json([sorted(files), sorted(slides.items())])
    inputs = dict(sorted(release.files.items())) | {"files": hashlib.sha256(listed.encode()).hexdigest()}
    return inputs | ({"tokenizer": sha256_file(job.tokenizer / "tokenizer.json")} if job.tokenizer else {})


def _units(pictures: Iterable[Picture], work: Path, color_enhance: float) -> list[CutUnit]:
    """Cells of one slide, or pictures of one data set, in the order in which a slide is read; a patch is never split."""
    groups: dict[tuple[str, str], list[Picture]] = {}
    for picture in pictures:
        groups.setdefault((picture.dataset, picture.slide_id), []).append(picture)
    units: list[CutUnit] = []
    for group in groups.values():
        group.sort(key=lambda picture: (picture.y, picture.x, picture.image_id))
        start = 0
        while start < len(group):
            end = min(start + PICTURES_PER_UNIT, len(group))
            while end < len(group) and group[end].box and group[end].patch_id == group[end - 1].patch_id:
                end += 1
            units.append(CutUnit(tuple(group[start:end]), work / f"unit-{len(units):06d}", color_enhance))
            start = end
    return units


def _run(job: MaterializeJob, units: Sequence[CutUnit]) -> tuple[list[Cut], list[Reject]]:
    """All units in their order whatever the workers' order; the pictures of a quarantined unit are rejects."""
    cuts: dict[int, Cut] = {}
    died: list[Reject] = []
    for number, made in progress(run_units(cut, units, job.workers, job.beam), len(units), "crops, units"):
        if isinstance(made, Quarantined):
            died += [Reject(p.image_id, "worker died", made.reason) for p in units[number].pictures]
        else:
            cuts[number] = made
    return [cuts[number] for number in sorted(cuts)], died


def _write_pictures(
    job: MaterializeJob, cuts: Sequence[Cut], rejects: Sequence[Reject], inputs: Mapping[str, str]
) -> dict[str, str]:
    """Writes `cells` and `patches`; removes older ones of which nothing is left."""
    kept = sum(len(made.cells.keys) for made in cuts)
    common: dict[str, Any] = {"config": job.config(), "inputs": inputs, "licences": LICENCES, "split_level": "image"}
    places: dict[str, set[str]] = {}
    for made in cuts:
        for split, id in made.patches.keys:
            places.setdefault(id.rpartition(":")[0], set()).add(split)
    mixed = sum(len(splits) > 1 for splits in places.values())
    details = {"slides": len(places), "slides_in_several_splits": mixed}
    ids = {}
    for name in DATASETS:
        if name != "cells" or not kept:
            shutil.rmtree(job.out / name, ignore_errors=True)
    if kept:
        ids["cells"] = io.finalise(
            job.out,
            "cells",
            CELLS,
            [made.cells for made in cuts],
            id_feature="cell_id",
            rejected=Counter(reject.reason for reject in rejects),
            records_in=kept + len(rejects),
            details=details,
            **common,
        )
    if places:
        patches = [made.patches for made in cuts]
        ids["patches"] = io.finalise(job.out, "patches", PATCHES, patches, id_feature="patch_id", **common)
    return ids


def _write_questions(
    job: MaterializeJob,
    release: Release,
    lost: Mapping[str, Reject],
    ids: dict[str, str],
    say: Callable[[str], None],
) -> list[Reject]:
    """Writes the questions, tokens and tokenizer; returns the questions that could not be kept."""
    rejects, kept = [], []
    for id, qa in sorted(release.questions.items()):
        if qa.image_id in lost:
            rejects.append(Reject(id, f"its {qa.level}: {lost[qa.image_id].reason}", lost[qa.image_id].detail))
        elif qa.split != release.splits[qa.image_id]:
            held = release.splits[qa.image_id]
            rejects.append(Reject(id, "its picture is held out", f"{qa.image_id} is {held} elsewhere, {qa.split} here"))
        else:
            kept.append(qa)
    texts = [Cell(id, release.splits[id], "", "", b"", caption=text) for id, text in release.captions.items()]
    learnable = any(qa.split == "train" for qa in kept) or any(cell.split == "train" for cell in texts)
    tokenizer = derived.make_tokenizer(job.out, job.tokenizer, texts, kept) if job.tokenizer or learnable else None
    if tokenizer is None:
        say("note: no train questions and no --tokenizer, so no tokens are written")
    for level in ("cell", "slide"):
        questions = [qa for qa in kept if qa.level == level]
        if not questions:
            continue
        name = f"{level}_qa"
        made_from = {k: v for k, v in ids.items() if k == "cells" and level == "cell"} | release.files
        split_level = "image" if level == "cell" else "slide"
        ids[name] = derived.write_questions(job.out, questions, job.config(), made_from, split_level, name)
        if tokenizer:
            ids[f"{name}_tokens"], too_long = derived.write_tokens(
                job.out,
                questions,
                tokenizer,
                bin_length=job.bin_length,
                seed=job.seed,
                qa_id=ids[name],
                level=split_level,
                name=name,
            )
            rejects += too_long
    return rejects


def _write_table(job: MaterializeJob, release: Release, slides: Mapping[str, str]) -> None:
    if slides:
        text = text_io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("path", "slide_id", "split"))
        writer.writerows((path, id, release.splits[id]) for id, path in slides.items())
        atomic_write(job.out / "slides.csv", text.getvalue())


def _summary(job: MaterializeJob, rejects: Sequence[Reject], ids: Mapping[str, str]) -> list[str]:
    lines = []
    if "cells" in ids:
        manifest = io.read_manifest(job.out / "cells")
        identity, details = manifest["identity"], manifest["details"]
        parts = "".join(f" + {n} {reason}" for reason, n in sorted(identity["rejected"].items()))
        lines.append(f"pictures: {identity['in']} in = {identity['kept']} kept{parts}")
        lines.append(
            f"split level: image, as released: {details['slides_in_several_splits']} of {details['slides']} slides "
            "have cells in several splits"
        )
    counts = Counter(reject.reason for reject in rejects)
    lines += [f"rejects: {n} {reason}" for reason, n in sorted(counts.items())]
    lines += [f"reject: {reject.detail}" for reject in rejects[:5]]
    lines += [f"and {len(rejects) - 5} more in {job.out / 'rejects.jsonl'}"] if len(rejects) > 5 else []
    return lines + [f"{name}: {id[:16]}" for name, id in ids.items()]
