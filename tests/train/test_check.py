"""A wrong config is refused before any device is touched, with all that is wrong in one message."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from configs import base
from data_prep.io import TEXT, array, write_dataset
from data_prep.schema import DataError
from pbs_jax.config import load, total_steps
from pbs_jax.train.check import problems, require_usable


def test_all_problems_come_at_once(tmp_path: Path, monkeypatch):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    row = {"bin_id": "a#00", "split": "train", "tokens": np.zeros(16, np.int32)}
    features = {"bin_id": TEXT, "split": TEXT, "tokens": array("int32", 16)}
    write_dataset(tmp_path, "cell_qa_tokens", features, [row], id_feature="bin_id", config={}, inputs={})
    row = {"cell_id": "a", "split": "train", "tokens": np.zeros((37, 64), np.float32).astype("bfloat16")}
    features = {"cell_id": TEXT, "split": TEXT, "tokens": array("bfloat16", 37, 64)}
    write_dataset(tmp_path, "cell_features", features, [row], id_feature="cell_id", config={}, inputs={})
    other = tmp_path / "other"
    other.mkdir()
    trees = {"language_model": {"norm/scale": [[576], "float32"]}}
    (other / "handover.json").write_text(json.dumps({"phase": "language_model", "trees": trees}))
    flags = {"data.root": tmp_path, "batch_size": 30, "mesh.data": 4, "optimizer.name": "sgd"}
    flags |= {"init_from.language_model": other, "init_from.qformer": other, "init_from.backbone": tmp_path / "gone"}
    config = load("phase3_cell_qa", [f"--config.{key}={value}" for key, value in flags.items()])
    monkeypatch.setattr("jax.devices", lambda: pytest.fail("a device was asked for"))
    found = "\n".join(problems(config))
    for said in (
        "batch_size=30 is not divisible by the mesh's data x fsdp x accumulate = 4",
        '"sgd" is unknown',
        "gone/handover.json is missing",
        "is of phase language_model, expected cell_representation",
        "rows of 16 tokens, no more than the 32 visual tokens",
        "cell_features is 64 wide, the Q-Former of size nano reads 192",
        "has width 576, size nano has 192",
        "batch_size=30 is more than the 1 records of the train split of",
    ):
        assert said in found
    with pytest.raises(DataError, match=r"the config has 8 problems:"):
        require_usable(config)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("phase2_cell_patch_alignment", ("target", "alignment")),
        ("phase0_language_model", ("lesson",)),
        ("classifier", ("target",)),
    ],
)
def test_unknown_words_and_missing_phases_come_with_the_others(name: str, fields: tuple[str, ...], tmp_path: Path):
    config = load(name, [f"--config.data.root={tmp_path}", *(f"--config.{field}=other" for field in fields)])
    found = "\n".join(problems(config))
    assert all(f'config.{field} "other" is unknown: use ' in found for field in fields)
    assert f"{tmp_path}/cells holds no finished dataset" in found
    if not name.startswith("phase0"):
        assert "config.init_from.backbone is empty: name the workdir of a finished backbone phase" in found


@pytest.mark.parametrize("size", base.FULL)
@pytest.mark.parametrize("name", [f"phase{path}" for path in ("1_cell_representation", "2_cell_patch_alignment")])
def test_full_sizes_are_validated_after_every_epoch(name: str, size: str):
    assert load(f"{name}:size={size}").eval_every == -1


def test_slide_features_of_another_perceiver_are_refused(tmp_path: Path):
    row = {"slide_id": "a", "split": "train", "tokens": np.zeros((5, 96), np.float32).astype("bfloat16")}
    features = {"slide_id": TEXT, "split": TEXT, "tokens": array("bfloat16", 5, 96)}
    written = {"id_feature": "slide_id", "config": {"kind": "phase2"}, "inputs": {}}
    write_dataset(tmp_path, "slide_features", features, [row], **written)
    found = "\n".join(problems(load("phase4_slide_qa", [f"--config.data.root={tmp_path}"])))
    assert "slide_features is 96 wide, the patch Perceiver of size nano gives 192" in found


OFFICIAL = [
    ("phase1_cell_representation", 28_970, 90_600),
    ("phase2_cell_patch_alignment", 28_970, 90_600),
    ("phase3_cell_qa", 20_985, 209_860),
    ("phase4_slide_qa", 1_142, 28_550),
]


@pytest.mark.parametrize(("name", "samples", "steps"), OFFICIAL)
@pytest.mark.parametrize("size", ["nano", "7b"])
def test_the_official_recipe_takes_the_released_number_of_steps(name: str, samples: int, steps: int, size: str):
    """Samples of phases 3 and 4 are questions: one a row, as the released code has them."""
    config = load(f"{name}:size={size},recipe=official")
    assert total_steps(config, samples) == steps
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.clip, config.seed) == ("adamw", 5e-5, 1.0, 42)
    assert config.images_per_row == 0
