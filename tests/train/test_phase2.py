"""Phase 2 on a small slide dataset: what trains and what does not, what it reads, and the features made from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data_prep.io import open_dataset, read_manifest
from data_prep.schema import DataError
from pbs_jax.data import slide_features
from pbs_jax.data.examples import FeatureTable
from pbs_jax.data.slide_examples import CellPatches
from pbs_jax.data.slide_features import SlideEncoder, write_slide_features
from pbs_jax.train import handover, loop, phase2_cell_patch_alignment
from pbs_jax.train.state import tree_sha256
from tests.slides import write_slides
from tests.train.conftest import killed_at_the_third_unit, one_device, small_config


class Fake(dict[str, np.ndarray]):
    """A feature table of one number an id."""

    backbone_sha256 = "b"

    def __missing__(self, id: str) -> np.ndarray:
        return np.full((2, 3), hash(id) % 1000, np.float32)


@pytest.fixture(scope="session")
def slides(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides a split of three patches each, the last one without cells."""
    return write_slides(drawn, tmp_path_factory.mktemp("slides"))


def test_a_pair_is_a_cell_and_the_patch_that_holds_it(slides: Path):
    cells, patches = Fake(), Fake()
    pairs = CellPatches(slides, "train", cells, patches)
    records = list(open_dataset(slides / "cells", "train"))
    assert len(pairs) == len(records) == 8
    for k, record in enumerate(records):
        np.testing.assert_array_equal(pairs[k]["cell"], cells[record["cell_id"]])
        np.testing.assert_array_equal(pairs[k]["patch"], patches[record["patch_id"]])
    assert len({int(pairs[k]["patch_no"]) for k in range(8)}) == 4  # of six: the two without cells never occur
    assert len({int(pairs[k]["slide_no"]) for k in range(8)}) == 2


def test_pairs_of_two_backbones_are_refused(slides: Path):
    other = Fake()
    other.backbone_sha256 = "c"
    with pytest.raises(DataError, match="of two backbones"):
        CellPatches(slides, "train", Fake(), other)


def test_cells_that_lie_in_no_patch_are_refused(drawn: Path):
    with pytest.raises(DataError, match="lies in no patch"):
        CellPatches(drawn, "train", Fake(), Fake())


@pytest.fixture(scope="session")
def features(slides: Path, phases: dict[str, Path]) -> Path:
    """Cell and patch features beside the slides."""
    from pbs_jax.data.features import write_features

    write_features(slides, phases["backbone"], slides)
    slide_features.write_patch_features(slides, phases["backbone"], slides)
    return slides


def alignment_config(features: Path, phases: dict[str, Path], **changes: Any) -> Any:
    starts = {f"init_from__{name}": phases[name] for name in ("backbone", "qformer")}
    return small_config("phase2_cell_patch_alignment", features, **starts, **changes)


@pytest.fixture(scope="session")
def aligned(features: Path, phases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished phase 2 of four steps."""
    workdir = tmp_path_factory.mktemp("alignment")
    loop.train(alignment_config(features, phases), workdir, one_device())
    return workdir


@pytest.mark.slow
def test_the_perceiver_trains_and_the_qformer_does_not(aligned: Path, features: Path, phases: dict[str, Path]):
    content = handover.read(aligned, ("cell_patch_alignment",))
    assert set(content["trees"]) == {"patch_perceiver", "alignment"}
    assert content["facts"]["qformer_sha256"] == tree_sha256(handover.load(phases["qformer"], ["qformer"])["qformer"])
    phase = phase2_cell_patch_alignment.build(alignment_config(features, phases))
    after = handover.load(aligned, ["patch_perceiver"])["patch_perceiver"]
    moved = jax.tree.map(
        lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), phase.trainable["patch_perceiver"], after
    )
    assert all(jax.tree.leaves(moved))


@pytest.mark.slow
def test_the_frozen_target_has_no_dropout_and_is_no_gradient_path(features: Path, phases: dict[str, Path]):
    """The released code leaves dropout on in its target; here two keys, and no key, give one loss."""
    phase = phase2_cell_patch_alignment.build(alignment_config(features, phases))
    batch = {name: np.stack([phase.examples[k][name] for k in range(4)]) for name in phase.examples[0]}
    losses = [float(phase.loss(phase.trainable, phase.frozen, batch, key)[0]) for key in (None, jax.random.key(1))]
    assert losses[0] == losses[1]
    metrics = phase.evaluate(phase.trainable, phase.frozen)
    assert metrics["pairs"] == 8 and metrics["r1_chance"] == 0.25 and metrics["slide_r1_chance"] == 0.5


@pytest.mark.slow
def test_patch_features_are_of_patches_with_cells(features: Path):
    manifest = read_manifest(features / "patch_features")
    assert manifest["splits"] == {"train": 4, "val": 4, "test": 4}
    assert manifest["features"]["tokens"]["shape"] == [32, 192]


@pytest.mark.slow
def test_slide_features_hold_every_patch_and_a_killed_run_goes_on(
    aligned: Path, features: Path, phases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    encoder = SlideEncoder(phases["backbone"], aligned)
    whole = write_slide_features(features, encoder, tmp_path / "a")
    record = open_dataset(tmp_path / "a" / "slide_features", "train")[0]
    assert record["coords"].tolist() == [[0, 0], [1024, 0], [512, 0]]  # in the order of patch ids
    assert record["tokens"].shape == (3, 192)

    with killed_at_the_third_unit(monkeypatch):
        write_slide_features(features, encoder, tmp_path / "b")
    assert write_slide_features(features, encoder, tmp_path / "b") == whole
    manifests = [(tmp_path / name / "slide_features" / "1.0.0" / "manifest.json").read_bytes() for name in "ab"]
    assert manifests[0] == manifests[1]


@pytest.mark.slow
def test_features_do_not_depend_on_what_was_stored(
    aligned: Path, features: Path, phases: dict[str, Path], tmp_path: Path
):
    """Backbone tokens from patch_features, or computed again from the pixels: the same bytes."""
    with_stored = write_slide_features(features, SlideEncoder(phases["backbone"], aligned), tmp_path / "stored")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "patches").symlink_to(features / "patches")
    assert write_slide_features(bare, SlideEncoder(phases["backbone"], aligned), tmp_path / "fresh") == with_stored
    raw = write_slide_features(features, SlideEncoder(phases["backbone"]), tmp_path / "raw")
    assert raw != with_stored
    patch = FeatureTable(features, ("train",), "patch_features")
    record = open_dataset(tmp_path / "raw" / "slide_features", "train")[0]
    mean = np.asarray(patch[f"{record['slide_id']}:0_0"], np.float32).mean(0)
    np.testing.assert_allclose(np.asarray(record["tokens"][0], np.float32), mean, rtol=0.01, atol=0.01)
