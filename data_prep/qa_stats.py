"""How many questions of which kind: Tables 1 and 4 of the paper for any question set, beside the paper's own numbers."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from data_prep.schema import CELL_TASKS, QA, QUESTION_TYPES, SLIDE_TASKS, DataError

TYPE_NAMES = {
    "true_false": "True/False",
    "multiple_choice": "MCQ",
    "fill_blank": "Fill-in-the-Blank",
    "open": "Open-ended",
}
FORMATS = ("text", "csv", "latex")
Group = tuple[str, str, str]  # level, domain, split
# Table 4 of the paper: rows of true/false, multiple choice, fill in the blank, open.
PAPER: Mapping[Group, Mapping[str, tuple[int, int, int, int]]] = {
    ("cell", "id", "train"): {
        "morphology": (4972, 4481, 3263, 877),
        "abnormality": (1702, 1729, 808, 3294),
        "cell_subtyping": (134, 647, 2360, 401),
        "knowledge": (334, 1183, 397, 719),
    },
    ("cell", "id", "test"): {
        "morphology": (670, 625, 454, 108),
        "abnormality": (231, 222, 103, 432),
        "cell_subtyping": (22, 103, 318, 50),
        "knowledge": (34, 138, 41, 109),
    },
    ("cell", "ood", "test"): {
        "morphology": (720, 894, 688, 134),
        "abnormality": (7, 304, 123, 824),
        "cell_subtyping": (0, 43, 85, 19),
        "knowledge": (0, 252, 179, 223),
    },
    ("slide", "id", "train"): {
        "morphology": (269, 157, 189, 27),
        "abnormality": (16, 21, 4, 6),
        "cell_differential": (39, 250, 16, 0),
        "knowledge": (0, 1, 0, 137),
        "diagnosis": (1, 78, 4, 71),
    },
    ("slide", "id", "test"): {
        "morphology": (31, 18, 20, 1),
        "abnormality": (0, 6, 1, 3),
        "cell_differential": (4, 26, 1, 0),
        "knowledge": (0, 0, 0, 13),
        "diagnosis": (0, 5, 0, 9),
    },
}
PAPER_CELLS = {("cell", "id", "train"): 3744, ("cell", "id", "test"): 500, ("cell", "ood", "test"): 1498}


@dataclasses.dataclass(frozen=True, slots=True)
class CountTable:
    """`rows`: names first, then "ours" and "paper" in turn; None where the paper has no such group."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str | int | None, ...], ...]


def tables(questions: Iterable[QA]) -> list[CountTable]:
    """Tables 1 and 4 in one pass."""
    counts: Counter[tuple[Group, str, str]] = Counter()
    images: dict[Group, set[str]] = {}
    for qa in questions:
        group = qa.level, qa.domain, qa.split
        counts[group, qa.task, qa.question_type] += 1
        images.setdefault(group, set()).add(qa.image_id)
    if not images:
        raise DataError("there is no question to count")
    groups = sorted(images, key=lambda g: (g[0], g[1], ("train", "val", "test").index(g[2])))
    return [*_by_task(groups, counts, images), _by_type(groups, counts)]


def _tasks(level: str) -> tuple[str, ...]:
    return CELL_TASKS if level == "cell" else SLIDE_TASKS


def _by_task(
    groups: Sequence[Group], counts: Counter[tuple[Group, str, str]], images: Mapping[Group, set[str]]
) -> list[CountTable]:
    out = []
    for level in dict.fromkeys(group[0] for group in groups):
        rows: list[tuple[str | int | None, ...]] = []
        for group in (group for group in groups if group[0] == level):
            paper = PAPER.get(group)
            ours = [sum(counts[group, task, kind] for kind in QUESTION_TYPES) for task in _tasks(level)]
            theirs = [sum(paper.get(task, (0,))) if paper else None for task in _tasks(level)]
            whole = sum(map(sum, paper.values())) if paper else None
            rows.append((_name(group), "ours", *ours, sum(ours), len(images[group])))
            rows.append((_name(group), "paper", *theirs, whole, PAPER_CELLS.get(group)))
        header = ("", "", *map(_words, _tasks(level)), "QAs", f"{level}s")
        out.append(CountTable(f"Questions by task, {level} level (Table 1)", header, tuple(rows)))
    return out


def _by_type(groups: Sequence[Group], counts: Counter[tuple[Group, str, str]]) -> CountTable:
    rows: list[tuple[str | int | None, ...]] = []
    for group in groups:
        paper = PAPER.get(group)
        sums: list[list[int]] = []
        for task in _tasks(group[0]):
            ours = [counts[group, task, kind] for kind in QUESTION_TYPES]
            theirs = paper.get(task, (0, 0, 0, 0)) if paper else None
            if any(ours) or any(theirs or ()):
                rows.append((_name(group), _words(task), *_pairs(ours, theirs)))
                sums.append(ours)
        total = [sum(column) for column in zip(*sums, strict=True)]
        whole = [sum(column) for column in zip(*paper.values(), strict=True)] if paper else None
        rows.append((_name(group), "subtotal", *_pairs(total, whole)))
    names = [*TYPE_NAMES.values(), "subtotal"]
    header = ("", "task", *(part for name in names for part in (name, f"{name}, paper")))
    return CountTable("Questions by task and type (Table 4)", header, tuple(rows))


def _pairs(ours: Sequence[int], paper: Sequence[int] | None) -> list[int | None]:
    """Ours and the paper's in turn, with their sums at the end."""
    theirs: list[int | None] = [*paper, sum(paper)] if paper else [None] * (len(ours) + 1)
    return [value for pair in zip([*ours, sum(ours)], theirs, strict=True) for value in pair]


def _name(group: Group) -> str:
    return f"{group[0]} {group[1].upper()} {group[2]}"


def _words(task: str) -> str:
    return task.replace("_", " ")


def render(found: Sequence[CountTable], format: str) -> str:
    """The tables as text, CSV or LaTeX (booktabs). Raises DataError for another format."""
    match format:
        case "text":
            return "\n".join(map(_text, found))
        case "csv":
            out = io.StringIO()
            for table in found:
                csv.writer(out).writerows([[table.title], table.header, *table.rows, []])
            return out.getvalue()
        case "latex":
            return "\n".join(map(_latex, found))
    raise DataError(f'--format "{format}" is unknown: use {", ".join(FORMATS)}')


def _shown(value: str | int | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def _text(table: CountTable) -> str:
    lines = [table.header, *(tuple(map(_shown, row)) for row in table.rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(table.header))]
    body = [
        "  ".join(
            cell.ljust(w) if k < 2 else cell.rjust(w) for k, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([table.title, *(line.rstrip() for line in body), ""])


def _latex(table: CountTable) -> str:
    rows = [" & ".join(map(_shown, row)) + r" \\" for row in table.rows]
    return "\n".join(
        [
            r"\begin{table}\centering",
            rf"\caption{{{table.title}}}",
            rf"\begin{{tabular}}{{ll{'r' * (len(table.header) - 2)}}}",
            r"\toprule",
            " & ".join(table.header) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}\end{table}",
            "",
        ]
    )
