"""`pbs paper RUNS`: a folder of bench runs -> every table of the paper in its layout, beside the published numbers.

Runs on the released questions share a table with the paper's rows. Runs on other questions (nano's, above all) get the
same tables under a heading that says so: stand-in, other data, never ranked. What else is not comparable stands first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pbs_jax.bench.compare import Comparison
    from pbs_jax.bench.score import Run, Scores
    from pbs_jax.bench.tables import Table

STAND_IN = "stand-in, other data"
PREAMBLE = r"""\documentclass{article}
\usepackage[a3paper,landscape,margin=1cm]{geometry}
\usepackage[T1]{fontenc}
\usepackage{booktabs,graphicx}
\makeatletter
\renewcommand\@makecaption[2]{\textbf{#2}\par\smallskip}
\makeatother
\begin{document}
"""


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that may share a table: one question set, one protocol. `released`: on the paper's released questions.
    `comparisons`: models against their variants."""

    scores: Scores
    released: bool
    remarks: tuple[str, ...]
    comparisons: tuple[Comparison, ...] = ()

    @property
    def heading(self) -> str:
        origin = self.scores.origin
        kind = "Released PBSBench questions" if self.released else f"Our runs: {STAND_IN}"
        return f"{kind} (data {origin.dataset_id[:12]}, protocol {origin.protocol})"


def add_parser(subparsers: Any) -> None:
    from pbs_jax.bench.cli import add_scoring

    parser = subparsers.add_parser(
        "paper",
        help="a folder of bench runs beside every table of the paper",
        description="Finds the folders that `pbs bench run` wrote below RUNS and writes paper.html, paper.md, paper.tex, "
        "paper.csv and paper.json: Tables 2, 3, 5, 6, 8-12 with our rows and the published ones, and Fig. 2.",
    )
    parser.add_argument("runs", type=Path, help="folder with run folders anywhere below it")
    add_scoring(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from data_prep.schema import DataError
    from pbs_jax.bench.cli import settings_of, train_of
    from pbs_jax.bench.compare import compare
    from pbs_jax.bench.records import load_questions
    from pbs_jax.bench.remarks import released
    from pbs_jax.bench.score import load_run, score_runs

    if not (found := find(args.runs)):
        raise DataError(f"{args.runs} holds no runs: give a folder with folders that `pbs bench run --out` wrote")
    settings, train = settings_of(args), train_of(args)
    questions = load_questions(args.data, args.split) if args.data else None
    groups = []
    for runs in together([load_run(path, questions) for path in found]):
        scores = score_runs(runs, settings, train=train, expected=questions)
        remarks = tuple(dict.fromkeys(remark for one in runs for remark in one.remarks))
        comparisons = tuple(compare(scores, variants([row.name for row in scores.rows]), settings, "paper"))
        groups.append(Group(scores, all(map(released, scores.asked)), remarks, comparisons))
    groups.sort(key=lambda group: not group.released)
    write(args.out or args.runs, groups)
    return 0


def variants(names: Sequence[str]) -> list[tuple[str, str]]:
    """(row, its variant): "nano, 3 patches" is "nano" with what is said after the comma."""
    return [(name, other) for name in names for other in names if other.startswith(f"{name}, ")]


def find(folder: Path) -> list[Path]:
    """Run folders at or below `folder`."""
    from pbs_jax.bench.score import PREDICTIONS, RUN_CARD

    return sorted(path.parent for path in folder.rglob(PREDICTIONS) if path.with_name(RUN_CARD).is_file())


def together(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Runs by what must agree within a table: question set, protocol, and the answer mode of each question type."""
    groups: dict[Any, list[Run]] = {}
    for one in runs:
        modes = frozenset((item.qa.question_type, item.answer_mode) for item in one.predictions)
        groups.setdefault((one.dataset_id, one.protocol, modes), []).append(one)
    yield from groups.values()


def write(out: Path, groups: Sequence[Group]) -> None:
    """Puts the page and its other forms into `out`."""
    from data_prep import html
    from data_prep.io import atomic_write
    from pbs_jax.bench import radar, report, tables

    every = [table for group in groups for table in shown(group) + intervals(group)]
    every += [*unfilled(groups), alignment_gaps()]
    warnings = not_comparable(groups)
    figures = html.columns(radar.of_paper(track) for track in ("cell_ood", "slide_id"))
    sections = [html.Section("The paper's figures", report.STYLE + figures, "Fig. 2, from the printed numbers.")]
    for group in groups:
        cells = group.scores.cells
        models = {cell.row for cell in cells if cell.kind == "model"}
        tracks = dict.fromkeys(cell.track for cell in cells) if len(models) > 1 else ()  # one is a full circle
        charts = html.columns(filter(None, (radar.of_cells(cells, track, "paper") for track in tracks)))
        notes = "".join(html.notice(note, "warning") for note in group.remarks)
        sections.append(html.Section(group.heading, notes + charts + report.as_html(shown(group))))
        lead = "The same rows with 95 % intervals by cluster, and models minus their variants, question by question."
        sections.append(html.Section("Intervals", report.as_html(intervals(group)), lead))
    lead = "No run here answers questions of these kinds."
    sections.append(html.Section("Published only", report.as_html(unfilled(groups)), lead))
    sections.append(html.Section("Table 6, read with its standard deviations", report.as_html([alignment_gaps()])))
    page = html.render_page("PBSBench: the paper's tables and ours", sections, warnings=warnings)
    atomic_write(out / "paper.html", page)
    lines = ["# The paper's tables and ours", "", *(f"> {line}\n" for line in warnings)]
    atomic_write(out / "paper.md", "\n".join([*lines, *map(tables.to_markdown, every)]))
    body = "\n".join(map(tables.to_latex, every))
    atomic_write(out / "paper.tex", f"{PREAMBLE}{body}\\end{{document}}\n")
    atomic_write(out / "paper.csv", tables.tables_csv(every))
    content = {
        "not_comparable": warnings,
        "groups": [
            {"heading": group.heading, "released": group.released, "remarks": group.remarks} | group.scores.to_json()
            for group in groups
        ],
    }
    atomic_write(out / "paper.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {out}/paper.html, paper.md, paper.tex, paper.csv, paper.json")


def shown(group: Group) -> list[Table]:
    """The paper's tables that have rows of the group; on other questions each of our rows and the title say so."""
    from pbs_jax.bench import paper

    found = [table for table in paper.all_tables(group.scores.cells) if len(table.rows) > table.copied]
    if group.released:
        return found
    note = "Our rows answer other questions about other images: the layout is the paper's, the numbers have no order."
    out = []
    for table in found:
        own = len(table.rows) - table.copied
        rows = tuple((f"{row[0]} ({STAND_IN})", *row[1:]) for row in table.rows[:own]) + table.rows[own:]
        title, notes = f"{table.title} ({STAND_IN})", (note, *table.notes)
        out.append(dataclasses.replace(table, title=title, rows=rows, notes=notes))
    return out


def intervals(group: Group) -> list[Table]:
    """The group's rows by track with clustered intervals, and its comparisons."""
    from pbs_jax.bench import compare, tables

    cells = group.scores.cells
    found = [tables.overview(cells, track, "paper") for track in dict.fromkeys(cell.track for cell in cells)]
    kind = "" if group.released else f" ({STAND_IN})"
    if group.comparisons:
        found.append(compare.to_table("Models minus their variants", group.comparisons))
    return [dataclasses.replace(table, title=f"{table.title}{kind}") for table in found]


def unfilled(groups: Sequence[Group]) -> list[Table]:
    """The paper's tables that no run here has rows for, as published."""
    from pbs_jax.bench import paper

    filled = {table.title.partition(":")[0] for group in groups for table in shown(group)}
    return [table for table in paper.all_tables() if table.title.partition(":")[0] not in filled]


def not_comparable(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before the first number."""
    lines = [
        "Rows with a dagger are copied from arXiv 2604.17570 and take part in no test, interval or rank. The released "
        "in-domain cell questions are not those of its Table 2.",
        "Table 6 (with and without alignment): the published differences lie within about one standard deviation, "
        "so the paper's numbers alone leave the effect open.",
    ]
    if any(not group.released for group in groups):
        lines.append(
            f"Rows marked {STAND_IN} come from small stand-in models or other question sets. They show that the tables can "
            "be filled, and are ranked against nothing."
        )
    if not any(group.released for group in groups):
        lines.append(
            "No run here answers the released PBSBench questions: no row of ours can be compared with the paper's."
        )
    return lines


def alignment_gaps() -> Table:
    """Table 6's differences between PBS-VL and PBS-VL without alignment, in standard deviations of the difference."""
    from pbs_jax.bench import paper
    from pbs_jax.bench.tables import METRIC_NAMES, TYPE_NAMES, Table

    by_column: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in paper.entries():
        if entry.table == 6:
            by_column.setdefault((entry.question_type, entry.metric), {})[entry.model] = entry
    rows = []
    for (question_type, metric), found in by_column.items():
        with_it, without = found["PBS-VL"], found["PBS-VL w/o align"]
        gap, spread = with_it.value - without.value, math.hypot(with_it.sd, without.sd)
        name = f"{TYPE_NAMES[question_type]} {METRIC_NAMES[metric]}"
        rows.append((name, f"{with_it.value:.2f}", f"{without.value:.2f}", f"{gap:+.2f}", f"{gap / spread:+.1f}"))
    header = ("", "with", "without", "difference", "in sd of the difference")
    notes = (
        "Both models answer the same questions, so the true sd of the difference is smaller; it is not published.",
    )
    return Table("Table 6 of the paper: with alignment minus without", header, tuple(rows), notes)
