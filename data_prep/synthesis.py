"""The instruction job: cells -> captions -> questions -> quality control -> datasets with their statistics.

OUT holds `cells` (with the new captions), `cell_qa`, `cell_qa_tokens` and `tokenizer/`, ready for the phases, and for
reading: captions.jsonl, questions.jsonl (the released form), rejects.jsonl, instruct.json. For slides these are
`slide_qa` and, given a tokenizer, `slide_qa_tokens`. Every case ends as kept or in rejects.jsonl: in = kept + sum of rejects by reason.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import derived, quality
from data_prep.claims import Facts, cell_facts, slide_facts
from data_prep.datasets import read_cells
from data_prep.files import atomic_write, canonical_json, write_jsonl
from data_prep.io import read_manifest
from data_prep.providers import Case, Provider, Result, SlideCase, case_id
from data_prep.quality import Rejected, screen
from data_prep.review import CAPTIONS
from data_prep.schema import QA, Cell, DataError, stable_hash
from data_prep.slide_datasets import read_slides
from data_prep.sources import Reject

QUESTIONS, REJECTS, SUMMARY = "questions.jsonl", "rejects.jsonl", "instruct.json"
LEVELS = ("cell", "slide")
PARTS = ("both", "captions", "questions")
SLIDE_CAPTIONS = 40  # cell captions that a slide's summary is written from


@dataclasses.dataclass(frozen=True, slots=True)
class InstructJob:
    """`root`: folder with `cells` (and `slides` for level slide); `limit`: only so many cases, chosen by hash; `parts`:
    "captions" writes these alone, "questions" asks from the captions that are there; `captions`: for slides, the folder
    of an earlier job on their cells, whose captions the summaries are written from (default: those of root's cells)."""

    root: Path
    out: Path
    level: str = "cell"
    limit: int | None = None
    seed: int = 0
    bin_length: int = 320
    tokenizer: Path | None = None
    parts: str = "both"
    captions: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """`unfinished`: answers that the provider has not given (budget, passing failures); the same command goes on.
    `gate`: what the text alone answers too well, "" where it does not."""

    kept: int
    rejected: Mapping[str, int]
    unfinished: int
    gate: str
    lines: Sequence[str]


def load_cases(job: InstructJob) -> list[Case]:
    """The cells or slides to write about. Raises DataError where the folder lacks them."""
    if job.level not in LEVELS:
        raise DataError(f'--level "{job.level}" is unknown: use {" or ".join(LEVELS)}')
    if job.parts not in PARTS:
        raise DataError(f'--parts "{job.parts}" is unknown: use {", ".join(PARTS)}')
    if not (job.root / f"{job.level}s").is_dir():
        raise DataError(f"--root {job.root} has no {job.level}s: make them with pbs data run")
    cases: list[Case]
    if job.level == "cell":
        cases = list(read_cells(job.root))
    else:
        captions = _captions_of_slides(job)
        cases = [SlideCase(slide, captions.get(slide.slide_id, ())) for slide in read_slides(job.root)]
    if job.limit is not None and job.limit < len(cases):
        chosen = sorted(cases, key=lambda case: stable_hash("limit", job.seed, case_id(case)))[: job.limit]
        ids = {case_id(case) for case in chosen}
        cases = [case for case in cases if case_id(case) in ids]
    return cases


def _captions_of_slides(job: InstructJob) -> dict[str, tuple[str, ...]]:
    """Slide id -> captions of so many of its cells, chosen by hash; cells without a caption are passed over."""
    folder = job.captions or job.root
    if job.captions and not (folder / "cells").is_dir():
        raise DataError(f"--captions {folder} has no cells: give the --out of pbs data instruct --level cell")
    found: dict[str, list[str]] = {}
    cells = read_cells(folder) if (folder / "cells").is_dir() else ()
    for cell in sorted(cells, key=lambda cell: stable_hash("summary", cell.cell_id)):
        if cell.caption:
            found.setdefault(cell.slide_id, []).append(cell.caption)
    return {id: tuple(captions[:SLIDE_CAPTIONS]) for id, captions in found.items()}


def run(job: InstructJob, provider: Provider, say: Callable[[str], None] = print) -> Outcome:
    """Writes everything under job.out. Raises DataError where nothing was kept.

    A model's questions that fail the text-only gate are written all the same, for they are paid; the outcome says so.
    """
    if job.out.resolve() == job.root.resolve():
        raise DataError(f"--out {job.out} is --root: give another folder, the original datasets stay as they are")
    cases = load_cases(job)
    captioned = _present(cases) if job.parts == "questions" else provider.captions(cases)
    captions = {result.id: result.value for result in captioned if result.value is not None}
    usable = [case for case in cases if case_id(case) in captions]
    asked = provider.questions(usable, captions) if job.parts != "captions" else []
    screened = screen((qa for result in asked for qa in result.value or ()), facts_of(cases))
    written = _rank(screened.kept, cases)
    if not (written or (captions and job.parts == "captions")):
        raise DataError(f"nothing was kept of {len(cases)} {job.level}s: {_reasons(captioned, asked, screened)}")
    gate = ""
    try:
        derived.run_probe(written, say)
    except DataError as error:
        gate = str(error)
    job.out.mkdir(parents=True, exist_ok=True)
    lacking = [result for result in (*captioned, *asked) if result.status != "ok"]
    _write_texts(job.out, captioned, written, lacking, screened.rejected)
    unpacked = _write_datasets(job, usable, captions, written)
    summary = {
        "provider": provider.name,
        "cases": len(cases),
        "statuses": {
            "captions": dict(Counter(result.status for result in captioned)),
            "questions": dict(Counter(result.status for result in asked)),
        },
        "questions": {
            "in": len(written) + len(screened.rejected),
            "kept": len(written),
            "rejected": screened.counts(),
        },
        "quality_rules": quality.VERSION,
        "gate": gate or "passed or too few questions to tell",
        "too_long": len(unpacked),
    }
    atomic_write(job.out / SUMMARY, canonical_json(summary))
    return Outcome(
        len(written),
        dict(Counter(item.rule for item in screened.rejected)),
        sum(result.status in ("unasked", "error") for result in lacking),
        gate,
        _lines(job, summary, lacking),
    )


def _present(cases: Sequence[Case]) -> list[Result[str]]:
    """The captions that the cells have; slides have none stored."""
    return [Result(case_id(case), "ok", case.caption if isinstance(case, Cell) else "") for case in cases]


def facts_of(cases: Iterable[Case]) -> dict[str, Facts]:
    return {case_id(case): cell_facts(case) if isinstance(case, Cell) else slide_facts(case.slide) for case in cases}


def _rank(questions: Sequence[QA], cases: Sequence[Case]) -> list[QA]:
    rank = {case_id(case): k for k, case in enumerate(cases)}
    return sorted(questions, key=lambda qa: (rank[qa.image_id], qa.id))


def _write_texts(
    out: Path,
    captioned: Sequence[Result[str]],
    questions: Sequence[QA],
    lacking: Sequence[Result[Any]],
    rejected: Sequence[Rejected],
) -> None:
    captions = [
        {"image_id": result.id, "caption": result.value, "provenance": dict(result.origin)}
        for result in captioned
        if result.value is not None
    ]
    atomic_write(out / CAPTIONS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in captions))
    write_jsonl(out / QUESTIONS, questions)
    lines = [{"image_id": r.id, "reject_rule": r.status, "reject_detail": r.detail, **r.origin} for r in lacking]
    lines += [quality.reject_record(item) for item in rejected]
    atomic_write(out / REJECTS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _write_datasets(
    job: InstructJob, cases: Sequence[Case], captions: Mapping[str, str], questions: Sequence[QA]
) -> list[Reject]:
    """Cells with their new captions, questions and tokens; returns the questions that no bin holds."""
    source = read_manifest(job.root / f"{job.level}s")
    level, inputs, name = source["split"]["level"], {f"{job.level}s": source["content_id"]}, f"{job.level}_qa"
    cells = [dataclasses.replace(case, caption=captions[case.cell_id]) for case in cases if isinstance(case, Cell)]
    if cells:
        inputs["cells"] = derived.write_cells(
            job.out,
            cells,
            [],
            records_in=len(cells),
            config={"instruct": True, "seed": job.seed, "limit": job.limit},
            inputs=inputs,
            licences=source["licences"],
            split_level=level,
            details={"quality_rules": quality.VERSION},
        )
    if not questions:
        return []
    config = {"seed": job.seed, "quality_rules": quality.VERSION}
    qa_id = derived.write_questions(job.out, questions, config, inputs, level, name)
    given = job.tokenizer or (job.root / "tokenizer" if (job.root / "tokenizer").is_dir() else None)
    if given is None and not cells:
        return []
    tokenizer = derived.make_tokenizer(job.out, given, cells, questions)
    _, unpacked = derived.write_tokens(
        job.out, questions, tokenizer, bin_length=job.bin_length, seed=job.seed, qa_id=qa_id, level=level, name=name
    )
    return unpacked


def _reasons(captioned: Sequence[Result[str]], asked: Sequence[Result[list[QA]]], screened: quality.Screened) -> str:
    found = Counter(f"{r.status}" for r in (*captioned, *asked) if r.status != "ok")
    found.update(item.rule for item in screened.rejected)
    return ", ".join(f"{count} {name}" for name, count in found.most_common()) or "no question was written"


def _lines(job: InstructJob, summary: Mapping[str, Any], lacking: Sequence[Result[Any]]) -> list[str]:
    asked = summary["questions"]
    broken = {rule: count for rule, count in asked["rejected"].items() if count}
    lines = [
        f"{summary['cases']} {job.level}s, captions {summary['statuses']['captions']}, "
        f"questions {summary['statuses']['questions']}",
        f"questions: {asked['in']} in = {asked['kept']} kept + {sum(broken.values())} rejected {broken or ''}".rstrip(),
    ]
    if lacking:
        lines.append(
            f"{len(lacking)} answers lacking, the first: {lacking[0].id}: {lacking[0].status} {lacking[0].detail}"
        )
    if summary["too_long"]:
        lines.append(f"{summary['too_long']} questions are longer than a bin and are in no tokens: raise --bin-length")
    return [*lines, f"written under {job.out}: {CAPTIONS}, {QUESTIONS}, {REJECTS}, {SUMMARY}"]
