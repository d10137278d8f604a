"""Metrics of a run: one JSON line per logged step, always; TensorBoard too when tensorboardX is installed
(`pip install 'pbs_jax[tensorboard]'`)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.io import atomic_write


class MetricsWriter:
    """Appends to workdir/metrics.jsonl. Opened at a resumed step it drops the lines that step will write again."""

    def __init__(self, workdir: Path, resumed_step: int, writes: bool = True) -> None:
        """writes: False on all hosts but the first, which then write nowhere."""
        self.path = workdir / "metrics.jsonl" if writes else Path(os.devnull)
        if writes and self.path.exists():
            lines = [line for line in self.path.read_text().splitlines() if _step(line) <= resumed_step]
            atomic_write(self.path, "".join(line + "\n" for line in lines))
        self._file = self.path.open("a")
        self._board = _tensorboard(workdir) if writes else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one flat line; names are "train/loss", "val/accuracy", ... A value that is not finite is left out, for JSON
        has no word for it."""
        finite = {name: shortened(value) for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self._board:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board:
            self._board.close()


def shortened(value: float) -> float:
    """A value as metrics.jsonl holds it."""
    return float(f"{value:.7g}")


def evaluations(workdir: Path, until: int) -> dict[int, dict[str, float]]:
    """Lines of metrics.jsonl with validation metrics, by step, up to a step."""
    path = workdir / "metrics.jsonl"
    texts = path.read_text().splitlines() if path.exists() else []
    lines = [json.loads(text) for text in texts if _step(text) <= until]
    return {line["step"]: line for line in lines if any(name.startswith("val/") for name in line)}


def _step(line: str) -> float:
    """Step of a line; a line torn by a kill counts as after everything."""
    try:
        return int(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError):
        return math.inf


def _tensorboard(workdir: Path) -> Any | None:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(workdir / "tensorboard"))
