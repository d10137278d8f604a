"""`--inspect_batch`: which batch is shown, whose examples they are."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from data_prep.io import open_dataset
from data_prep.schema import DataError
from pbs_jax.train import classifier, cli, loop, phase0_backbone, phase2_cell_patch_alignment, phase4_slide_qa
from pbs_jax.train.phase import Phase
from tests.train import tiny_run
from tests.train.conftest import small_config
from tests.train.test_phase2 import aligned, alignment_config, features, slides  # noqa: F401
from tests.train.test_phase4 import store  # noqa: F401


@pytest.mark.parametrize(("argument", "step"), [([], None), (["--inspect_batch"], 1), (["--inspect_batch=7"], 7)])
def test_the_step_is_optional(argument: list[str], step: int | None):
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    assert parser.parse_args(["train", "--workdir=run", *argument]).inspect_batch == step


def test_steps_are_counted_from_1():
    with pytest.raises(DataError, match="--inspect_batch=0"):
        loop.show_batch(tiny_run.tiny_config(), 0)


def check_ids(phase: Phase, drawn: Path) -> None:
    records = open_dataset(drawn / "cells", "train")
    for index in (0, len(phase.examples) - 1):
        record = records[records.position(phase.example_id(index))]
        assert record["label"] == phase_label(phase, int(phase.examples[index]["label"]))


def phase_label(phase: Phase, label: int) -> str:
    return (phase.facts.get("classes") or phase0_backbone.WHITE_CELL_CLASSES)[label]


def test_examples_of_cells_are_named_by_their_cells(drawn: Path, phases: dict[str, Path]):
    check_ids(phase0_backbone.build(small_config("phase0_backbone", drawn)), drawn)
    check_ids(classifier.build(small_config("classifier", drawn, init_from__backbone=phases["backbone"])), drawn)


@pytest.mark.slow
def test_pairs_are_named_by_their_cells_and_bins_by_their_slides(store: Path, phases: dict[str, Path]):  # noqa: F811
    pairs = phase2_cell_patch_alignment.build(alignment_config(store, phases))
    records = open_dataset(store / "cells", "train")
    assert [pairs.example_id(index) for index in range(len(records))] == records.ids
    config = small_config("phase4_slide_qa", store, batch_size=2, init_from__language_model=phases["language_model"])
    bins = phase4_slide_qa.build(config)
    images = [record["image_id"] for record in open_dataset(store / "slide_qa_tokens", "train")]
    assert [bins.example_id(index) for index in range(len(images))] == images
