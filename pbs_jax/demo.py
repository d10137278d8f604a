"""`pbs demo`: the whole job, offline, on CPU, in minutes: from drawn cells and smears to a report, by ordinary commands.

Each step runs as its own process (its memory goes back) and leaves a marker with a hash of what it was asked and of the
steps before it. A second run reuses what is finished, continues what was interrupted, and redoes what changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pbs_jax
from data_prep.progress import duration
from data_prep.schema import DataError

CELLS_PER_CLASS = 120  # 360 training cells
QUESTIONS = 400  # of the held-out ones, asked with and without the image
SMEARS = 30  # 15 to train on, 10 held out
# Halves the compilation of the Q-Former's graphs, which for so few steps costs more than the steps.
QUICK_COMPILE = "--xla_backend_optimization_level=1"


@dataclasses.dataclass(frozen=True)
class Step:
    """One command. `makes`: the paths under the output folder that it writes; they go when the step is redone.

    `needs`: packages without which the step is left out, and the report says so.
    """

    name: str
    title: str
    argv: tuple[str, ...]
    makes: tuple[str, ...]
    needs: tuple[str, ...] = ()
    xla_flags: str = ""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the whole job, offline, on CPU, in minutes: drawn smears to report.html",
        description="Draws cells and smears, writes shards, trains phases 0 to 4 at size nano, scores held-out questions "
        "with and without the image, compares with PyTorch, writes report.html. Run again, it reuses or resumes.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), metavar="DIR", help="output folder (demo_out)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of cells and training (0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pbs_jax import report

    out, started = args.out.resolve(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    plan, before, left_out = steps(out, args.seed), "", []
    for number, step in enumerate(plan, 1):
        head = f"[{number}/{len(plan)}] {step.title}"
        missing = [name for name in step.needs if importlib.util.find_spec(name) is None]
        if missing:
            left_out.append(f"{step.title}: not run, {', '.join(missing)} is not installed")
            print(f"\n{head}: left out, {', '.join(missing)} is not installed", flush=True)
            continue
        before = key = step_key(step, out, before)
        done = finished(step, out, key)
        if done is not None:
            print(f"\n{head}: reused (took {duration(done)})", flush=True)
            continue
        print(f"\n{head}   ({duration(time.monotonic() - started)} so far)", flush=True)
        execute(step, out, key)
    path = report.write(out, plan, args.seed, left_out)
    print(f"\nfinished in {duration(time.monotonic() - started)}: {path}")
    return 0


def steps(out: Path, seed: int) -> list[Step]:
    """The demo's commands in order."""
    data, smears, slides, runs, bench = (out / name for name in ("data", "smears", "slides", "runs", "bench"))
    backbone, language_model, qformer, alignment, cell_qa, slide_qa = (
        runs / phase
        for phase in (
            "phase0_backbone",
            "phase0_language_model",
            "phase1_cell_representation",
            "phase2_cell_patch_alignment",
            "phase3_cell_qa",
            "phase4_slide_qa",
        )
    )

    def train(workdir: Path, title: str, steps: int, *overrides: str, root: Path = data, xla_flags: str = "") -> Step:
        phase = workdir.name
        argv = ("train", f"--config={phase}", f"--config.data.root={root}", f"--config.seed={seed}", *overrides)
        argv += (f"--config.steps={steps}", f"--workdir={workdir}")
        return Step(phase, title, argv, (f"runs/{phase}",), xla_flags=xla_flags)

    def features(root: Path, kind: str, title: str, *options: str) -> Step:
        argv = ("data", "features", f"--root={root}", f"--backbone={backbone}", f"--kind={kind}", *options)
        return Step(f"{root.name}_{kind}_features", title, argv, (f"{root.name}/{kind}_features",))

    def ask(name: str, title: str, model: Path, root: Path, *options: str) -> Step:
        argv = ("bench", "run", f"--model=pbs:{model}", f"--data={root}", f"--out={bench / name}", "--name=nano")
        return Step(f"ask_{name}", title, (*argv, f"--limit={QUESTIONS}", *options), (f"bench/{name}",))

    def score(name: str, title: str, root: Path) -> Step:
        argv = ("bench", "report", str(bench / name), str(bench / f"{name}_blind"), f"--train={root}")
        return Step(f"score_{name}", title, (*argv, f"--out={bench / name}_report"), (f"bench/{name}_report",))

    return [
        Step(
            "data",
            "drawn cells, captions, questions, shards",
            (
                "data",
                "run",
                "--source=synthetic",
                f"--out={data}",
                f"--n-per-class={CELLS_PER_CLASS}",
                f"--seed={seed}",
                "--workers=2",
            ),
            ("data/cells", "data/cell_qa", "data/cell_qa_tokens", "data/tokenizer"),
        ),
        train(backbone, "phase 0a: vision backbone", 100),
        Step(
            "smears",
            "drawn smears",
            (
                "data",
                "synth",
                "--kind=smear",
                f"--out={smears}",
                f"--n={SMEARS}",
                "--size=1536x1024",
                "--cells=30",
                f"--seed={seed}",
                "--workers=2",
            ),
            ("smears",),
        ),
        Step(
            "slides",
            "tiles, quality control, cells and their names",
            (
                "data",
                "run",
                "--source=slides",
                f"--root={smears}",
                f"--table={smears / 'slides.csv'}",
                f"--out={slides}",
                f"--backbone={backbone}",
                "--workers=2",
            ),
            ("slides",),
        ),
        Step(
            "slide_qa",
            "questions about slides",
            ("data", "qa", str(slides), f"--tokenizer={data / 'tokenizer'}", f"--truth={smears}"),
            ("slides/slide_qa", "slides/slide_qa_tokens", "slides/tokenizer"),
        ),
        features(data, "cell", "backbone features of every cell"),
        features(slides, "cell", "backbone features of the slides' cells"),
        features(slides, "patch", "backbone features of the slides' patches"),
        train(runs / "phase0_language_model_drill", "phase 0b: language drills", 120),
        train(
            language_model,
            "phase 0b: language model",
            80,
            f"--config.init_from.language_model={runs / 'phase0_language_model_drill'}",
            f"--config.data.slides={slides}",
            "--config.weighting=token",  # so few steps must also teach whole sentences
        ),
        train(qformer, "phase 1: Q-Former on captions", 12, xla_flags=QUICK_COMPILE),
        train(
            alignment,
            "phase 2: patches learn to read as their cells do",
            30,
            f"--config.init_from.backbone={backbone}",
            f"--config.init_from.qformer={qformer}",
            root=slides,
            xla_flags=QUICK_COMPILE,
        ),
        features(slides, "slide", "phase-2 tokens of every slide", f"--alignment={alignment}"),
        train(
            cell_qa,
            "phase 3: answers from cells",
            55,
            f"--config.init_from.backbone={backbone}",
            f"--config.init_from.language_model={language_model}",
            f"--config.init_from.qformer={qformer}",
            xla_flags=QUICK_COMPILE,
        ),
        train(
            slide_qa,
            "phase 4: answers from slides",
            40,
            f"--config.init_from.language_model={language_model}",
            f"--config.init_from.projector={cell_qa}",
            root=slides,
            xla_flags=QUICK_COMPILE,
        ),
        ask("cells", "asking the held-out questions about cells", cell_qa, data),
        ask("cells_blind", "asking them again without the image", cell_qa, data, "--modality=blind"),
        score("cells", "cells: scores beside blind rows", data),
        ask("slides", "asking the held-out questions about slides", slide_qa, slides),
        ask("slides_blind", "asking them again without the slide", slide_qa, slides, "--modality=blind"),
        score("slides", "slides: scores beside blind rows", slides),
        Step(
            "export",
            "weights for PyTorch",
            ("weights", "export", f"--workdir={cell_qa}", f"--out={out / 'export'}"),
            ("export",),
        ),
        Step(
            "torch",
            "the same answers from PyTorch",
            ("weights", "verify", f"--export={out / 'export'}", f"--data={data}", f"--out={out / 'torch.json'}"),
            ("torch.json",),
            needs=("torch",),
        ),
    ]


def step_key(step: Step, out: Path, before: str) -> str:
    """Hash of version, command (the output folder itself left out), resolved config, and the steps before."""
    from pbs_jax import config

    config_args, rest = config.split_argv(step.argv)
    fields = config.describe(config.from_args(config_args)) if config_args else {}
    asked = json.dumps([pbs_jax.__version__, rest, fields, before], default=str).replace(str(out), "OUT")
    return hashlib.sha256(asked.encode()).hexdigest()


def finished(step: Step, out: Path, key: str) -> float | None:
    """Seconds that a finished, still valid step took, else None. What an older question made is removed."""
    marker = _marker(step, out)
    state = json.loads(marker.read_text()) if marker.exists() else {}
    if state.get("key") != key:
        for name in step.makes:
            _remove(out / name)
        return None
    whole = all((out / name).exists() for name in step.makes)
    return state.get("seconds") if whole else None


def execute(step: Step, out: Path, key: str) -> None:
    """Runs the command in a process of its own. Raises DataError when it fails."""
    from data_prep.io import atomic_write

    marker = _marker(step, out)
    marker.parent.mkdir(exist_ok=True)
    resumed = marker.exists() and json.loads(marker.read_text()).get("key") == key
    if resumed:
        print("    was interrupted before: continues", flush=True)
    atomic_write(marker, json.dumps({"key": key}))
    begun = time.monotonic()
    command = [sys.executable, "-m", "pbs_jax.cli", *step.argv]
    environment = os.environ | {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    if step.xla_flags:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {step.xla_flags}".strip()
    code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode
    if code not in (0, 3):  # 3: finished, some records rejected and counted
        shown = shlex.join(["pbs", *step.argv])
        raise DataError(f"demo step {step.name} failed with exit code {code}; to see it alone: {shown}")
    atomic_write(marker, json.dumps({"key": key, "seconds": round(time.monotonic() - begun, 1)}))


def _marker(step: Step, out: Path) -> Path:
    return out / "steps" / f"{step.name}.json"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
