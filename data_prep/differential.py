"""The white-cell differential of a slide: counts per class, shares with 95 % Wilson intervals, or why there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from data_prep.schema import OTHERS, WHITE_CELL_CLASSES
from data_prep.stats import wilson

FEWEST = 20  # cells: with fewer the intervals span half of the scale, and no share is printed


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One class: its count and share in percent, with the bounds of the 95 % interval."""

    label: str
    count: int
    percent: float
    low: float
    high: float


def counts(found: Mapping[str, int]) -> dict[str, int]:
    """The white cells of a count of labels, classes in the schema's order: artefacts and unnamed cells are left out."""
    return {label: found[label] for label in (*WHITE_CELL_CLASSES, OTHERS) if found.get(label)}


def shares(counted: Mapping[str, int]) -> list[Share]:
    """The differential; empty for fewer than FEWEST cells."""
    total = sum(counted.values())
    if total < FEWEST:
        return []
    out = []
    for label in (*WHITE_CELL_CLASSES, *([OTHERS] if counted.get(OTHERS) else [])):
        n = counted.get(label, 0)
        low, high = wilson(n, total)
        out.append(Share(label, n, 100 * n / total, 100 * low, 100 * high))
    return out


def sentence(counted: Mapping[str, int]) -> str:
    """One line for summaries: "Neutrophil 61.0 % (52.1-69.2), ... of 118 cells", or why there is none."""
    total = sum(counted.values())
    found = shares(counted)
    if not found:
        return f"no differential: {total} classified white cells, at least {FEWEST} are needed"
    parts = [f"{s.label} {s.percent:.1f} % ({s.low:.1f}-{s.high:.1f})" for s in found]
    return f"{', '.join(parts)} of {total} cells"
