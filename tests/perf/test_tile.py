"""`pbs perf tile` measures both ways on the same tiles, and refuses what has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.pyramid import write_pyramid
from data_prep.schema import DataError
from pbs_jax.perf.tile import report


def test_both_ways_read_the_same_tiles(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    write_pyramid(tmp_path / "field.tiff", 1024, 1024, lambda x, y, w, h: noise[y : y + h, x : x + w])
    text = report(tmp_path / "field.tiff", count=4, rounds=1, mpp=0.25)
    assert text.startswith("4 tiles of field.tiff")
    assert text.count("tiles/s") == 5 and "(1.0x)" in text


def test_what_the_released_way_cannot_read_is_refused(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "field.png")
    with pytest.raises(DataError, match="no format of OpenSlide's, with which the released way reads"):
        report(tmp_path / "field.png", count=4, rounds=1, mpp=0.25)


def test_a_picture_smaller_than_a_tile_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (500, 900), "white").save(tmp_path / "small.png")
    with pytest.raises(DataError, match="no whole tile of 512 px"):
        report(tmp_path / "small.png", count=4, rounds=1, mpp=0.25)
