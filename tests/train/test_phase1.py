"""Phase 1 on little data: what it is measured on, whose captions a batch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from data_prep.caption import caption_text
from data_prep.io import open_dataset
from pbs_jax.train import loop, phase1_cell_representation
from tests.train.conftest import small_config


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch):
    """A loss that compiles at once: the rows of its batch."""

    def loss(trainable: Any, frozen: Any, batch: Any, key: Any) -> Any:
        rows = jnp.float32(len(batch["text"]))
        return rows, dict.fromkeys((*phase1_cell_representation.LOSSES, "repeated"), rows)

    monkeypatch.setattr(phase1_cell_representation, "make_loss", lambda size: loss)


@pytest.mark.parametrize("short", [False, True])
def test_validation_takes_whole_batches_or_the_one_short_one(short: bool, drawn: Path, phases: dict[str, Path]):
    held_out = sum(bool(record["caption"]) for record in open_dataset(drawn / "cells", "val"))
    batch = held_out + 1 if short else held_out - 1
    phase = phase1_cell_representation.build(small_config("phase1_cell_representation", drawn, batch_size=batch))
    assert phase.evaluate(phase.trainable, {})["loss"] == min(batch, held_out)


def test_a_batch_of_any_step_shows_its_cells_and_captions(drawn: Path, phases: dict[str, Path]):
    config = small_config("phase1_cell_representation", drawn)
    captions = {record["cell_id"]: record["caption"] for record in open_dataset(drawn / "cells", "train")}
    shown = []
    for step in (1, 2):
        text = loop.show_batch(config, step)
        assert f"batch of step {step}:" in text and "[PAD]" not in text
        shown.append([line.strip().split(": [CLS]") for line in text.splitlines() if "[CLS]" in line])
        for cell_id, caption in shown[-1]:
            assert caption_text(captions[cell_id]).startswith(caption.removesuffix("[SEP]").strip())
    assert [len(rows) for rows in shown] == [config.batch_size] * 2
    phase = phase1_cell_representation.build(config)
    stream = loop.iterate(phase, config)
    second = [next(stream) for _ in shown][1]["index"]
    assert [cell_id for cell_id, _ in shown[1]] == [phase.example_id(int(index)) for index in second]
