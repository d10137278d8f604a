"""The TPU compiler takes our training step, here, without a TPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest

from data_prep.schema import DataError
from pbs_jax.config import load
from pbs_jax.sharding.cli import table
from pbs_jax.sharding.topology import chip_of

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install pbs-jax[aot]")


@needs_compiler
@pytest.mark.slow
def test_a_small_phase_3_step_compiles_for_eight_v5e_chips():
    from pbs_jax.sharding.aot import compile_train
    from pbs_jax.train.abstract import Row

    config = load("phase3_cell_qa", ["--config.batch_size=8", "--config.images_per_row=2"])
    cell = compile_train(config, "v5e:2x4", Row(2, 128, 32, 4.0))
    assert cell.fits and cell.chips == 8
    assert cell.parts["frozen"] > 0 and cell.needed < 2**30
    # The Q-Former's gradients are summed over the chips; the language model has none.
    assert cell.collectives
    assert cell.flops >= cell.model_flops > 0
    assert 0 < cell.compute_s <= cell.bound_s


@needs_compiler
def test_a_slice_that_does_not_exist_is_a_sentence():
    from pbs_jax.sharding.topology import slice_devices

    with pytest.raises(DataError, match=r'"v5e:3x5".*the TPU compiler refuses it'):
        slice_devices("v5e:3x5")


def test_an_unknown_chip_is_a_sentence():
    with pytest.raises(DataError, match='chip "v9x" is unknown, use v5e, v6e, v5p'):
        chip_of("v9x:2x2")


def test_the_table_says_what_fits_and_what_does_not() -> None:
    shared = {"name": "cell_qa", "step": "train", "batch": 32, "per_step": 100.0, "unit": "questions", "mfu": 0.5}
    cells = [
        shared | {"topology": "v5e:1x1", "int8": True, "fits": False, "needed": 20 * 2**30, "bound_s": 0.0},
        shared | {"topology": "v5e:2x4", "int8": False, "fits": True, "needed": 6 * 2**30, "bound_s": 0.5},
        shared
        | {"step": "features", "topology": "v5e:2x4", "int8": False, "fits": True, "needed": 2**30, "bound_s": 0.1},
    ]
    head, _, train, features = table(cells).splitlines()
    assert head == "| step | v5e:1x1 (15.75 GiB) | v5e:2x4 (15.75 GiB) |"
    assert "| int8, batch 32: does not fit, 20.0 GiB |" in train
    assert "| batch 32: 6.00 GiB, ≥ 0.5 s, ≤ 200 questions/s, MFU ≤ 50% |" in train
    assert "| - |" in features and f"≥ {353 * 2048 / 1000 / 3600:.2g} h" in features


def test_remat_stops_at_the_least_recomputation_that_fits(tmp_path, capsys, monkeypatch) -> None:
    from pbs_jax import cli
    from pbs_jax.sharding import aot

    def compiled(config, topology, row, tensor):
        fits = config.remat != "none"
        names = {field.name: 0.0 for field in dataclasses.fields(aot.Compiled)}
        return aot.Compiled(**names | {"name": "cell_qa", "step": "train", "topology": topology, "unit": "questions",
                                       "fits": fits, "batch": 32, "parts": {}, "collectives": {}, "counts": {},
                                       "compute_s": 1.0, "message": "" if fits else "too large"})  # fmt: skip

    monkeypatch.setattr(aot, "compile_train", compiled)
    file = tmp_path / "cells.jsonl"
    command = ["compile", "--config=phase3_cell_qa:size=7b", "--topology=v5e:2x4", "--remat", "--json", str(file)]
    assert cli.main(command) == 0
    assert "least recomputation that fits v5e:2x4: --config.remat=dots" in capsys.readouterr().out
    cells = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(cell["remat"], cell["fits"]) for cell in cells] == [("none", False), ("dots", True)]
    assert "batch 32, remat dots: 0.00 GiB" in table(cells)
