"""The HTML page of `pbs ask --report`: differential with intervals, cells by class, the least certain ones, impression, answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data_prep import charts, html
from data_prep.files import atomic_write
from data_prep.picture import Picture
from data_prep.schema import WHITE_CELL_CLASSES
from pbs_jax.ask import evidence
from pbs_jax.ask.evidence import Evidence
from pbs_jax.ask.picture import Answer, Models

PER_CLASS, UNSURE = 24, 16  # pictures of cells on the page


def write_page(path: Path, picture: Picture, answers: Sequence[Answer], models: Models, seen: Evidence | None) -> None:
    """Writes one self-contained page. Raises OSError when it cannot be written."""
    sections = [html.Section("Answers", _answers(answers))]
    sections.append(html.Section("Impression", html.paragraph(impression(picture))))
    if picture.kind != "crop":
        sections.append(html.Section("Differential", _differential(picture)))
        sections.append(
            html.Section(
                "White cells", _legend(picture) + _shown(evidence.boxes(picture)), "Boxes in the class's colour."
            )
        )
    if seen is not None:
        lead = "Where the visual tokens were read from; it does not depend on the question and explains no answer."
        sections.append(
            html.Section("What the model looked at", html.paragraph(seen.caption) + _shown(seen.overlay), lead)
        )
    sections.append(
        html.Section("Cells", _mosaic(picture), "As the model sees them, with the classifier's probability.")
    )
    if picture.kind != "crop" and any(cell.label for cell in picture.cells):
        unsure = sorted(picture.cells, key=lambda cell: (cell.confidence, cell.cell_id))[:UNSURE]
        items = [(cell.image, f"{cell.label} {cell.confidence:.2f}") for cell in unsure]
        lead = "The classifier knows five classes; abnormal and immature cells are among those it is least sure of."
        sections.append(html.Section("Cells to look at", html.image_grid(items), lead))
    width, height = picture.size
    scale = f", {picture.mpp:.3f} um/px ({picture.mpp_source})" if picture.mpp else ""
    page = html.render_page(
        picture.name,
        sections,
        subtitle=f"{picture.kind}, {width}x{height} px{scale}",
        warnings=[text for text in (models.remark, *picture.remarks) if text],
        footer=f"Answered by {models.name}.",
    )
    atomic_write(path, page)


def impression(picture: Picture) -> str:
    """What was counted, in words; nothing is concluded from it."""
    if picture.kind == "crop":
        cell = picture.cells[0]
        return (
            f"One white cell; the classifier says {cell.label} ({cell.confidence:.2f})."
            if cell.label
            else "One white cell."
        )
    found, (sentence, shares) = len(picture.cells), picture.differential()
    tiles = f" on {picture.tiles[1]} of {picture.tiles[0]} tiles" if picture.kind == "slide" else ""
    text = f"{found} white cell{'' if found == 1 else 's'} found{tiles}; {sentence}."
    if shares:
        most = max(shares, key=lambda share: share.count)
        text += f" Most frequent: {most.label}."
    return text


def _answers(answers: Sequence[Answer]) -> str:
    rows = [(a.question, a.sentence, a.question_type.replace("_", " "), a.remark) for a in answers]
    return html.table(rows, ("question", "answer", "asked as", "but"))


def _differential(picture: Picture) -> str:
    sentence, shares = picture.differential()
    if not shares:
        counted = ", ".join(f"{name} {count}" for name, count in sorted(picture.counts().items()))
        return html.notice(f"{sentence}. Counted: {counted or 'no classifier was given'}.")
    bars = [charts.Bar(s.label, s.percent, s.low, s.high, strong=True) for s in shares]
    rows = [(s.label, s.count, s.percent, f"{s.low:.1f}-{s.high:.1f}") for s in shares]
    return html.columns(
        [
            charts.interval_bars(bars, "Share of the white cells, percent, 95 % Wilson intervals", x_max=100),
            html.table(rows, ("class", "cells", "percent", "95 % interval")),
        ]
    )


def _legend(picture: Picture) -> str:
    counts = picture.counts()
    names = [name for name in (*WHITE_CELL_CLASSES, "Others", "Artifact") if name in counts]
    spans = "".join(
        f'<span style="margin-right:1rem"><i style="background:{evidence.CLASS_COLOURS[n]};display:inline-block;width:.8em;'
        f'height:.8em;margin-right:.3em"></i>{n} {counts[n]}</span>'
        for n in names
    )
    return f"<p>{spans}</p>"


def _shown(picture: bytes) -> str:
    return f'<img src="{html.data_uri(picture)}" alt="overlay" style="max-width:100%;height:auto;border-radius:8px">'


def _mosaic(picture: Picture) -> str:
    parts = []
    for name in dict.fromkeys((*WHITE_CELL_CLASSES, *sorted({cell.label for cell in picture.cells}))):
        own = sorted((c for c in picture.cells if c.label == name), key=lambda c: (-c.confidence, c.cell_id))
        if own:
            shown = own[:: max(1, -(-len(own) // PER_CLASS))]
            items = [(cell.image, f"{cell.confidence:.2f}" if cell.label else "") for cell in shown]
            parts.append(f"<h3>{name or 'Cells'}, {len(own)}</h3>{html.image_grid(items)}")
    return "".join(parts)
