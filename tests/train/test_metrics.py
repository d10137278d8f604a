"""metrics.jsonl: every line is JSON, small values keep their digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pbs_jax import cli
from pbs_jax.train.metrics import MetricsWriter


def test_a_line_holds_what_json_can_say(tmp_path: Path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, {"lr": 1.25e-9, "val/loss": float("nan"), "val/auc": float("inf"), "val/accuracy": 0.5})
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    known = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert known == {"step": 1, "lr": 1.25e-9, "val/accuracy": 0.5}


def test_the_extra_of_tensorboard_is_named():
    assert "pbs-jax[tensorboard]" in cli._sentence(ModuleNotFoundError(name="tensorboardX"))
