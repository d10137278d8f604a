"""Features of cells and patches: a killed run goes on, and the devices that share the work leave no trace in the tokens."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from data_prep.io import JPEG, TEXT, open_dataset, read_manifest, write_dataset
from data_prep.slide_datasets import PATCH_FEATURES, Patch, patch_record
from pbs_jax.data import features, slide_features
from pbs_jax.models.sizes import get_size
from pbs_jax.models.vit import ViT
from pbs_jax.sharding import hlo
from pbs_jax.train.phase import parameters
from tests.train.conftest import killed_at_the_third_unit, save_finished

COUNT = 9  # one more than eight devices take at once


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cells and patches of noise, and an untrained backbone."""
    root = tmp_path_factory.mktemp("job")
    draw = np.random.default_rng(0)

    def jpeg() -> bytes:
        picture = io.BytesIO()
        Image.fromarray(draw.integers(0, 256, (96, 96, 3), np.uint8)).save(picture, "JPEG")
        return picture.getvalue()

    ids = [f"S:{k:02d}_0" for k in range(COUNT)]
    cells = [{"cell_id": f"{id}_1", "patch_id": id, "split": "test", "image": jpeg()} for id in ids]
    shape = {"cell_id": TEXT, "patch_id": TEXT, "split": TEXT, "image": JPEG}
    write_dataset(root, "cells", shape, cells, id_feature="cell_id", config={}, inputs={})
    patches = [patch_record(Patch(id, "S", "test", k, 0, 0.9, jpeg())) for k, id in enumerate(ids)]
    write_dataset(root, "patches", PATCH_FEATURES, patches, id_feature="patch_id", config={}, inputs={})
    vit = get_size("nano").vit
    save_finished(root, {"backbone": parameters(lambda rngs: ViT(vit, rngs=rngs), 0)[1]}, {"size": "nano"}, "backbone")
    return root


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slide_features, "PATCHES_AT_ONCE", 1)


def write_on(devices: int, write: Callable[..., str], job: Path, out: Path) -> str:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax, "local_devices", lambda: jax.devices()[:devices])
        return write(job, job, out)


@pytest.mark.parametrize(
    "write", [features.write_features, pytest.param(slide_features.write_patch_features, marks=pytest.mark.slow)]
)
def test_one_and_eight_devices_write_the_same(write: Callable[..., str], job: Path, tmp_path: Path) -> None:
    assert write_on(1, write, job, tmp_path / "1") == write_on(8, write, job, tmp_path / "8")


def test_all_devices_take_their_share_and_wait_for_none(job: Path) -> None:
    encoder = slide_features.PatchEncoder(job, windows=1)
    layout, params = encoder._on_all
    pixels = jax.device_put(np.zeros((8, 96, 96, 3), np.uint8), layout)
    shards = encoder._forward(params, pixels).addressable_shards
    assert [shard.data.shape[0] for shard in shards] == [1] * 8
    assert not hlo.totals(encoder._forward.lower(params, pixels).compile().as_text())["counts"]


def test_features_of_cells_go_on_where_they_were_killed(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(features, "CELLS_PER_UNIT", 4)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    whole = features.write_features(job, job, tmp_path / "whole")
    real = slide_features.write_unit
    with killed_at_the_third_unit(monkeypatch) as written:
        features.write_features(job, job, tmp_path / "killed")
    with monkeypatch.context() as patched:
        patched.setattr(slide_features, "write_unit", lambda path, *more: written.append(path) or real(path, *more))
        assert features.write_features(job, job, tmp_path / "killed") == whole
    assert len(written) == len(set(written)) == 3, "a unit was made twice"
    folder = tmp_path / "killed" / "cell_features"
    assert [path.name for path in folder.iterdir()] == ["1.0.0"]
    assert open_dataset(folder, "test").ids == open_dataset(job / "cells", "test").ids
    assert read_manifest(folder) == read_manifest(tmp_path / "whole" / "cell_features")
    assert features.write_features(job, job, tmp_path / "killed") == whole
    assert "up to date" in capsys.readouterr().err
