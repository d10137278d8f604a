"""run_report.html of a training run: curves, where the time went, what started it. Written at the end of every
start, also of one that a signal or an error ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep import charts, html
from data_prep.io import atomic_write
from pbs_jax.train.clock import FILE as GOODPUT
from pbs_jax.train.clock import PARTS

FILE = "run_report.html"
PANELS = {
    "Loss": ("train/loss", "val/loss"),
    "Norms": ("train/grad_norm", "norm/param_norm", "norm/update_norm"),
    "Learning rate": ("lr",),
    "Step time, s": ("time/step_s",),
    "Share of the time waiting for input": ("time/input_wait_share",),
}
ELSEWHERE = {"train/loss", "val/loss", "train/grad_norm"}


def write_report(workdir: Path) -> Path:
    """The page of a run from its metrics.jsonl, config.json, goodput.jsonl and, once finished, handover.json."""
    metrics = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    config = json.loads((workdir / "config.json").read_text())
    series: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step":
                series.setdefault(name, []).append((line["step"], value))
    panels = [
        charts.line_chart({name: series[name] for name in names if name in series}, title, floor=0.0)
        for title, names in PANELS.items()
    ]
    parts = sorted(name for name in series if name.startswith(("train/", "val/")) and name not in ELSEWHERE)
    if parts:
        panels.append(
            charts.line_chart({name: series[name] for name in parts}, "Parts of the loss, accuracies", floor=0.0)
        )
    sections = [
        html.Section("Curves", html.columns(panels)),
        html.Section(
            "Where the time went",
            _goodput(workdir),
            "Seconds by part, a line a start; of a killed one until its last save.",
        ),
        html.Section(
            "Last values", html.table([(n, f"{p[-1][1]:.4g}") for n, p in sorted(series.items())], ("metric", "value"))
        ),
        html.Section("Configuration", html.table(_flat(config), ("field", "value"))),
    ]
    page = html.render_page(
        f"Run of phase {config['phase']}",
        sections,
        subtitle=f"size {config['size']}, {lines[-1]['step'] if lines else 0:,} steps of {config['batch_size']}",
    )
    atomic_write(workdir / FILE, page)
    return workdir / FILE


def _goodput(workdir: Path) -> str:
    path = workdir / GOODPUT
    if not path.exists():
        return html.paragraph("Not measured yet.")
    starts = [json.loads(line) for line in path.read_text().splitlines()]
    columns = (*PARTS, "other")
    rows: list[Any] = [
        (number, start["steps"], *(start[part] for part in columns)) for number, start in enumerate(starts, 1)
    ]
    total = [sum(start[part] for start in starts) for part in columns]
    whole = max(sum(total), 1e-9)
    rows.append(("share", sum(start["steps"] for start in starts), *(f"{value / whole:.1%}" for value in total)))
    return html.table(rows, ("start", "steps", *columns))


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in sorted(config.items()):
        rows += _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, str(value))]
    return rows
