"""The report over models and seeds in Markdown, JSON and HTML: tables, gain of the image, attributes, classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data_prep import html
from data_prep.io import atomic_write
from data_prep.schema import ATTRIBUTES, QA
from pbs_jax.bench import attributes, classes, compare, tables
from pbs_jax.bench.evaluate import Row, Settings
from pbs_jax.bench.records import Questions
from pbs_jax.bench.score import Run, Scores, score_runs

_WITHOUT_IMAGE = ("blind", "blank", "mismatched")
Part = tuple[str, str, list[tables.Table]]  # heading, one sentence, tables


def write(
    out: Path,
    runs: Sequence[Run],
    settings: Settings,
    *,
    train: Sequence[QA] | None = None,
    expected: Questions | None = None,
    title: str = "PBSBench report",
) -> dict[str, Any]:
    """Scores the runs, writes report.md, .json, .html, tables.tex and scores.csv; returns report.json's content."""
    scores = score_runs(runs, settings, train=train, expected=expected)
    models = [row for row in scores.rows if row.kind == "model"]
    names = {row.name for row in scores.rows}
    pairs = [(row.name, f"{row.name}, {modality}") for row in models for modality in _WITHOUT_IMAGE]
    gains = [item for a, b in pairs if b in names for item in compare.compare(scores, a, b, settings)]
    by_attribute = {row.name: _attributes(row, scores, settings, train) for row in models}
    by_class = {row.name: classes.by_class(scores.asked, row.replies, settings) for row in models}
    found = scores.to_json() | {
        "title": title,
        "gains": [item.to_json() for item in gains],
        "attributes": {name: [item.to_json() for item in items] for name, items in by_attribute.items()},
        "classes": {name: [item.to_json() for item in items] for name, items in by_class.items()},
    }
    parts: list[Part] = list(_score_parts(scores))
    if any(len(row.replies) > 1 for row in scores.rows):
        lead = "Mean and standard deviation over training seeds, and each seed's own value."
        parts.append(("Seeds", lead, [tables.over_seeds(scores.cells)]))
    if gains:
        lead = "The same model without its image, in the same answer mode, is the row to beat."
        parts.append(("What the image adds", lead, [compare.to_table("Image minus no image", gains)]))
    for name, items in by_attribute.items():
        if items:
            lead = "Morphology is claimed only where the image beats the majority value of the predicted class."
            parts.append((f"Attributes: {name}", lead, [attributes.to_table(items, name)]))
    for name, typed in by_class.items():
        if typed:
            parts.append((f"Classes: {name}", "", [classes.to_table(typed, name)]))
    atomic_write(out / "report.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    missing = ", ".join(row.name for row in scores.rows if row.note)
    remarks = [f"Not computed without --train: {missing}."] if missing else []
    remarks += dict.fromkeys(remark for run in runs for remark in run.remarks)
    atomic_write(out / "report.md", _markdown(title, parts, remarks))
    atomic_write(out / "report.html", _page(title, parts, remarks, scores))
    atomic_write(out / "tables.tex", "\n".join(tables.to_latex(table) for *_, shown in parts for table in shown))
    atomic_write(out / "scores.csv", tables.to_csv(scores.cells))
    print(f"written: {out}/report.html, report.md, report.json, tables.tex, scores.csv")
    return found


def _attributes(row: Row, scores: Scores, settings: Settings, train: Sequence[QA] | None) -> list[attributes.Attribute]:
    """Empty where the questions or the training questions ask for no single attribute (the released ones don't)."""
    asks = any(attributes.fact_of(qa) in ATTRIBUTES for qa in scores.asked)
    if not train or not asks:
        return []
    return attributes.attribute_rows(train, scores.asked, row.replies, settings)


def _score_parts(scores: Scores) -> Iterable[Part]:
    for track in dict.fromkeys(cell.track for cell in scores.cells):
        cells = [cell for cell in scores.cells if cell.track == track]
        lead = "Rows above the models never see the image. Intervals are 95 %, by cluster; ± is the spread over seeds."
        profile = cells[-1].profile  # one breakdown is enough to read; scores.csv holds both
        yield tables.TRACKS.get(track, track), lead, tables.all_tables(cells, (profile,))


def _markdown(title: str, parts: Sequence[Part], remarks: Sequence[str]) -> str:
    lines = [f"# {title}", "", html.RESEARCH_NOTICE, "", *(f"> {remark}\n" for remark in remarks)]
    for heading, lead, shown in parts:
        lines += [f"## {heading}", "", lead, "", *(tables.to_markdown(table) for table in shown)]
    return "\n".join(lines)


def _page(title: str, parts: Sequence[Part], remarks: Sequence[str], scores: Scores) -> str:
    sections = [
        html.Section(
            heading,
            "".join(
                html.table(map(_unbroken, table.rows), table.header, table.title, strong=_models(table))
                + "".join(html.paragraph(note) for note in table.notes)
                for table in shown
            ),
            lead,
        )
        for heading, lead, shown in parts
    ]
    subtitle = (
        f"{len(scores.asked):,} questions, protocol {scores.origin.protocol}, data {scores.origin.dataset_id[:12]}"
    )
    return html.render_page(title, sections, subtitle=subtitle, warnings=remarks)


def _models(table: tables.Table) -> range:
    """The rows to set apart: those below the blind ones, where there are both."""
    return range(table.rule_after, len(table.rows)) if table.rule_after else range(0)


def _unbroken(row: Sequence[str]) -> list[str]:
    """Names and intervals without places to wrap."""
    return [field.replace(" ", "\u00a0") for field in row]
