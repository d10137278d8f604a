"""Heads on frozen features (paper 9.2): which cell is which class, and what they score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_prep import subtype
from data_prep.io import open_dataset
from data_prep.schema import DataError
from pbs_jax.data.examples import FeatureTable
from pbs_jax.models.sizes import get_size
from pbs_jax.train import handover
from pbs_jax.train.classifier import TARGETS, build, forward, label_of, scores
from tests.train.conftest import save_finished, small_config

HIDDEN = 8


@pytest.mark.parametrize(
    ("label", "comments", "subtype", "white"),
    [
        ("Monocyte", "", 2, 1),
        ("Others", "ImmatureGranulocyte", None, 1),
        ("Others", "Platelet", None, 0),
        ("Others", "Erythroblast", None, 0),
        ("Artifact", "", None, 0),
        ("Others", "artifact", None, 0),  # APL's folders
        ("Others", "giant thrombocyte", None, 0),
        ("Others", "unidentified", None, None),
        ("Others", "", None, None),  # a cell of no known type is of neither class
    ],
)
def test_labels(label: str, comments: str, subtype: int | None, white: int | None) -> None:
    record = {"label": label, "comments": comments}
    assert (label_of(record, "subtype"), label_of(record, "white_cell")) == (subtype, white)


def test_scores_of_a_known_table() -> None:
    """Four cells of two classes, one wrong: AUC counts the pairs in the right order."""
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    found = scores(probabilities, np.array([0, 0, 1, 1]))
    assert found["accuracy"] == 0.75 and found["auc"] == 0.75
    assert found["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)


@pytest.fixture(scope="module")
def finished(drawn: Path, phases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of target subtype on the shared backbone, as it stands before its first step."""
    phase = build(small_config("classifier", drawn, init_from__backbone=phases["backbone"], hidden=HIDDEN))
    workdir = tmp_path_factory.mktemp("classifier")
    save_finished(workdir, phase.trainable, phase.facts, "classifier")
    return workdir


def changed(workdir: Path, folder: Path, **facts: Any) -> Path:
    """The same finished phase with other facts in its handover."""
    content = json.loads((workdir / handover.FILE).read_text())
    content["facts"] |= facts
    (folder / handover.FILE).write_text(json.dumps(content))
    (folder / "checkpoints").symlink_to(workdir / "checkpoints")
    return folder


def test_cells_are_named_as_in_training(finished: Path, phases: dict[str, Path], drawn: Path) -> None:
    """From pixels through the backbone that it stands on, as from that backbone's cached features."""
    backbone = handover.load(phases["backbone"], ["backbone"])["backbone"]
    head = handover.load(finished, ["head"])["head"]
    records = list(open_dataset(drawn / "cells", "val"))
    features = FeatureTable(drawn, ("val",))
    tokens = jnp.stack([features[record["cell_id"]] for record in records])
    expected = np.asarray(jax.nn.softmax(forward(get_size("nano").vit.dim, 5, HIDDEN)(head, backbone["norm"], tokens)))
    named = list(subtype.classifier(finished, batch_size=8)(record["image"] for record in records))
    assert [name for name, _ in named] == [TARGETS["subtype"][k] for k in expected.argmax(-1)]
    np.testing.assert_allclose([p for _, p in named], expected.max(-1), atol=2e-3)  # features are kept in bfloat16


def test_a_classifier_on_a_backbone_that_changed_is_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no longer holds the backbone"):
        subtype.classifier_sha256(changed(finished, tmp_path, backbone_sha256="0" * 64))


def test_a_classifier_of_the_other_target_is_refused(finished: Path) -> None:
    with pytest.raises(DataError, match=r"config.target=subtype: give one of config.target=white_cell"):
        subtype.classifier(finished, target="white_cell")


def test_other_backbones_under_one_head_are_other_classifiers(finished: Path, phases: dict[str, Path]) -> None:
    assert subtype.classifier_sha256(finished) != subtype.classifier_sha256(phases["backbone"])


def test_a_classifier_says_how_its_cells_were_stained(finished: Path) -> None:
    assert callable(subtype.classifier(finished, match_stain=True))
