"""The demo's report.html: scores beside blind rows, slides, cells by class, curves, examples, PyTorch check."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pbs_jax
from data_prep import charts, html
from data_prep.io import atomic_write, open_dataset
from data_prep.progress import duration
from data_prep.schema import QUESTION_TYPES, WHITE_CELL_CLASSES, stable_hash
from data_prep.slide_datasets import read_slides
from data_prep.slide_report import slide_sections

if TYPE_CHECKING:
    from pbs_jax.demo import Step

NANO = (
    "Size nano: a stand-in backbone, supervised on the same cell labels, and answers from a closed list. The figures "
    "show that the parts work together; they are not comparable with the paper's tables."
)
DRAWN = "Cells and smears of this demo are drawn by a program with known attributes; no real blood is involved."
# The number that stands for each question type, and what guessing gives (None: it depends on the questions).
HEADLINE: dict[str, tuple[str, str, float | None]] = {
    "true_false": ("balanced_accuracy", "true or false, balanced accuracy", 0.5),
    "multiple_choice": ("accuracy", "multiple choice, accuracy", 0.25),
    "fill_blank": ("exact_match", "fill in the blank, exact match", None),
    "open": ("rouge_l", "open question, ROUGE-L", None),
}
PHASES = {
    "phase0_backbone": "phase 0a: backbone on cell labels",
    "phase0_language_model": "phase 0b: language model reads the caption in the visual slot",
    "phase1_cell_representation": "phase 1: Q-Former on captions",
    "phase2_cell_patch_alignment": "phase 2: patch tokens beside their cells'",
    "phase3_cell_qa": "phase 3: answers from cells",
    "phase4_slide_qa": "phase 4: answers from slides",
}
SLIDES_SHOWN = 4
CELLS_PER_CLASS = 9
EXAMPLES_PER_TYPE = 2


def write(out: Path, plan: Sequence[Step], seed: int, left_out: Sequence[str]) -> Path:
    """Puts report.html together from what the steps left under `out`."""
    images = {record["cell_id"]: record for record in open_dataset(out / "data" / "cells", "test")}
    slides = [slide for slide in read_slides(out / "slides") if slide.split == "test"]
    shown = slide_sections(out / "slides", out / "smears", slides, SLIDES_SHOWN)
    sections = [
        html.Section("Cells: result", scores(out, "cells"), "Held-out cells; 95 % intervals, resampled by image."),
        html.Section("Slides: result", scores(out, "slides"), "Held-out smears; 95 % intervals, resampled by slide."),
        *shown,
        html.Section("Cells", mosaic(images.values()), "Crops of the test split, by class."),
        html.Section("Training", html.columns(curves(out / "runs")), "Loss over the steps of each phase."),
        html.Section(
            "Examples",
            html.qa_examples(examples(out / "bench" / "cells" / "predictions.jsonl", images)),
            "Right and wrong ones.",
        ),
        html.Section("PyTorch", pytorch(out / "torch.json")),
        html.Section(
            "How this was made", commands(plan, out), "Each step is an ordinary command; DIR is the output folder."
        ),
    ]
    title = "Blood cells, read by a small model"
    page = html.render_page(
        title,
        sections,
        subtitle=f"pbs demo · synthetic cells and smears · size nano · seed {seed}",
        warnings=[f"{NANO} {DRAWN}", *left_out],
        footer=f"pbs {pbs_jax.__version__}",
    )
    path = out / "report.html"
    atomic_write(path, page)
    return path


def scores(out: Path, track: str) -> str:
    """`result` of the track's report ("cells" or "slides")."""
    return result(json.loads((out / "bench" / f"{track}_report" / "report.json").read_text())["cells"])


def result(scores: Sequence[dict[str, Any]]) -> str:
    """Cards, bars per question type, and the full table."""
    picked = [cell for cell in scores if cell["task"] == "all" and cell["profile"] == "robust"]
    tops, panels = [], []
    for kind in QUESTION_TYPES:
        metric, label, chance = HEADLINE[kind]
        rows = [c for c in picked if (c["question_type"], c["metric"]) == (kind, metric) and c["value"] is not None]
        model = next((cell for cell in rows if cell["kind"] == "model"), None)
        if model is None:
            continue
        tops.append(
            (model["value"], label, f"n {model['n']:,}, 95 % {html.number(model['low'])}–{html.number(model['high'])}")
        )
        bars = [charts.Bar(c["row"], c["value"], c["low"], c["high"], c is model) for c in rows]
        panels.append(charts.interval_bars(bars, label, reference=(chance, "chance") if chance else None))
    header = ("row", "questions", "metric", "value", "low", "high", "n")
    table = [(c["row"], c["question_type"], c["metric"], c["value"], c["low"], c["high"], c["n"]) for c in picked]
    strong = [k for k, c in enumerate(picked) if c["kind"] == "model"]
    details = f"<details><summary>All numbers</summary>{html.table(table, header, strong=strong)}</details>"
    return html.cards(tops) + html.columns(panels) + details


def mosaic(cells: Iterable[dict[str, Any]]) -> str:
    """Some cells of each class, in record order."""
    by_class: dict[str, list[tuple[bytes, str]]] = {name: [] for name in WHITE_CELL_CLASSES}
    for cell in cells:
        if cell["label"] in by_class and len(by_class[cell["label"]]) < CELLS_PER_CLASS:
            by_class[cell["label"]].append((cell["image"], json.loads(cell["attributes"]).get("nucleus_shape", "")))
    return "".join(f"<h3>{name}</h3>{html.image_grid(items, 104)}" for name, items in by_class.items() if items)


def curves(runs: Path) -> list[str]:
    """One chart per phase: the training losses and the validation loss."""
    panels = []
    for name, title in PHASES.items():
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        series: dict[str, list[tuple[float, float]]] = {}
        for line in lines:
            for key, value in line.items():
                group, _, metric = key.partition("/")
                if (group == "train" and "accuracy" not in metric and metric != "grad_norm") or key == "val/loss":
                    series.setdefault(metric if group == "train" else "val loss", []).append((line["step"], value))
        panels.append(charts.line_chart(series, title, floor=0.0))
    return panels


def examples(predictions: Path, images: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Some answered questions of each type, a wrong one among them where there is one."""
    lines = [json.loads(line) for line in predictions.read_text().splitlines()]
    lines.sort(key=lambda line: stable_hash("example", line["id"]))  # any order but by image
    chosen = []
    for kind in QUESTION_TYPES:
        found = [line for line in lines if line["question_type"] == kind and line["image_id"] in images]
        right = [line for line in found if is_right(line)]
        wrong = [line for line in found if not is_right(line)]
        chosen += (right[: EXAMPLES_PER_TYPE - bool(wrong)] + wrong[:1])[:EXAMPLES_PER_TYPE]
    return [
        {
            "image": images[line["image_id"]]["image"],
            "question": line["question"],
            "options": line.get("options"),
            "gold": line["answer"],
            "answer": line["prediction"],
            "correct": is_right(line),
        }
        for line in chosen
    ]


def is_right(line: dict[str, Any]) -> bool:
    """As the robust profile scores it; an open answer counts when it says the same words."""
    from pbs_jax.bench.metrics import score_answer

    options = line.get("options", ())
    columns = score_answer("robust", line["question_type"], line["prediction"], line["answer"], options).columns
    return max(columns.get(name, 0.0) for name in ("right", "exact", "rouge_l")) > 0.999


def pytorch(path: Path) -> str:
    """What reloading the exported weights in PyTorch gave (`pbs weights verify`)."""
    if not path.exists():
        return html.notice("Not run: PyTorch is not installed (`pip install pbs-jax[torch]`).", "warning")
    found = json.loads(path.read_text())
    said = f"{found['identical_answers']:,} of {found['questions']:,} answers are the same word for word"
    ties = f", {found['ties']} part at a tie" if found["ties"] else ""
    verdict = html.notice(
        f"{said}{ties}. Verdict: {found['verdict']}.", "good" if found["verdict"] == "equal" else "warning"
    )
    stages = [
        key.removesuffix("_relative") for key in found if key.endswith("_relative") and key != "tolerance_relative"
    ]
    rows = [(s.replace("_", " "), *(f"{found[f'{s}_{what}']:.1e}" for what in ("max_abs", "relative"))) for s in stages]
    return verdict + html.table(rows, ("stage", "largest difference", "relative to the largest value"))


def commands(plan: Sequence[Step], out: Path) -> str:
    """The steps with their commands and times."""
    rows = []
    for step in plan:
        marker = out / "steps" / f"{step.name}.json"
        seconds = json.loads(marker.read_text()).get("seconds") if marker.exists() else None
        shown = shlex.join(["pbs", *step.argv]).replace(str(out), "DIR")
        rows.append((step.title, shown, duration(seconds) if seconds is not None else "not run"))
    return html.table(rows, ("step", "command", "time"))
