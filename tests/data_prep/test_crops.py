"""Crop geometry: pixel for pixel the official one with white fill, the same window with mirrored fill."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import crops
from data_prep.schema import Box, DataError


def gradient(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows % 256, columns % 256, (rows + columns) % 256], -1).astype(np.uint8))


@pytest.fixture(scope="module")
def goldens(shared: Path) -> Path:
    return shared / "data" / "goldens"


def test_official_crops_pixel_for_pixel(goldens: Path):
    items = json.loads((goldens / "cases.json").read_text())["crops"]["items"]
    assert len(items) == 15
    for item in items:
        patch = Image.open(goldens / item["patch"]).convert("RGB")
        crop = crops.context_crop(patch, Box(**item["bbox"]), fill="white", color_enhance=1.3)
        want = Image.open(goldens / item["crop"]).convert("RGB")
        np.testing.assert_array_equal(np.asarray(crop), np.asarray(want), err_msg=item["crop"])
        assert hashlib.sha256(crop.tobytes()).hexdigest() == item["sha256_rgb_bytes"]


def test_fills_differ_only_outside_the_image(goldens: Path):
    items = json.loads((goldens / "cases.json").read_text())["crops"]["items"]
    inner = 0
    for item in items:
        patch = Image.open(goldens / item["patch"]).convert("RGB")
        box = Box(**item["bbox"])
        white, reflect = (np.asarray(crops.context_crop(patch, box, fill)) for fill in crops.FILLS[::-1])
        window = crops.crop_window(box)
        leaves = min(window.left, window.top) < 0 or max(window.right, window.bottom) > 512
        assert (white != reflect).any() == leaves
        inner += not leaves
    assert 0 < inner < len(items)


@pytest.mark.parametrize("box", [Box(10, 20, 31, 60), Box(0, 0, 7, 4), Box(90, 30, 100, 80), Box(40, 10, 43, 11)])
def test_window_is_square_centred_and_1_8_times_the_box(box: Box):
    window = crops.crop_window(box)
    side = max(box.width, box.height)
    assert window.width == window.height
    assert 0 <= 1.8 * side - window.width < 2
    for axis in (("left", "right"), ("top", "bottom")):
        centre, want = (sum(getattr(b, name) for name in axis) / 2 for b in (window, box))
        assert abs(centre - want) <= 0.5
    crop = crops.context_crop(gradient(100, 80), box)
    assert crop.size == (224, 224)


def test_reflection_mirrors_the_picture():
    picture = gradient(60, 60)
    crop = np.asarray(crops.context_crop(picture, Box(0, 10, 40, 50)), int)  # window (-16, -6)-(56, 66)
    padded = np.pad(np.asarray(picture), ((6, 6), (16, 0), (0, 0)), mode="reflect")[:72, :72]
    want = np.asarray(Image.fromarray(padded).resize((224, 224), Image.Resampling.LANCZOS), int)
    np.testing.assert_array_equal(crop, want)
    assert crop.min() >= 0


def test_bad_boxes_and_pictures_are_sentences():
    picture = gradient(60, 60)
    for box, message in (
        (Box(10, 10, 10, 20), "no area"),
        (Box(20, 10, 10, 20), "no area"),
        (Box(60, 10, 70, 20), "outside its image"),
        (Box(-30, 10, -20, 20), "outside its image"),
    ):
        with pytest.raises(DataError, match=message):
            crops.context_crop(picture, box)
    with pytest.raises(DataError, match='fill "black"'):
        crops.context_crop(picture, Box(1, 1, 9, 9), fill="black")
    encoded = crops.encode_jpeg(picture)
    for damaged in (b"", b"text", encoded[: len(encoded) // 2]):
        with pytest.raises(DataError, match="does not decode"):
            crops.decode_rgb(damaged)


def test_transparent_pixels_become_white_not_black():
    buffer = io.BytesIO()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(buffer, "PNG")
    assert np.asarray(crops.decode_rgb(buffer.getvalue())).min() == 255


def test_jpeg_is_444_and_deterministic():
    picture = gradient(64, 64)
    assert crops.encode_jpeg(picture) == crops.encode_jpeg(picture)
    layers = Image.open(io.BytesIO(crops.encode_jpeg(picture))).layer  # type: ignore[attr-defined]
    assert [layer[1:3] for layer in layers] == [(1, 1)] * 3
