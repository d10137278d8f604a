"""Opening a picture to ask about: its kind, its cells, and the reason when nothing is answered."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.picture import Preparation, open_picture
from data_prep.schema import DataError


def look(path: Path, work: Path, **options):
    return open_picture(path, Preparation(), work=work / "work", **options)


def bomb(path: Path, side: int) -> Path:
    """A PNG of a few hundred bytes whose header promises side x side pixels."""
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def test_a_cell_and_a_field_are_told_apart(shared: Path, tmp_path: Path):
    crop = next((shared / "data/cells/pbc_barcelona/Eosinophil").glob("*.jpg"))
    found = look(crop, tmp_path)
    assert found.kind == "crop" and len(found.cells) == 1
    with Image.open(crop) as image:
        width, height = image.size
    box = found.cells[0].bbox
    assert box.left < width / 2 < box.right and box.top < height / 2 < box.bottom
    assert 0.3 * width < box.width < 0.95 * width


def test_a_fields_scale_is_estimated_and_its_white_cell_is_where_the_annotator_saw_it(shared: Path, tmp_path: Path):
    from xml.etree import ElementTree

    name = "BloodImage_00226"
    field = next((shared / "data/fields/bccd").rglob(f"{name}.jpg"))
    found = look(field, tmp_path)
    assert found.kind == "field" and "estimated" in found.mpp_source
    tree = ElementTree.parse(next((shared / "data/fields/bccd").rglob(f"{name}.xml")))
    truth = [
        [int(o.find("bndbox").find(side).text) for side in ("xmin", "ymin", "xmax", "ymax")]
        for o in tree.iter("object")
        if o.find("name").text == "WBC"
    ]
    assert len(found.cells) == len(truth)
    for cell in found.cells:
        x, y = (cell.bbox.left + cell.bbox.right) / 2, (cell.bbox.top + cell.bbox.bottom) / 2
        assert any(left < x < right and top < y < bottom for left, top, right, bottom in truth)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("text.svs", b"hello", "does not open"),
        ("text.png", b"hello", "does not open"),
        ("empty.png", b"", "0 bytes"),
        ("notes.txt", b"hello", "is not an image or slide"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path: Path, name: str, content: bytes, reason: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason):
        look(path, tmp_path)


def test_tiny_huge_white_and_noisy_pictures_are_refused(tmp_path: Path):
    Image.new("RGB", (1, 1)).save(tmp_path / "one.png")
    Image.new("RGB", (300, 300), "white").save(tmp_path / "white.png")
    noise = np.random.default_rng(0).integers(0, 255, (600, 800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    for path, reason in (
        (tmp_path / "one.png", "1x1 px"),
        (bomb(tmp_path / "bomb.png", 60_000), "too large"),
        (bomb(tmp_path / "large.png", 8_000), "more than"),
        (tmp_path / "white.png", "no whole white cell"),
        (tmp_path / "noise.png", "no whole white cell|no smear's|fails quality|drawing"),
    ):
        with pytest.raises(DataError, match=reason):
            look(path, tmp_path)


def test_a_blurred_field_fails_quality_control(shared: Path, tmp_path: Path):
    from PIL import ImageFilter

    field = next((shared / "data/fields/bccd").rglob("BloodImage_00226.jpg"))
    with Image.open(field) as image:
        image.filter(ImageFilter.GaussianBlur(14)).save(tmp_path / "blurred.png")
    with pytest.raises(DataError, match=r"fails quality control: out of focus"):
        look(tmp_path / "blurred.png", tmp_path, mpp=0.1)


def test_another_geometry_is_refused():
    with pytest.raises(DataError, match="geometry"):
        Preparation("box2.5-white-bicubic64")


@pytest.mark.slow
def test_no_slide_at_hand_is_taken_for_a_smear(shared: Path, tmp_path: Path):
    files = [p for p in (shared / "data/slides").rglob("*") if p.suffix in (".svs", ".tiff", ".dcm")]
    assert len(files) >= 5
    for number, path in enumerate(sorted(files)):
        for mpp in (0.0, 0.25):
            with pytest.raises(DataError):
                look(path, tmp_path / f"{number}{mpp}", mpp=mpp, kind="slide")
