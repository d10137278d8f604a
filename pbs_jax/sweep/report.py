"""sweep.html, .md and .json: a row per run, the metric over the steps, the best run, and where the configs differ."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep import charts, html
from data_prep.io import atomic_write
from pbs_jax import config
from pbs_jax.sweep.pool import EXIT_CODE, LOG, folder, is_finished
from pbs_jax.sweep.spec import Run, Sweep

METRICS = "metrics.jsonl"
ONE_EACH = (
    "One run a setting has no interval: a difference smaller than that between seeds of one setting says nothing. "
    "The value is the last evaluation's on val, and val chose the best: report the test split, asked once."
)


@dataclasses.dataclass(frozen=True)
class Result:
    """State of a run: finished, failed (why), stopped at a step, submitted or not started; its metric's points."""

    run: Run
    state: str
    step: int
    points: tuple[tuple[float, float], ...]
    losses: tuple[tuple[float, float], ...]
    why: str = ""

    @property
    def value(self) -> float | None:
        return self.points[-1][1] if self.points else None

    @property
    def ranked(self) -> bool:
        """Only a finished run with a finite value competes."""
        return self.state == "finished" and self.value is not None and math.isfinite(self.value)


def result(sweep: Sweep, out: Path, run: Run) -> Result:
    """Reads what a run left. A torn last line of its metrics is no fault: the run may be writing it."""
    place = folder(out, run)
    lines = []
    if (place / METRICS).is_file():
        for line in (place / METRICS).read_text().splitlines():
            if line.endswith("}"):
                lines.append(json.loads(line))
    step = max((line["step"] for line in lines), default=0)
    points, losses = (
        tuple((line["step"], line[name]) for line in lines if name in line) for name in (sweep.metric, "train/loss")
    )
    code = (place / EXIT_CODE).read_text().strip() if (place / EXIT_CODE).is_file() else ""
    state, why = "not started", ""
    if is_finished(out, run):
        state = "finished"
        if not points:
            known = sorted({name for line in lines for name in line if name.startswith("val/")})
            why = f"no {sweep.metric} in its metrics: METRIC may be {', '.join(known) or 'a metric of train/'}"
    elif code not in ("", "0", "75"):
        log = (place / LOG).read_text(errors="replace").strip().splitlines()
        state, why = "failed", log[-1][:300] if log else f"exit code {code}"
    elif lines:
        state = "stopped"
    elif code == "0":
        state = "submitted"
    return Result(run, state, step, points, losses, why)


def best(sweep: Sweep, results: Sequence[Result]) -> list[Result]:
    """The ranked run with the smallest or largest metric, or all that share it."""
    ranked = [item for item in results if item.ranked]
    values = [item.value for item in ranked if item.value is not None]
    return [item for item in ranked if item.value == (min if sweep.goal == "min" else max)(values)]


def verdict(sweep: Sweep, winners: Sequence[Result]) -> str:
    """One line; equal values make no run the best."""
    by = f"{sweep.metric} ({sweep.goal})"
    names = ", ".join(item.run.name for item in winners)
    if len(winners) > 1:
        return f"no best by {by}: a tie at {winners[0].value:.4f} of {names}"
    return f"best by {by}: {names}" if winners else "no run is finished"


def differences(sweep: Sweep) -> tuple[list[str], list[list[Any]]]:
    """Fields in which the runs' configurations differ, and every run's values of them."""
    views = [config.describe(sweep.load(run)) for run in sweep.runs]
    fields = [field for field in views[0] if len({repr(view.get(field)) for view in views}) > 1]
    return fields, [[view.get(field) for field in fields] for view in views]


def write(sweep: Sweep, out: Path) -> tuple[list[Result], list[Result]]:
    """Writes the report of what is there now; returns all results and those with the best value."""
    results = [result(sweep, out, run) for run in sweep.runs]
    winners = best(sweep, results)
    fields, values = differences(sweep)
    header = ["run", "state", "step", sweep.metric, *fields]
    rows = [
        [item.run.name, f"{item.state}{f': {item.why}' if item.why else ''}", item.step, item.value, *line]
        for item, line in zip(results, values, strict=True)
    ]
    said = verdict(sweep, winners)
    content = {
        "sweep": sweep.name,
        "config": sweep.config,
        "common": sweep.common,
        "metric": sweep.metric,
        "goal": sweep.goal,
        "best": winners[0].run.name if len(winners) == 1 else None,
        "tied": [item.run.name for item in winners] if len(winners) > 1 else [],
        "runs": [
            {"name": item.run.name, "state": item.state, "why": item.why, "step": item.step, "value": item.value}
            | {"differs": dict(zip(fields, line, strict=True))}
            for item, line in zip(results, values, strict=True)
        ],
    }
    atomic_write(out / "report.json", json.dumps(content, indent=1, default=str) + "\n")
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join("| " + " | ".join(_cell(field) for field in line) + " |" for line in lines)
    atomic_write(out / "report.md", f"# Sweep {sweep.name}\n\n{said}\n\n{table}\n\n{ONE_EACH}\n")
    atomic_write(out / "report.html", _page(sweep, results, winners, header, rows, said))
    return results, winners


def _cell(value: Any) -> str:
    return (
        "" if value is None else f"{value:.4f}" if isinstance(value, float) and value >= 0.1 else str(value)
    ).replace("|", "/")


def _page(
    sweep: Sweep, results: Sequence[Result], winners: list[Result], header: list[str], rows: list[list[Any]], said: str
) -> str:
    strong = [k for k, item in enumerate(results) if item in winners]
    shown = [
        [str(field) if isinstance(field, float) and k > 3 else field for k, field in enumerate(row)] for row in rows
    ]
    plots = [
        charts.line_chart({item.run.name: item.points for item in results}, sweep.metric),
        charts.line_chart({item.run.name: item.losses for item in results}, "train/loss"),
    ]
    card = [(winners[0].value, f"{sweep.metric}, {winners[0].run.name}", "best")] if len(winners) == 1 else []
    sections = [
        html.Section("Best", html.cards(card) + html.notice(ONE_EACH), said),
        html.Section(
            "Runs", html.table(shown, header, strong=strong), "The fields in which the configurations differ."
        ),
        html.Section("Curves", html.columns(plots)),
    ]
    common = f" {' '.join(sweep.common)}" if sweep.common else ""
    return html.render_page(f"Sweep {sweep.name}", sections, subtitle=f"--config={sweep.config}{common}")
