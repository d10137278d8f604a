"""A review sheet for experts: a seeded, stratified sample with its pictures, and the verdicts read back by id.

The paper had 200 captions reviewed and 94 % accepted (3.2.1); `acceptance` gives the same figure with its Wilson
interval, in all and by stratum. The page is for looking, the CSV beside it for writing: `verdict` is accept or reject,
`unsure` counts as neither.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from data_prep import html
from data_prep.balance import spread
from data_prep.datasets import read_cells, stored_questions
from data_prep.files import atomic_write
from data_prep.io import open_dataset, read_manifest
from data_prep.schema import DataError, stable_hash
from data_prep.slide_datasets import read_patches
from data_prep.stats import wilson

KINDS = ("captions", "questions")
VERDICTS = ("accept", "reject", "unsure")
SHEET, PAGE, CAPTIONS = "review.csv", "review.html", "captions.jsonl"
_COLUMNS = ("id", "stratum", "image_id", "text", "verdict", "reason")
_PICTURE_SIDE = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One thing to judge: a caption (id = image id) or a question with its answer."""

    id: str
    stratum: str
    image_id: str
    text: str


def caption_items(root: Path) -> list[Item]:
    """Captions of cells by label, or of the slides that `pbs data instruct --level slide` wrote about."""
    if (root / "cells").is_dir():
        return [Item(cell.cell_id, cell.label, cell.cell_id, cell.caption) for cell in read_cells(root)]
    file = root / CAPTIONS
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.is_file() else ())
    return [Item(line["image_id"], "slides", line["image_id"], line["caption"]) for line in lines]


def question_items(root: Path) -> list[Item]:
    """Questions about cells and slides by task and type."""
    items = []
    for qa in stored_questions(root):
        options = f" [{' | '.join(qa.options)}]" if qa.options else ""
        items.append(
            Item(qa.id, f"{qa.task}, {qa.question_type}", qa.image_id, f"{qa.question}{options} -> {qa.answer}")
        )
    return items


def sample(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """`count` items, strata as even as they allow, chosen by hash of (seed, id): the same in every process."""
    strata: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: stable_hash("review", seed, item.id)):
        strata.setdefault(item.stratum, []).append(item)
    names = sorted(strata)
    shares = spread(count, [len(strata[name]) for name in names])
    return [item for name, share in zip(names, shares, strict=True) for item in strata[name][:share]]


def write_sheet(
    root: Path, out: Path, kind: str, count: int = 200, seed: int = 0, seen: Path | None = None
) -> list[Item]:
    """Writes OUT/review.csv and OUT/review.html from the datasets under `root`; returns the sample.

    `seen`: the job that holds the pictures, where that is another.

    Raises DataError for an unknown kind, nothing to review, or a sheet that already holds verdicts.
    """
    if kind not in KINDS:
        raise DataError(f'"{kind}" can\'t be reviewed: use {" or ".join(KINDS)}')
    sheet = out / SHEET
    if sheet.is_file() and any(row["verdict"] for row in read_sheet(sheet)):
        raise DataError(f"{sheet} holds verdicts: name another --out, or move it")
    chosen = sample(caption_items(root) if kind == "captions" else question_items(root), count, seed)
    if not chosen:
        raise DataError(f"{root} holds no {kind} to review: give the --out of pbs data run or instruct")
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS)
    writer.writeheader()
    writer.writerows(dataclasses.asdict(item) | {"verdict": "", "reason": ""} for item in chosen)
    atomic_write(sheet, text.getvalue())
    atomic_write(out / PAGE, _page(chosen, pictures(seen or root, {item.image_id for item in chosen}), kind, seed))
    return chosen


def pictures(root: Path, ids: set[str]) -> dict[str, bytes]:
    """The encoded crops of these cells, and of these slides the patch with most cells, where ROOT holds them."""
    found: dict[str, bytes] = {}
    for split in read_manifest(root / "cells")["splits"] if (root / "cells").is_dir() else ():
        source = open_dataset(root / "cells", split)
        for id in sorted(ids & set(source.ids)):
            found[id] = bytes(source[source.position(id)]["image"])
    if (root / "patches").is_dir() and ids - found.keys():
        most: dict[str, int] = {}
        for patch in read_patches(root):
            if patch.slide_id in ids and len(patch.cell_ids) > most.get(patch.slide_id, -1):
                most[patch.slide_id], found[patch.slide_id] = len(patch.cell_ids), patch.image
    return found


def _page(items: Sequence[Item], pictures: Mapping[str, bytes], kind: str, seed: int) -> str:
    sections = []
    for stratum in dict.fromkeys(item.stratum for item in items):
        articles = []
        for item in (item for item in items if item.stratum == stratum):
            data = pictures.get(item.image_id)
            picture = html.image(data, item.image_id, _PICTURE_SIDE) if data else '<div class="blank">no image</div>'
            articles.append(
                f'<article>{picture}<div><p class="q">{escape(item.text)}</p><p><code>{escape(item.id)}</code></p></div>'
                "</article>"
            )
        sections.append(html.Section(stratum, f'<div class="examples">{"".join(articles)}</div>'))
    lead = (
        f"{len(items)} {kind}, sampled by stratum with seed {seed}. Write verdicts into {SHEET}: {', '.join(VERDICTS)}."
    )
    return html.render_page(f"Review of {kind}", sections, subtitle=lead)


@dataclasses.dataclass(frozen=True, slots=True)
class Acceptance:
    """`low`, `high`: 95 % Wilson interval of accepted / (accepted + rejected); nan without a verdict."""

    stratum: str
    accepted: int
    rejected: int
    unsure: int
    low: float
    high: float

    @property
    def share(self) -> float:
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else float("nan")


def acceptance(sheet: Path) -> list[Acceptance]:
    """Reads the verdicts: the whole first, then by stratum.

    Raises DataError for a verdict that is none of VERDICTS, a repeated id, or a sheet without verdicts.
    """
    rows = read_sheet(sheet)
    strata: dict[str, Counter[str]] = {"all": Counter()}
    seen: set[str] = set()
    for number, row in enumerate(rows, 2):
        verdict = row["verdict"].strip().lower()
        if row["id"] in seen:
            raise DataError(f"{sheet}:{number} judges {row['id']} a second time")
        seen.add(row["id"])
        if not verdict:
            continue
        if verdict not in VERDICTS:
            raise DataError(f'{sheet}:{number} verdict "{row["verdict"]}" is none of {", ".join(VERDICTS)}')
        for name in ("all", row["stratum"]):
            strata.setdefault(name, Counter())[verdict] += 1
    if not strata["all"]:
        raise DataError(f"{sheet} holds no verdict yet: fill the column `verdict`")
    return [
        Acceptance(name, n["accept"], n["reject"], n["unsure"], *wilson(n["accept"], n["accept"] + n["reject"]))
        for name, n in strata.items()
    ]


def rejected_ids(sheet: Path) -> dict[str, str]:
    """Id -> reason of everything that the reviewer rejected."""
    return {row["id"]: row["reason"] for row in read_sheet(sheet) if row["verdict"].strip().lower() == "reject"}


def read_sheet(sheet: Path, columns: Sequence[str] = ("id", "stratum", "verdict", "reason")) -> list[dict[str, str]]:
    """The lines of a CSV that a spreadsheet may have saved. Raises DataError when it or one of `columns` is missing."""
    if not sheet.is_file():
        raise DataError(f"{sheet} does not exist: write it first (pbs data review, pbs data labels)")
    with sheet.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets put a mark before the first column
        rows = [{name: value or "" for name, value in row.items() if name} for row in csv.DictReader(file)]
    if lacking := [name for name in columns if rows and name not in rows[0]]:
        raise DataError(f"{sheet} lacks the column {', '.join(lacking)}")
    return rows
