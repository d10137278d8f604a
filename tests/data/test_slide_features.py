"""Writing the features of slides' patches: how far it is told patch by patch, and how much is held; the backbone is stood in for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from data_prep.io import open_dataset, write_dataset
from data_prep.slide_datasets import PATCH_FEATURES, Patch, patch_record
from pbs_jax.data import slide_features
from pbs_jax.data.slide_features import SlideEncoder, write_slide_features

BATCH = 4


class Encoder:
    """Each patch's tokens are its x; knows how many patches were read before they were needed."""

    size = SimpleNamespace(vit=SimpleNamespace(dim=2))

    def __init__(self, workdir: Path) -> None:
        self.config = {"backbone_sha256": "b"}

    def __call__(self, patches: Iterable[dict[str, Any]]) -> Iterator[np.ndarray]:
        for part in itertools.batched(patches, BATCH):
            yield from (np.full((3, 2), row["x"], ml_dtypes.bfloat16) for row in part)


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    """Slides of 10 and 5 patches."""
    found = [
        Patch(f"S{count}:{x:02d}_0", f"S{count}", "test", x, 0, 0.9, b"jpeg") for count in (10, 5) for x in range(count)
    ]
    write_dataset(
        tmp_path, "patches", PATCH_FEATURES, map(patch_record, found), id_feature="patch_id", config={}, inputs={}
    )
    return tmp_path


def test_it_is_told_patch_by_patch_and_patches_are_read_as_they_are_needed(
    patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, str]] = []
    ahead, most = [0], [0]

    def progress(items: Iterable[str], total: int, desc: str) -> Iterator[str]:
        told.append((total, desc))
        for item in items:
            ahead[0] += 1
            yield item

    def pooled(params: Any, tokens: Any) -> np.ndarray:
        most[0], ahead[0] = max(most[0], ahead[0] - len(tokens)), 0
        return tokens.mean(1)

    monkeypatch.setattr(slide_features, "PatchEncoder", Encoder)
    monkeypatch.setattr(slide_features, "PATCHES_AT_ONCE", BATCH)
    monkeypatch.setattr(slide_features, "progress", progress)
    encoder = SlideEncoder(patches)
    monkeypatch.setattr(encoder, "_pool", pooled)
    write_slide_features(patches, encoder, patches)
    assert told == [(15, "slide_features test, patches")]
    assert most[0] < BATCH
    records = {record["slide_id"]: record for record in open_dataset(patches / "slide_features", "test")}
    for count in (10, 5):
        record = records[f"S{count}"]
        assert record["coords"][:, 0].tolist() == list(range(count)) == record["tokens"][:, 0].astype(int).tolist()
        assert len(record["qc"]) == count


def test_stored_tokens_and_a_killed_run_change_nothing(patches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slide_features, "PatchEncoder", Encoder)
    encoder = SlideEncoder(patches)
    whole = write_slide_features(patches, encoder, patches / "whole")
    stored = {f"S10:{x:02d}_0": np.full((3, 2), x, ml_dtypes.bfloat16) for x in (0, 3, 4, 9)}
    monkeypatch.setattr(slide_features, "_stored", lambda *more: stored)
    assert write_slide_features(patches, encoder, patches / "stored") == whole
    real, slides = slide_features.write_unit, [0]

    def second_fails(*more: Any) -> Any:
        slides[0] += 1
        if slides[0] == 2:
            raise KeyboardInterrupt
        return real(*more)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(slide_features, "write_unit", second_fails)
        write_slide_features(patches, encoder, patches / "killed")
    assert write_slide_features(patches, encoder, patches / "killed") == whole
