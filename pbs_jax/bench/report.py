"""The report over models and seeds in Markdown, LaTeX, CSV, JSON and one HTML page with everything in it.

Parts: tables by track, what the image adds, slices, attributes and classes, the paper's tables with its own numbers
behind a dagger, radar charts, case studies, and a filtered list of all answers side by side.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from data_prep import html
from data_prep.io import atomic_write
from data_prep.progress import progress
from data_prep.schema import ATTRIBUTES, QA, DataError
from pbs_jax.bench import attributes, browser, cases, circular, classes, gain, paper, radar, slices, slide_rows, tables
from pbs_jax.bench.evaluate import Row, Settings
from pbs_jax.bench.pictures import load_pictures
from pbs_jax.bench.records import Questions, dataset_of
from pbs_jax.bench.remarks import released
from pbs_jax.bench.score import Run, Scores, gather, score_runs

STYLE = f"<style>{Path(__file__).with_name('page.css').read_text()}</style>"
LONGEST_VALUE = 40  # characters of a value with its interval; longer fields are sentences


@dataclasses.dataclass(frozen=True)
class Part:
    """A section: tables for every form of the report, `figures` (HTML) for the page alone."""

    heading: str
    lead: str
    tables: Sequence[tables.Table] = ()
    figures: str = ""


def write(
    out: Path,
    runs: Sequence[Run],
    settings: Settings,
    *,
    train: Sequence[QA] | None = None,
    expected: Questions | None = None,
    title: str = "PBSBench report",
    data: Path | None = None,
    altered: Sequence[Run] = (),
) -> dict[str, Any]:
    """Scores the runs, writes report.md, .json, .html, tables.tex, .csv and scores.csv; returns report.json's content.

    Args:
      data: dataset folder with the pictures; without it the page has none.
      altered: the same models' runs on the questions without cell names (variant.py).
    """
    scores = score_runs(runs, settings, train=train, expected=expected)
    models = [row for row in scores.rows if row.kind == "model"]
    gains = gain.gains(scores, runs, settings) if gain.pairs(runs) else []
    by_attribute = {row.name: _attributes(row, scores, settings, train) for row in progress(models, desc="attributes")}
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
        parts.append(Part("Seeds", lead, [tables.over_seeds(scores.cells)]))
    if gains:
        lead = "The same model without its image, in the same answer mode, is the row to beat."
        parts.append(Part("What the image adds", lead, [gain.to_table(gains, "Image minus no image")]))
    if scores.origin.protocol == "circular":
        lead = "Each multiple-choice question in every rotation of its options: a lean to one letter earns nothing."
        parts.append(Part("Option order", lead, circular.to_tables(circular.circular(scores, settings))))
    if dominant := [table for row in models for table in slide_rows.dominant_tables(scores, row.name, settings)]:
        parts.append(Part("Slides: the most frequent white cell", slide_rows.LEAD, dominant))
    parts += _slices(scores, settings, train)
    for name, items in by_attribute.items():
        if items:
            lead = "Morphology is claimed only where the image beats the majority value of the predicted class."
            parts.append(Part(f"Attributes: {name}", lead, [attributes.to_table(items, name)]))
    for name, typed in by_class.items():
        if typed:
            parts.append(Part(f"Classes: {name}", "", [classes.to_table(typed, name)]))
    shown = [row.name for row in scores.rows if row.name in {run.label for run in runs}]
    shown = sorted(shown, key=lambda name: name not in {row.name for row in models})
    picture = pictures(data, scores.asked)
    parts += _case_parts(scores, shown, picture, altered, settings)
    missing = ", ".join(row.name for row in scores.rows if row.note)
    remarks = [f"Not computed without --train: {missing}."] if missing else []
    remarks += dict.fromkeys(remark for run in runs for remark in run.remarks)
    answers = html.Section(
        "All answers",
        browser.browser(scores, shown, picture),
        "Every question with the answers side by side; readings and verdicts are those of the robust profile.",
    )
    atomic_write(out / "report.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    printed = _paper_part(scores)
    atomic_write(out / "report.md", _markdown(title, [*parts, printed], remarks))
    atomic_write(out / "report.html", _page(title, parts, remarks, scores, answers, printed))
    shown_tables = [table for part in [*parts, printed] for table in part.tables]
    atomic_write(out / "tables.tex", "\n".join(map(tables.to_latex, shown_tables)))
    atomic_write(out / "tables.csv", tables.tables_csv(shown_tables))
    atomic_write(out / "scores.csv", tables.to_csv(scores.cells))
    print(f"written: {out}/report.html, report.md, report.json, tables.tex, tables.csv, scores.csv")
    return found


def pictures(data: Path | None, asked: Sequence[QA]) -> Callable[[QA], bytes | None]:
    """The first picture of a question's image; None for images that `data` lacks, and for all where it has none."""
    if data is None or dataset_of(data) is None:
        return lambda qa: None
    sources = []
    for level in ("cell", "slide"):
        questions = [qa for qa in asked if qa.level == level]
        try:
            sources.append(load_pictures(data, "image", questions, 1) if questions else None)
        except DataError as error:
            print(f"no pictures of the {level} questions: {error}")
            sources.append(None)
    by_level = dict(zip(("cell", "slide"), sources, strict=True))
    kept: dict[str, bytes | None] = {}

    def read(qa: QA) -> bytes | None:
        if qa.image_id not in kept:
            source = by_level[qa.level]
            kept[qa.image_id] = next(iter(source(qa)), None) if source else None
        return kept[qa.image_id]

    return read


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
        chart = radar.of_cells(cells, track, cells[0].profile)
        shown = tables.all_tables(cells, (profile,), scores.notes)
        yield Part(tables.TRACKS.get(track, track), lead, shown, f'<div class="single">{chart}</div>' if chart else "")


def _slices(scores: Scores, settings: Settings, train: Sequence[QA] | None) -> list[Part]:
    out = []
    if cells := slices.by_source(scores, settings):
        lead = "Out-of-domain questions by data set and class of the cell, each with its n; models after the best row without image."
        out.append(Part("Out of domain, by data set and class", lead, slices.to_tables(cells, "data set and class")))
    if train and (cells := slices.by_text(scores, train, settings)):
        lead = "Questions whose very text stands in the training questions, against the others."
        out.append(Part("Seen question texts", lead, slices.to_tables(cells, "question text")))
    return out


def _case_parts(
    scores: Scores,
    shown: Sequence[str],
    picture: Callable[[QA], bytes | None],
    altered: Sequence[Run],
    settings: Settings,
) -> list[Part]:
    if not shown:
        return []
    lead = (
        "Chosen where the answers differ most (as the paper's Fig. 4). Green: words of the gold answer. Red: keywords of other "
        "questions' golds. Scores never use these marks."
    )
    articles = cases.studies(scores, shown, picture)
    parts = [Part("Case studies", lead, figures=f'<div class="cases">{"".join(articles)}</div>')] if articles else []
    if altered:
        articles, counts = cases.without_names(scores, gather(altered), picture, settings)
        rows = [(name, str(gap.n), str(a), str(b), str(gap)) for name, a, b, gap in counts]
        header = ("", "questions", "right with the cell's name", 'right with "this cell"', "difference [95 %]")
        lead = "The same questions with the cell's name replaced by \"this cell\" (as the paper's Fig. 6)."
        table = tables.Table("With and without the cell's name", header, tuple(rows))
        parts.append(Part("Without the cell's name", lead, [table], f'<div class="cases">{"".join(articles)}</div>'))
    return parts


def _paper_part(scores: Scores) -> Part:
    """Our rows stand beside the paper's only where they answer the released questions."""
    ours = all(map(released, scores.asked))
    own = (
        "Our rows in the layout of the paper's tables, above"
        if ours
        else "Our rows answer other questions: here are only"
    )
    lead = f"{own} the paper's own numbers ({paper.DAGGER}), which are copies."
    charts = [radar.of_paper(track) for track in ("cell_ood", "slide_id")]
    shown = paper.all_tables(scores.cells if ours else (), scores.cells[0].profile)
    return Part("The paper's tables", lead, shown, html.columns(charts))


def _markdown(title: str, parts: Sequence[Part], remarks: Sequence[str]) -> str:
    lines = [f"# {title}", "", html.RESEARCH_NOTICE, "", *(f"> {remark}\n" for remark in remarks)]
    for part in parts:
        if part.tables:
            lines += [f"## {part.heading}", "", part.lead, "", *(tables.to_markdown(table) for table in part.tables)]
    return "\n".join(lines)


def _page(
    title: str, parts: Sequence[Part], remarks: Sequence[str], scores: Scores, answers: html.Section, printed: Part
) -> str:
    made = [html.Section(part.heading, part.figures + as_html(part.tables), part.lead) for part in [*parts, printed]]
    sections = [*made[:-1], answers, made[-1]]
    sections[0] = dataclasses.replace(sections[0], body=STYLE + sections[0].body)
    subtitle = (
        f"{len(scores.asked):,} questions, protocol {scores.origin.protocol}, data {scores.origin.dataset_id[:12]}"
    )
    return html.render_page(title, sections, subtitle=subtitle, warnings=remarks)


def as_html(shown: Iterable[tables.Table]) -> str:
    """Tables with their notes; models' rows are set apart from blind and copied ones. Needs STYLE on the page."""
    return "".join(
        html.table(map(_unbroken, table.rows), table.header, table.title, strong=_models(table))
        + (
            f'<ul class="under">{"".join(f"<li>{escape(note)}</li>" for note in table.notes)}</ul>'
            if table.notes
            else ""
        )
        for table in shown
    )


def _models(table: tables.Table) -> range:
    """The rows to set apart: those below the blind ones and above copied ones, where there are others."""
    return range(table.rule_after, len(table.rows) - table.copied) if table.rule_after or table.copied else range(0)


def _unbroken(row: Sequence[str]) -> list[str]:
    """Intervals without places to wrap; the row's name and sentences keep theirs."""
    return [row[0], *(field.replace(" ", "\u00a0") if len(field) <= LONGEST_VALUE else field for field in row[1:])]
