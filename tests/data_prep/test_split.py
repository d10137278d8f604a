"""Splits: groups stay together, near-duplicates never straddle, appended cells move nothing, leaks are found."""

import dataclasses
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from data_prep import crops, split
from data_prep.datasets import CELL_FEATURES, cell_record
from data_prep.io import write_dataset
from data_prep.schema import Cell, DataError


def picture(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (12, 12, 3), np.uint8)
    return Image.fromarray(coarse).resize((224, 224), Image.Resampling.BICUBIC)


def item(k: int, given: str = "", label: str = "Basophil", seed: int | None = None, **groups: str) -> split.Item:
    dhash = split.difference_hash(picture(k if seed is None else seed))
    return split.Item(f"c{k:03d}", label, given, f"sha{k if seed is None else seed}", dhash, **groups)


def test_hash_survives_what_copies_suffer_and_tells_cells_apart():
    original = picture(1)
    base = split.difference_hash(original)
    shrunk = original.resize((160, 160)).resize((224, 224))
    shifted = Image.fromarray(np.roll(np.asarray(original), 2, axis=1))
    recoded = crops.decode_rgb(crops.encode_jpeg(original))
    for copy in (shrunk, shifted, recoded, ImageEnhance.Brightness(original).enhance(0.9)):
        assert split.near_pairs([base, split.difference_hash(copy)]) == [(0, 1)]
    assert split.near_pairs([split.difference_hash(picture(k)) for k in range(60)]) == []


def test_groups_stay_on_one_side_and_shares_hold():
    rng = random.Random(0)
    items = [item(k, patient_id=f"p{rng.randrange(100)}") for k in range(600)]
    result = split.assign(items)
    places: dict[str, set[str]] = {}
    for one in items:
        places.setdefault(one.patient_id, set()).add(result.splits[one.id])
    assert all(len(splits) == 1 for splits in places.values())
    assert result.level == "patient"
    shares = Counter(result.splits.values())
    assert 0.5 < shares["train"] / 600 < 0.7
    assert 0.2 < shares["test"] / 600 < 0.4


def test_a_patient_id_is_compared_whole_and_slides_join():
    ids = ("p2", "p23", "2", "02")
    items = [item(k, patient_id=ids[k % 4], slide_id=f"s{k % 4}") for k in range(40)]
    items[0] = dataclasses.replace(items[0], patient_id="p23")  # its slide s0 now ties p2 to p23
    result = split.assign(items)
    assert len({result.splits[one.id] for one in items if one.patient_id in ("p2", "p23")}) == 1


def test_unknown_patients_are_not_one_group():
    result = split.assign([item(k) for k in range(60)])
    assert result.level == "image"
    assert set(result.splits.values()) == {"train", "val", "test"}


def test_appending_moves_nothing():
    items = [item(k, patient_id=f"p{k % 30}") for k in range(90)]
    more = items + [item(k, patient_id=f"p{k % 45}") for k in range(90, 180)]
    before, after = split.assign(items).splits, split.assign(more).splits
    assert {id: after[id] for id in before} == before
    assert split.assign(random.Random(1).sample(more, len(more))).splits == after


def test_given_splits_stay_and_straddling_near_duplicates_leave_training():
    items = [item(0, "train"), item(1, "val"), item(2, "test"), item(3, "train", seed=2), item(4, "val", seed=2)]
    items += [item(5, "", seed=1), item(6, "train", seed=0)]
    result = split.assign(items)
    assert result.splits == {"c000": "train", "c001": "val", "c002": "test", "c005": "val", "c006": "train"}
    assert [(reject.id, reject.reason) for reject in result.rejects] == [
        ("c003", "near-duplicate in a held-out split"),
        ("c004", "near-duplicate in a held-out split"),
    ]
    assert "c002 (test)" in result.rejects[0].detail


def test_the_same_picture_under_two_labels_is_rejected():
    items = [item(0, "train"), item(1, "train", "Monocyte", seed=0), item(2, "train")]
    result = split.assign(items)
    assert set(result.splits) == {"c002"}
    assert {reject.reason for reject in result.rejects} == {"same picture, two labels"}


def test_leaking_given_splits_are_told_and_lower_the_level():
    items = [item(0, "train", patient_id="p1"), item(1, "test", patient_id="p1"), item(2, "val", patient_id="p2")]
    result = split.assign(items)
    assert result.level == "image"
    assert result.leakage == ["the given split has 1 patient_id values in several splits, e.g. p1"]
    with pytest.raises(DataError, match='split "holdout"'):
        split.assign([item(0, "holdout")])


def write(out: Path, cells: list[Cell], level: str) -> None:
    records = [cell_record(cell) for cell in cells]
    write_dataset(out, "cells", CELL_FEATURES, records, id_feature="cell_id", config={}, inputs={}, split_level=level)


def test_leak_check_reads_the_written_shards(tmp_path: Path):
    def cell(k: int, part: str, seed: int, patient: str) -> Cell:
        image = crops.encode_jpeg(picture(seed))
        return Cell(f"c{k}", part, "Basophil", "human", image, patient_id=patient)

    clean = [cell(0, "train", 0, "p0"), cell(1, "test", 1, "p1")]
    write(tmp_path, clean, "patient")
    assert split.leaks(tmp_path) == []
    write(tmp_path, [*clean, cell(2, "val", 1, "p0")], "patient")
    found = "\n".join(split.leaks(tmp_path))
    assert "near-duplicates in two splits" in found
    assert "patient_id values in several splits, e.g. p0" in found
