"""Radar charts as the paper's Fig. 2: every metric of a track as a share of one model's, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from data_prep.charts import figure
from pbs_jax.bench import paper
from pbs_jax.bench.evaluate import ALL, Cell
from pbs_jax.bench.tables import METRIC_NAMES, MIN_COVERAGE, TRACKS, TYPE_NAMES

AXES = (
    ("true_false", "accuracy"),
    ("multiple_choice", "accuracy"),
    ("fill_blank", "exact_match"),
    ("fill_blank", "partial_match"),
    ("open", "bleu1"),
    ("open", "rouge_l"),
    ("open", "similarity"),
)
MOST = 6  # polygons: the theme has six colours, and more can't be told apart
FEWEST_AXES = 3
WIDTH, HEIGHT, RADIUS = 460, 330, 112
TOP_SHARE = 1.5  # a share above it is drawn on the rim
Values = Sequence[float | None]


def radar(series: Mapping[str, Values], axes: Sequence[str], title: str, reference: str) -> str:
    """SVG figure of `series` {name: one value per axis, None unknown}, each divided by the `reference` series' value.

    Axes where the reference is unknown or 0 are left out; below three axes the figure is a sentence. At most MOST
    series are drawn, the reference among them: those with the largest mean share.
    """
    base = series[reference]
    kept = [k for k, value in enumerate(base) if value is not None and value > 0]
    if len(kept) < FEWEST_AXES:
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption><p>too few metrics</p></figure>'
    shares = {name: [_share(values[k], base[k]) for k in kept] for name, values in series.items()}
    known = {name: [s for s in found if s is not None] for name, found in shares.items()}
    ranked = sorted(known, key=lambda name: (name != reference, -sum(known[name]) / max(len(known[name]), 1)))
    drawn = [name for name in ranked if len(known[name]) >= FEWEST_AXES][:MOST]
    top = min(max(1.0, *(max(known[name]) for name in drawn)), TOP_SHARE)
    marks = [_ring(share / top, len(kept), share) for share in (0.25, 0.5, 0.75, 1.0)]
    marks += [_axis(j, len(kept), axes[k], float(base[k] or 0)) for j, k in enumerate(kept)]
    legend = []
    for k, name in enumerate(drawn):
        colour = f"var(--c{k + 1})"
        points = [_point(j, len(kept), min(s, top) / top) for j, s in enumerate(shares[name]) if s is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        fill = 'fill-opacity="0.14"' if name == reference else 'fill-opacity="0"'
        marks.append(f'<polygon points="{path}" fill="{colour}" {fill} stroke="{colour}" stroke-width="1.8"/>')
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in points]
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name)}</span>')
    if more := len(series) - len(drawn):
        legend.append(f"<span>{more} more in the tables</span>")
    return figure(title, WIDTH, HEIGHT, marks, legend)


def _share(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else max(value, 0.0) / base


def _point(j: int, count: int, share: float) -> tuple[float, float]:
    angle = 2 * math.pi * j / count - math.pi / 2
    return WIDTH / 2 + RADIUS * share * math.cos(angle), HEIGHT / 2 + RADIUS * share * math.sin(angle)


def _ring(share: float, count: int, label: float) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (_point(j, count, share) for j in range(count)))
    x, y = _point(0, count, share)
    text = f'<text x="{x + 3:.1f}" y="{y - 2:.1f}">{label:g}</text>' if label < 1 else ""
    return f'<polygon class="rule" points="{corners}" fill="none"/>{text}'


def _axis(j: int, count: int, name: str, base: float) -> str:
    (x1, y1), (x2, y2) = _point(j, count, 1.0), _point(j, count, 1.1)
    side = x2 - WIDTH / 2
    anchor = "middle" if abs(side) < 8 else "start" if side > 0 else "end"
    down = -13 if j == 0 else 10 if y2 > HEIGHT / 2 + RADIUS / 2 else -4 if y2 < HEIGHT / 2 - RADIUS / 2 else 0
    return (
        f'<line class="rule" x1="{WIDTH / 2}" y1="{HEIGHT / 2}" x2="{x1:.1f}" y2="{y1:.1f}"/>'
        f'<text class="name" x="{x2:.1f}" y="{y2 + down:.1f}" text-anchor="{anchor}">{escape(name)}'
        f'<tspan x="{x2:.1f}" dy="13">1 = {base:.2f}</tspan></text>'
    )


def of_paper(track: str) -> str:
    """Fig. 2 from the printed tables, as shares of PBS-VL's; every name has its dagger."""
    number = 3 if track == "slide_id" else 2
    values: dict[str, dict[tuple[str, str], float]] = {}
    for entry in paper.entries():
        if (entry.table, entry.track, entry.task) == (number, track, ALL):
            values.setdefault(entry.model, {})[entry.question_type, entry.metric] = entry.value
    series = {paper.marked(model): [found.get(axis) for axis in AXES] for model, found in values.items()}
    title = f"{TRACKS[track]}: the paper's numbers {paper.DAGGER} (Fig. 2)"
    return radar(series, _names(), title, paper.marked("PBS-VL"))


def of_cells(cells: Sequence[Cell], track: str, profile: str) -> str:
    """The same of our rows: models, and rows without image that answer at least three metrics; the first model is 1."""
    here = [c for c in cells if (c.track, c.profile, c.task) == (track, profile, ALL) and c.coverage >= MIN_COVERAGE]
    order = sorted(here, key=lambda cell: (cell.kind != "model", cell.rank))
    series = {
        row: [
            next((c.value for c in here if (c.row, c.question_type, c.metric) == (row, *axis)), None) for axis in AXES
        ]
        for row in dict.fromkeys(cell.row for cell in order)
    }
    first = next((cell.row for cell in order if cell.kind == "model"), None)
    if first is None:
        return ""
    return radar(series, _names(), f"{TRACKS.get(track, track)}: shares of {first} ({profile} profile)", first)


def _names() -> list[str]:
    return [f"{TYPE_NAMES[question_type]} {METRIC_NAMES[metric]}" for question_type, metric in AXES]
