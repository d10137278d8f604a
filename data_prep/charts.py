"""Charts of the reports as inline SVG: curves over steps, bars with intervals. Colours come from the page's theme."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34  # margins around the plot
MAX_POINTS = 200  # of one curve; longer ones are averaged in bins


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One row of `interval_bars`. low and high bound the interval (None: not drawn); `strong`: the measured system."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    strong: bool = False


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    *,
    x_label: str = "step",
    floor: float | None = None,
) -> str:
    """Curves of (x, y) points by name. Points that are not finite are left out; `floor` is a y value to include."""
    curves = {name: binned(points) for name, points in series.items()}
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return f'<figure class="chart"><figcaption>{escape(title)}</figcaption><p>no points yet</p></figure>'
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points] + ([floor] if floor is not None else [])
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys), 4)
    x0, x1 = min(xs), max(max(xs), min(xs) + 1e-9)
    y0, y1 = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def px(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    out = []
    for tick in y_ticks:
        out.append(f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{py(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    for tick in (t for t in x_ticks if x0 <= t <= x1):
        out.append(f'<text x="{px(tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:,g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
    legend = []
    for k, (name, points) in enumerate(curves.items()):
        colour = f"var(--c{k % 6 + 1})"
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in points)
        x, y = points[-1]
        out.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>'
        )
        out.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6" fill="{colour}"/>')
        legend.append(f'<span><i style="background:{colour}"></i>{escape(name)} {y:.3g}</span>')
    return figure(title, WIDTH, HEIGHT, out, legend)


def interval_bars(
    bars: Iterable[Bar], title: str, *, x_max: float = 1.0, reference: tuple[float, str] | None = None
) -> str:
    """Horizontal bars from 0 to `x_max` with intervals. `reference`: (value, name) of a vertical line, e.g. chance."""
    rows = list(bars)
    name_width = min(max((len(bar.label) for bar in rows), default=0) * 6.4 + 14, 230)
    row, width = 24, 520
    height = len(rows) * row + 26
    right = width - 52

    def px(value: float) -> float:
        return name_width + min(max(value / x_max, 0.0), 1.0) * (right - name_width)

    out = []
    for tick in (t for t in ticks(0.0, x_max, 5) if t <= x_max):
        out.append(_vertical(px(tick), 2, height - 20, 'class="rule"'))
        out.append(f'<text x="{px(tick):.1f}" y="{height - 6}" text-anchor="middle">{tick:g}</text>')
    for k, bar in enumerate(rows):
        y, weight = k * row + 14, " strong" if bar.strong else ""
        colour = "var(--c1)" if bar.strong else "var(--rest)"
        text = f'<text class="name{weight}" y="{y + 4}"'
        out.append(f'{text} x="{name_width - 8}" text-anchor="end">{escape(bar.label)}</text>')
        size = f'width="{px(bar.value) - name_width:.1f}" height="14"'
        out.append(f'<rect x="{name_width:.1f}" y="{y - 7}" {size} rx="2" fill="{colour}"/>')
        if bar.low is not None and bar.high is not None:
            low, high = px(bar.low), px(bar.high)
            path = f"M{low:.1f} {y - 4}v8M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 4}v8"
            out.append(f'<path d="{path}" fill="none" stroke="var(--ink)" stroke-width="1.3"/>')
        out.append(f'{text} x="{right + 8}">{bar.value:.3f}</text>')
    legend = []
    if reference:
        value, name = reference
        out.append(_vertical(px(value), 0, height - 20, 'stroke="var(--c3)" stroke-width="1.5" stroke-dasharray="4 3"'))
        legend.append(f'<span><i style="background:var(--c3)"></i>{escape(name)} {value:g}</span>')
    return figure(title, width, height, out, legend)


def _vertical(x: float, top: float, bottom: float, attributes: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" {attributes}/>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that span [low, high]."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points: means of consecutive runs, so that a long noisy curve stays light and readable."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    size = math.ceil(len(finite) / MAX_POINTS)
    if size <= 1:
        return finite
    runs = [finite[k : k + size] for k in range(0, len(finite), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def figure(title: str, width: float, height: float, marks: Sequence[str], legend: Sequence[str]) -> str:
    """A titled SVG of the marks (SVG strings) with a legend (HTML strings): the frame of every chart."""
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(marks)}</svg>'
        + (f'<div class="legend">{"".join(legend)}</div>' if legend else "")
        + "</figure>"
    )
