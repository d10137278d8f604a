"""`pbs data report`: one HTML page on a slide job. Per slide: thumbnail, QC map, kept grid, differential, white cells;
over all: warnings first, the identities, the score histogram and a gallery of rejected tiles per reason.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from PIL import Image, ImageDraw

from data_prep import charts, differential, html, qc
from data_prep.datasets import read_cells
from data_prep.files import atomic_write
from data_prep.io import job_problems, open_dataset, read_manifest
from data_prep.progress import progress
from data_prep.schema import Cell, DataError, stable_hash
from data_prep.slide_datasets import Slide, read_slides
from data_prep.slide_write import DATASETS, scores_file
from data_prep.slides import open_slide

THUMBNAIL = 440  # px, longer side
PER_REASON = 8  # rejected tiles shown of each reason
CELLS_SHOWN = 18  # per slide
SLIDES_SHOWN = 40  # a page with more would not open
LEAST_SQUARE = 6  # px of a tile in the pictures; outlines of smaller ones would cover them
DOT, RING = (255, 214, 10), (45, 0, 75)  # of a white cell: one is seen on dark pixels, the other on pale ones
DOTS_SHARE = 0.05  # of the picture that all dots together may cover
DOT_RADIUS = (1.5, 3.5)  # px; with a smaller one a cell is a single pixel
BAD, MIDDLE, GOOD = (178, 24, 43), (247, 230, 160), (33, 102, 172)  # QC map: 0, 0.5, 1; safe for the colour-blind


def write_report(out: Path, root: Path, target: Path) -> Path:
    """Writes the page for the datasets under `out`, made from the slide files under `root`; returns `target`.

    Raises:
        DataError: `out` holds no slide job, or one of which a part is missing or damaged.
    """
    if not (out / "state.json").is_file() or not (out / "qc").is_dir():
        raise DataError(f"{out} holds no slide job: run `pbs data run --source slides` with this --out first")
    _check_whole(out)
    slides = list(read_slides(out)) if (out / "slides").is_dir() else []
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    threshold = read_manifest(out / "slides")["config"]["threshold"] if slides else qc.THRESHOLD
    scores = {path.stem: json.loads(path.read_bytes()) for path in sorted((out / "qc").glob("*.json"))}
    sections = [
        html.Section(
            "Identity",
            _identity(out, rejects) + html.paragraph(f"Throughput: {throughput(out / 'run.json')}."),
            "What went in, what was kept, and why not the rest.",
        ),
        html.Section(
            "Quality",
            _quality(scores.values(), root, threshold),
            f"Scores of all tiles, kept at {threshold:g} and above.",
        ),
    ]
    shown = slide_sections(out, root, slides, SLIDES_SHOWN)
    sections += shown
    found = read_manifest(out / "cells")["identity"]["kept"] if (out / "cells").is_dir() else 0
    reasons = {reject["id"]: reject for reject in rejects}
    for id in sorted(reasons.keys() & {unquote(name) for name in scores})[:SLIDES_SHOWN]:
        score = scores[quote(id, safe="")]
        sections.append(html.Section(f"Rejected: {id}", _maps(score, root, []), reasons[id]["detail"]))
    kept = sum(slide.tiles_kept for slide in slides)
    note = f", {len(shown)} of {len(slides)} slides shown" if len(shown) < len(slides) else ""
    page = html.render_page(
        "Slides",
        sections,
        subtitle=f"{len(slides)} slides, {kept} tiles, {found} white cells{note}",
        warnings=_warnings(slides, rejects),
    )
    atomic_write(target, page)
    return target


def _check_whole(out: Path) -> None:
    """Raises DataError for datasets of which a shard is missing, damaged or of another run; also those not shown here."""
    manifests = {name: read_manifest(out / name) for name in DATASETS if (out / name).is_dir()}
    for name, manifest in manifests.items():
        for split in manifest["splits"]:
            open_dataset(out / name, split)
    if problems := job_problems(out, manifests):
        raise DataError(problems[0])


def throughput(path: Path) -> str:
    """What the job's run.json says of its last pass over the tiles."""
    if not path.is_file():
        return "not recorded"
    run = json.loads(path.read_bytes())
    workers = f"{run['workers']} worker{'s' if run['workers'] > 1 else ''}"
    text = f"{run['tiles']} tiles in {run['seconds']:.1f} s by {workers}"
    text += f": {run['tiles'] / run['seconds']:.1f} tiles/s" if run["tiles"] else ""
    before = run["bands_done_before"]
    return text + (f", after {before} of {run['bands']} bands done by an earlier run" if before else "")


def slide_sections(out: Path, root: Path, slides: Sequence[Slide], limit: int) -> list[html.Section]:
    """A section for each of at most `limit` slides, drawn by hash."""
    shown = sorted(slides, key=lambda slide: stable_hash("report", slide.slide_id))[:limit]
    shown.sort(key=lambda slide: slide.slide_id)
    cells: dict[str, list[Cell]] = {slide.slide_id: [] for slide in shown}
    for cell in read_cells(out) if (out / "cells").is_dir() else ():
        if cell.slide_id in cells:
            cells[cell.slide_id].append(cell)
    sections = []
    for slide in progress(shown, len(shown), "report, slides"):
        score = json.loads(scores_file(out, slide.slide_id).read_bytes())
        sections.append(html.Section(f"Slide {slide.slide_id}", _slide(slide, score, root, cells[slide.slide_id])))
    return sections


def _warnings(slides: Sequence[Slide], rejects: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [reject["detail"] for reject in rejects[:12]]
    lines += [f"and {len(rejects) - 12} more in rejects.jsonl"] if len(rejects) > 12 else []
    for slide in slides:
        lines += [f"{slide.slide_id}: {text}" for name in ("scale_note", "odd") if (text := slide.details.get(name))]
        red = slide.details.get("red_cell_um", 0.0)
        if red and not 4.5 <= red <= 9.5:
            lines.append(
                f"{slide.slide_id}: red cells measure {red:.1f} um at {slide.mpp:g} um/px; is the scale right?"
            )
    return lines


def _identity(out: Path, rejects: Sequence[Mapping[str, str]]) -> str:
    rows = []
    for name in DATASETS:
        if (out / name).is_dir():
            manifest = read_manifest(out / name)
            identity = manifest["identity"]
            lost = ", ".join(f"{n} {reason}" for reason, n in sorted(identity["rejected"].items())) or "none"
            rows.append([name, identity["in"], identity["kept"], lost, manifest["content_id"][:16]])
    if not rows:
        reasons = Counter(reject["reason"] for reject in rejects)
        lost = ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items()))
        rows.append(["slides", len(rejects), 0, lost, "nothing was written"])
    return html.table(rows, ["dataset", "in", "kept", "rejected", "content id"])


def _quality(scores: Iterable[Mapping[str, Any]], root: Path, threshold: float) -> str:
    """Histogram of the scores, counts per reason, and examples of each reason."""
    by_reason: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    values = []
    for slide in scores:
        for tile in slide["tiles"]:
            values.append(tile["score"])
            if tile["reason"]:
                by_reason.setdefault(tile["reason"], []).append((slide["path"], tile))
    total = max(len(values), 1)
    counts, edges = np.histogram(values, np.linspace(0, 1, 11))
    bars = [
        charts.Bar(f"{edges[k]:.1f}-{edges[k + 1]:.1f}", int(n) / total, strong=edges[k] >= threshold)
        for k, n in enumerate(counts)
    ]
    parts = [charts.interval_bars(bars, f"QC score of {len(values)} tiles, share", x_max=max(max(counts) / total, 0.1))]
    for reason, found in sorted(by_reason.items()):
        parts.append(f"<h3>{escape(f'{reason}: {len(found)} tiles')}</h3>")
        chosen = sorted(found, key=lambda item: stable_hash("gallery", item[0], item[1]["x"], item[1]["y"]))
        pictures = [
            (data, f"{tile['score']:.2f} at {tile['x']}, {tile['y']}")
            for path, tile in chosen[:PER_REASON]
            if (data := _tile(root / path, tile))
        ]
        parts.append(html.image_grid(pictures, 112))
    return "".join(parts)


def _tile(path: Path, tile: Mapping[str, Any]) -> bytes:
    """A small JPEG of a rejected tile, read again from its slide; b"" when that cannot be read any more."""
    try:
        with open_slide(path) as slide:
            return _jpeg(Image.fromarray(slide.read(tile["x"], tile["y"], 512, 512)).resize((160, 160)))
    except DataError:
        return b""


def _jpeg(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def _slide(slide: Slide, score: Mapping[str, Any], root: Path, cells: Sequence[Cell]) -> str:
    facts = (
        f"{slide.width}x{slide.height} px, {slide.mpp:g} um/px ({slide.mpp_source}), split {slide.split}, "
        f"{slide.tiles_kept} of {slide.tiles_in} tiles, {len(cells)} white and {slide.details['red_cells']} red cells. "
        + differential.sentence(slide.counts)
    )
    shares = differential.shares(slide.counts)
    bars = [charts.Bar(s.label, s.percent / 100, s.low / 100, s.high / 100, strong=True) for s in shares]
    shown = [charts.interval_bars(bars, "Differential with 95 % Wilson intervals")] if bars else []
    chosen = sorted(cells, key=lambda cell: stable_hash("mosaic", cell.cell_id))[:CELLS_SHOWN]
    chosen.sort(key=lambda cell: (cell.label, -cell.confidence))
    named = [(cell.image, f"{cell.label} {cell.confidence:.2f}" if cell.label else "not named") for cell in chosen]
    shown.append(html.image_grid(named, 84))
    return html.paragraph(facts) + _maps(score, root, cells) + html.columns(shown)


def _maps(score: Mapping[str, Any], root: Path, cells: Sequence[Cell]) -> str:
    """Thumbnail, QC map and kept grid side by side."""
    try:
        with open_slide(root / score["path"]) as opened:
            thumbnail = opened.thumbnail(THUMBNAIL)
    except DataError as error:
        return html.notice(str(error), "warning")
    pictures = [
        _picture(thumbnail, "thumbnail"),
        _picture(qc_map(thumbnail, score), "QC map: red 0, yellow 0.5, blue 1"),
        _picture(dots(kept_grid(thumbnail, score), cells, score), "kept tiles; dots are white cells"),
    ]
    return html.columns(pictures, len(pictures))


def _picture(picture: Image.Image, caption: str) -> str:
    shown = html.image(_jpeg(picture), caption, picture.width, picture.height)
    return f"<figure>{shown}<figcaption>{escape(caption)}</figcaption></figure>"


def dots(picture: Image.Image, cells: Sequence[Cell], score: Mapping[str, Any]) -> Image.Image:
    """A dot on each white cell; the more there are, the smaller they get, then paler, so that the tiles stay in sight."""
    draw, factor = ImageDraw.Draw(picture, "RGBA"), picture.width / score["size"][0]
    area = DOTS_SHARE * picture.width * picture.height / max(len(cells), 1)
    least, most = DOT_RADIUS
    radius = min(math.sqrt(area / math.pi), most)
    for cell in cells:
        x, y = (cell.bbox.left + cell.bbox.right) / 2 * factor, (cell.bbox.top + cell.bbox.bottom) / 2 * factor
        if radius < least:
            draw.point((x, y), fill=(*RING, round(255 * min(area, 1))))
        else:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=DOT, outline=RING)
    return picture


def qc_map(thumbnail: Image.Image, score: Mapping[str, Any]) -> Image.Image:
    """The thumbnail in grey under the scores of its tiles (paper Fig. 5); tiles that did not decode are black."""
    picture = thumbnail.convert("L").convert("RGB")
    draw, factor = ImageDraw.Draw(picture, "RGBA"), picture.width / score["size"][0]
    for tile in score["tiles"]:
        draw.rectangle(_square(tile["x"], tile["y"], score["side"], factor), fill=(*_colour(tile["score"]), 165))
    for x, y, _ in score["failures"]:
        draw.rectangle(_square(x, y, score["side"], factor), fill=(0, 0, 0, 255))
    return picture


def kept_grid(thumbnail: Image.Image, score: Mapping[str, Any]) -> Image.Image:
    """The thumbnail, paler where tiles were not kept, with the kept ones outlined where there is room."""
    picture = Image.blend(thumbnail, Image.new("RGB", thumbnail.size, "white"), 0.65)
    draw, factor = ImageDraw.Draw(picture), picture.width / score["size"][0]
    for tile in score["tiles"]:
        if not tile["reason"]:
            square = _square(tile["x"], tile["y"], score["side"], factor)
            picture.paste(thumbnail.crop(square), square[:2])
            if square[2] - square[0] >= LEAST_SQUARE:
                draw.rectangle(square, outline=(91, 63, 158))
    return picture


def _square(x: int, y: int, side: int, factor: float) -> tuple[int, int, int, int]:
    return (round(x * factor), round(y * factor), round((x + side) * factor), round((y + side) * factor))


def _colour(score: float) -> tuple[int, int, int]:
    low, high, part = (BAD, MIDDLE, 2 * score) if score < 0.5 else (MIDDLE, GOOD, 2 * score - 1)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue
