"""Tables of scores in Markdown, LaTeX and CSV: blind rows on top, intervals and n with every number, signatures below.

A column takes numbers of one signature only (metric definition, answer mode, protocol, dataset id); a mix is refused.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from data_prep.schema import QUESTION_TYPES, DataError
from pbs_jax.bench import validity
from pbs_jax.bench.evaluate import ALL, Cell

MIN_COVERAGE = 0.995
MANY_INVALID = 0.02
GROUP_NOTES = ("not rankable", validity.INVALID)  # notes of a cell that concern every row of its column
TYPE_NAMES = {"true_false": "T/F", "multiple_choice": "MCQ", "fill_blank": "FB", "open": "Open"}
METRIC_NAMES = {
    "accuracy": "Acc",
    "accuracy_strict": "Acc strict",
    "balanced_accuracy": "Bal. acc",
    "mcc": "MCC",
    "yes_rate": "Yes rate",
    "exact_match": "EMatch",
    "partial_match": "PMatch",
    "bleu1": "BLEU-1",
    "rouge_l": "ROUGE-L",
    "similarity": "Sim",
    "invalid": "Invalid",
}
TRACKS = {
    "cell_id": "Cell, in domain",
    "cell_ood": "Cell, out of domain",
    "slide_id": "Slide",
    "slide_ood": "Slide, OOD",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """`rows` begin with the row's name; `rule_after` rows a rule is drawn (blind above, models below).

    The last `copied` rows are another source's numbers, under a rule of their own.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    rule_after: int = 0
    copied: int = 0


def one_signature(column: Sequence[Cell], name: str, title: str) -> None:
    """Raises DataError when the column's numbers have different signatures."""
    if len({cell.signature for cell in column}) > 1:
        raise DataError(f'column {name} of "{title}" mixes signatures: score the rows under one set-up')


def build(
    title: str, cells: Iterable[Cell], *, by: str = "metric", mark: Callable[[Cell], str] = lambda cell: ""
) -> Table:
    """A table of the cells: one row per `row`, one column per (question type, task, metric) in the cells' order.

    `by` "metric" names columns by type and metric, "task" by task and metric; `mark` is put behind a number. Raises
    DataError when a column mixes signatures.
    """
    columns: dict[tuple[str, str, str], list[Cell]] = {}
    chosen = sorted(cells, key=lambda cell: (QUESTION_TYPES.index(cell.question_type), cell.task != ALL, cell.task))
    for cell in chosen:
        columns.setdefault((cell.question_type, cell.task, cell.metric), []).append(cell)
    ranked = sorted(chosen, key=lambda cell: (cell.kind != "blind", cell.rank))
    rows = {cell.row: cell.kind for cell in ranked}
    for name, column in columns.items():
        one_signature(column, " ".join(name), title)
    at = {(cell.row, cell.question_type, cell.task, cell.metric): cell for cell in chosen}

    def shown(cell: Cell | None) -> str:
        return show(cell) + (mark(cell) if cell else "")

    body = tuple((row, *(shown(at.get((row, *name))) for name in columns)) for row in rows)
    header = ("", *(_header(name, column, by) for name, column in columns.items()))
    notes = merged(note for cell in chosen for note in cell_notes(cell))
    footer = signatures(columns.values())
    return Table(title, header, body, (*notes, *footer), sum(kind == "blind" for kind in rows.values()))


def signatures(columns: Iterable[Sequence[Cell]]) -> list[str]:
    """Notes with the signature of every column, which its numbers share; empty columns have none."""
    found: dict[str, list[str]] = {}
    for column in filter(None, columns):
        definition, _, origin = column[0].signature.partition("|")
        found.setdefault(origin, []).append(definition)
    return [f"Signature {origin}: {', '.join(dict.fromkeys(names))}" for origin, names in found.items()]


def overview(cells: Sequence[Cell], track: str, profile: str, notes: Sequence[str] = ()) -> Table:
    """All question types of a track side by side (paper, Tables 2 and 3), over all tasks.

    Invalid answers have a column where a model gave any.
    """
    kept = overview_cells(cells, track, profile)
    spoken = {cell.metric for cell in kept if cell.question_type == "open"}
    absent = ["Open: Sim not computed"] if spoken and "similarity" not in spoken else []
    return _with_notes(build(f"{TRACKS.get(track, track)} - {profile} profile", kept), [*notes, *absent])


def breakdown(cells: Sequence[Cell], track: str, profile: str, question_type: str) -> Table:
    """One question type by task (paper, Tables 8 to 12), first metric and the share of invalid answers."""
    kept = [c for c in cells if (c.track, c.profile, c.question_type) == (track, profile, question_type)]
    first = next((c.metric for c in kept), "")
    if question_type == "true_false":
        first = "balanced_accuracy"
    kept = [c for c in kept if c.metric in (first, "invalid")]
    name = f"{TRACKS.get(track, track)} - {TYPE_NAMES[question_type]} by task - {profile} profile"
    return build(name, kept, by="task")


def overview_cells(cells: Sequence[Cell], track: str, profile: str) -> list[Cell]:
    """The overview's numbers: over all tasks, invalid answers where a model gave any."""
    kept = [c for c in cells if (c.track, c.profile, c.task) == (track, profile, ALL) and c.metric != "yes_rate"]
    unread = {c.question_type for c in kept if c.metric == "invalid" and c.kind == "model" and c.value}
    return [c for c in kept if c.metric != "invalid" or c.question_type in unread]


def _with_notes(table: Table, notes: Sequence[str]) -> Table:
    return dataclasses.replace(table, notes=(*notes, *table.notes))


def all_tables(
    cells: Sequence[Cell],
    breakdown_profiles: Sequence[str] = ("paper", "robust"),
    notes: Mapping[str, Sequence[str]] | None = None,
) -> list[Table]:
    """Per track: the overview of every profile, then every question type by task in `breakdown_profiles`.

    `notes`: by track, sentences that stand under each of its overviews.
    """
    out = []
    for track in dict.fromkeys(cell.track for cell in cells):
        here = [cell for cell in cells if cell.track == track]
        profiles = dict.fromkeys(cell.profile for cell in here)
        out += [overview(here, track, profile, (notes or {}).get(track, ())) for profile in profiles]
        for profile in profiles:
            types = dict.fromkeys(cell.question_type for cell in here) if profile in breakdown_profiles else ()
            out += [breakdown(here, track, profile, question_type) for question_type in types]
    return out


def over_seeds(cells: Sequence[Cell]) -> Table:
    """Mean, sd and each seed's value of every row that has several, in the last profile."""
    profile = cells[-1].profile
    rows = []
    for cell in sorted(cells, key=lambda cell: (cell.track, cell.rank)):
        if len(cell.seeds) > 1 and cell.profile == profile and cell.metric not in ("invalid", "yes_rate"):
            name = f"{cell.row}: {TRACKS.get(cell.track, cell.track)}, {TYPE_NAMES[cell.question_type]}, {cell.task}"
            mean, spread = _over_seeds(cell)
            each = ", ".join(f"{value:.3f}" for value in cell.seeds)
            rows.append((name, METRIC_NAMES[cell.metric], str(cell.n), f"{mean:.3f}", f"{spread:.3f}", each))
    return Table(f"Seeds - {profile} profile", ("", "metric", "n", "mean", "sd", "each"), tuple(rows))


def _over_seeds(cell: Cell) -> tuple[float, float]:
    """Mean and sample standard deviation."""
    return statistics.fmean(cell.seeds), statistics.stdev(cell.seeds)


def _header(name: tuple[str, str, str], column: Sequence[Cell], by: str) -> str:
    question_type, task, metric = name
    lead = TYPE_NAMES[question_type] if by == "metric" else task
    return f"{lead} {METRIC_NAMES[metric]} (n={max(cell.n for cell in column)})"


def merged(notes: Iterable[str]) -> list[str]:
    """Notes of the form "where: what", each what once with all its wheres."""
    places: dict[str, dict[str, None]] = {}
    for note in notes:
        where, _, what = note.partition(": ")
        places.setdefault(what, {})[where] = None
    return [f"{', '.join(where)}: {what}" for what, where in places.items()]


def cell_notes(cell: Cell) -> list[str]:
    """What must stand under a table that shows the cell."""
    where = TYPE_NAMES[cell.question_type] + ("" if cell.task == ALL else f" {cell.task}")
    notes = [f"{where}: {note}" for note in cell.notes if note.startswith(GROUP_NOTES)]
    if cell.task != ALL:
        return notes  # what concerns rows is said once, for all tasks
    if cell.kind == "model" and cell.metric == "invalid" and (cell.value or 0) > MANY_INVALID:
        notes.append(f"{cell.row}: {cell.value:.1%} of the {where} replies can't be read ({cell.profile} profile)")
    if cell.coverage < MIN_COVERAGE:
        notes.append(f"{cell.row}: {cell.coverage:.1%} of the {where} questions answered")
    return notes


def show(cell: Cell | None) -> str:
    """0.982 [0.971, 0.992], with the sd over seeds where there are several; words where there is no number."""
    if cell is None:
        return "-"
    if cell.coverage < MIN_COVERAGE:
        return f"refused ({cell.coverage:.1%} answered)"
    if cell.value is None:
        return "n/a"
    text = f"{cell.value:.3f}"
    if cell.metric == "invalid":
        return text
    if len(cell.seeds) > 1:
        text += f" ±{_over_seeds(cell)[1]:.3f}"
    if "small n" in cell.notes or cell.low is None or cell.high is None:
        return f"{text} (n={cell.n})"
    if cell.t_low is not None and cell.t_high is not None:  # few clusters
        return f"{text} [{cell.low:.3f}, {cell.high:.3f}; t {cell.t_low:.3f}, {cell.t_high:.3f}]"
    return f"{text} [{cell.low:.3f}, {cell.high:.3f}]"


def to_markdown(table: Table) -> str:
    def line(fields: Sequence[str]) -> str:
        return "| " + " | ".join(field.replace("|", "/") for field in fields) + " |"

    lines = [f"### {table.title}", "", line(table.header), line(["---"] * len(table.header))]
    lines += [line(row) for row in table.rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""])


def to_latex(table: Table) -> str:
    """A float that needs booktabs and graphicx: scaled down to the line where it is wider, its notes in print below."""

    def line(fields: Sequence[str]) -> str:
        return " & ".join(map(_escape, fields)) + r" \\"

    body = [line(row) for row in table.rows]
    if 0 < table.rule_after < len(body):
        body.insert(table.rule_after, r"\midrule")
    if 0 < table.copied < len(table.rows):
        body.insert(len(body) - table.copied, r"\midrule")
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape(table.title)}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{l{'c' * (len(table.header) - 1)}}}",
            r"\toprule",
            line(table.header),
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            *(rf"\par\raggedright\scriptsize {_escape(note)}" for note in table.notes),
            r"\end{table}",
            "",
        ]
    )


def _escape(text: str) -> str:
    return "".join(f"\\{c}" if c in "&%$#_{}" else _LATEX.get(c, c) for c in text)


_LATEX = {
    "±": r"$\pm$", "†": r"\dag{}", "‡": r"\ddag{}", "≥": r"$\geq$", "≤": r"$\leq$", "−": "$-$", "√": r"$\surd$",
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def tables_csv(shown: Iterable[Table]) -> str:
    """The tables as shown, one below the other, each line led by its title."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for table in shown:
        writer.writerow(("table", *table.header))
        writer.writerows((table.title, *row) for row in table.rows)
    return out.getvalue()


def to_csv(cells: Sequence[Cell]) -> str:
    """One line per number with every field: what a spreadsheet or a script wants."""
    out = io.StringIO()
    fields = [field.name for field in dataclasses.fields(Cell)]
    writer = csv.DictWriter(out, fields, lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        record = dataclasses.asdict(cell)
        writer.writerow(record | {"seeds": " ".join(map(repr, cell.seeds)), "notes": "; ".join(cell.notes)})
    return out.getvalue()
