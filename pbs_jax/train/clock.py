"""Where the time of a run goes: seconds by part (goodput), and the model's arithmetic against the chip's peak (MFU)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from data_prep.io import atomic_write

PARTS = ("init", "restore", "data", "step", "save", "eval")
FILE = "goodput.jsonl"
# Dense bfloat16 FLOP/s by jax's device kind; a device that is not here has no MFU.
PEAKS = {
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}


class Clock:
    """Seconds by part of one start of a run. What no part took (printing, logging) is "other"."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._before: str | None = None  # the lines of earlier starts
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def spend(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def write(self, workdir: Path, steps: int) -> None:
        """This start's line of workdir/goodput.jsonl, after those of earlier starts; written again it replaces itself."""
        whole = time.perf_counter() - self._start
        line = {part: round(value, 3) for part, value in self.seconds.items()}
        line |= {"other": round(whole - sum(self.seconds.values()), 3), "steps": steps}
        if self._before is None:
            self._before = (workdir / FILE).read_text() if (workdir / FILE).exists() else ""
        atomic_write(workdir / FILE, self._before + json.dumps(line) + "\n")


def model_flops_per_token(trainable: Any, frozen: Any) -> float:
    """4 N_frozen + 6 N_trainable: a frozen weight is used forward and for its inputs' gradient, never for its own."""
    count = [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (trainable, frozen)]
    return 6.0 * count[0] + 4.0 * count[1]


def rates(batch: Any, step_s: float, flops_per_token: float) -> dict[str, float]:
    """examples/s, and where the batch holds token rows: tokens/s and, on a device with a known peak, MFU over all devices."""
    values = {"time/examples_per_s": len(next(iter(batch.values()))) / step_s}
    if "tokens" in batch:
        tokens = batch["tokens"].size / step_s
        values["time/tokens_per_s"] = tokens
        peak = PEAKS.get(jax.devices()[0].device_kind)
        if peak:
            values["time/mfu"] = tokens * flops_per_token / (peak * jax.device_count())
    return values
