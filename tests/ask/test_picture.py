"""Opening a picture to ask about: its kind, its cells, and the reason when nothing is answered."""

from __future__ import annotations

import dataclasses
import io
import itertools
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from data_prep import picture, pyramid
from data_prep.picture import Picture, Preparation, open_picture
from data_prep.schema import Cell, DataError
from pbs_jax.ask.page import impression
from pbs_jax.ask.picture import as_question


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


def test_a_picture_without_colour_is_refused(shared: Path, tmp_path: Path):
    crop = next((shared / "data/cells/pbc_barcelona/Eosinophil").glob("*.jpg"))
    with Image.open(crop) as image:
        image.convert("L").convert("RGB").save(tmp_path / "grey.png")
    with pytest.raises(DataError, match=r"grey.png has no colour"):
        look(tmp_path / "grey.png", tmp_path)


def test_a_blurred_cell_is_refused_or_remarked_on(shared: Path, tmp_path: Path):
    told = 0
    for crop in sorted((shared / "data/cells/pbc_barcelona/Neutrophil").glob("*.jpg"))[:8]:
        assert not look(crop, tmp_path, kind="crop").remarks
        with Image.open(crop) as image:
            image.convert("RGB").filter(ImageFilter.GaussianBlur(10)).save(tmp_path / "blurred.png")
        try:
            told += "may be out of focus" in str(look(tmp_path / "blurred.png", tmp_path, kind="crop").remarks)
        except DataError as refused:
            told += "is out of focus" in str(refused)
    assert told >= 4  # crops whose red cells are few or pale pass: two thirds are told


def test_a_clump_does_not_hide_a_fields_scale(shared: Path, tmp_path: Path):
    """Its one cell at the first guess of the scale is none: the next guess finds it."""
    field = next((shared / "data/fields/bccd").rglob("BloodImage_00000.jpg"))
    found = look(field, tmp_path)
    assert found.kind == "field" and len(found.cells) == 1 and "estimated" in found.remarks[0]


def test_bodies_too_large_for_white_cells_are_told(tmp_path: Path):
    """Every guess of the scale lies outside what a photograph can have."""
    rgb = np.full((2400, 3000, 3), (235, 225, 230), np.uint8)
    y, x = np.mgrid[:2400, :3000]
    rgb[(y - 1200) ** 2 + (x - 1500) ** 2 < 900**2] = (90, 40, 140)
    Image.fromarray(rgb).save(tmp_path / "large.png")
    with pytest.raises(DataError, match=r"would be white cells at 0.0\d+ um/px, which is no smear's"):
        look(tmp_path / "large.png", tmp_path, kind="field")


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
        (tmp_path / "white.png", "blank"),
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


@pytest.fixture
def large_slide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pyramid of 191 million pixels, more than Pillow opens: the same tile everywhere."""
    tile = io.BytesIO()
    Image.new("RGB", (pyramid.TILE, pyramid.TILE), (230, 200, 210)).save(tile, "JPEG")

    def tiles(size: tuple[int, int], *more):
        return itertools.repeat(tile.getvalue(), -(-size[0] // pyramid.TILE) * -(-size[1] // pyramid.TILE))

    monkeypatch.setattr(pyramid, "_tiles", tiles)
    (tmp_path / "slides").mkdir()
    path = tmp_path / "slides" / "large.tiff"
    pyramid.write_pyramid(path, 13_824, 13_824, lambda *box: np.empty(0), mpp=0.25)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(path)
    return path


@pytest.mark.parametrize("suffix", [".tiff", ".svs"])
@pytest.mark.parametrize("kind", ["auto", "slide"])
def test_no_slide_is_too_large(large_slide: Path, suffix: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    path = large_slide.rename(large_slide.with_suffix(suffix))
    taken = []
    monkeypatch.setattr(picture, "_slide", lambda path, name, size, *more: taken.append(size))
    look(path, path.parent.parent, kind=kind)
    assert taken == [(13_824, 13_824)]
    with pytest.raises(DataError, match="too many for a field: open it as slide"):
        look(path, path.parent.parent, kind="field")


def test_a_one_level_tiff_of_many_pixels_is_a_slide_and_one_large_strip_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import tifffile

    monkeypatch.setattr(picture, "_slide", lambda path, name, size, *more: size)
    zeros = np.zeros((8_000, 8_000, 3), np.uint8)
    for name, shape in (("tiles", {"tile": (512, 512)}), ("rows", {"rowsperstrip": 64})):
        tifffile.imwrite(tmp_path / f"{name}.tiff", zeros, photometric="rgb", compression="zlib", **shape)
        assert look(tmp_path / f"{name}.tiff", tmp_path) == (8_000, 8_000)
    for name, shape in (("tile", {"tile": (8_000, 8_000)}), ("strip", {"rowsperstrip": 8_000})):
        tifffile.imwrite(tmp_path / f"{name}.tiff", zeros, photometric="rgb", compression="zlib", **shape)
        with pytest.raises(DataError, match="convert it to a tiled TIFF"):
            look(tmp_path / f"{name}.tiff", tmp_path, kind="slide")


def test_refusals_name_no_table_no_folder_and_no_option_of_another_program(shared: Path, tmp_path: Path):
    slide = next((shared / "data/slides").rglob("CMU-1-Small-Region.svs"))
    (tmp_path / "text.jpg").write_text("hello")
    Image.new("P", (300, 300)).save(tmp_path / "palette.gif")
    blank = tmp_path / "blank.tiff"
    pyramid.write_pyramid(blank, 1100, 1100, lambda x, y, w, h: np.full((h, w, 3), 240, np.uint8))
    messages = []
    for number, (path, options) in enumerate(
        [
            (slide, {}),  # no 40x scan
            (slide, {"mpp": 0.25}),  # tissue
            (blank, {}),  # no scale
            (blank, {"mpp": 0.25}),  # no usable tile
            *((blank, {"mpp": mpp}) for mpp in (float("nan"), float("inf"), -1.0, 40.0)),
            (tmp_path / "text.jpg", {}),
            (tmp_path / "palette.gif", {}),
        ]
    ):
        with pytest.raises(DataError) as refused:
            look(path, tmp_path.with_name(f"{tmp_path.name}-{number}"), **options)
        messages.append(str(refused.value))
    for message in messages:
        assert not any(words in message for words in ("table", "qc/", "--", "BytesIO", "a auto", str(tmp_path))), (
            message
        )
    assert "give its mpp" in messages[2] and "GIF" in messages[-1] and "save it as PNG" in messages[-1]


def counted(kind: str, **cells: int) -> Picture:
    found = [
        Cell(f"a:{name}{k}", "test", name, "model", b"", confidence=0.9)
        for name, count in cells.items()
        for k in range(count)
    ]
    return Picture("a", kind, (1, 1), 0.25, "", found, b"", 1.0)


@pytest.mark.parametrize(
    ("question", "options", "answer", "remark"),
    [
        (
            "Which white blood cell type is most common on this slide?",
            (),
            "Eosinophil",
            "the cells counted say otherwise",
        ),
        ("Which white blood cell type is most common on this slide?", (), "Neutrophil", ""),
        ("Which of these is most common?", ("Eosinophil", "Monocyte"), "Monocyte", ""),  # none of either
        ("(True/False) Neutrophils make up 10 % of the white blood cells.", (), "True", "against 12 of 20"),
        ("(True/False) Neutrophils make up 10 % of the white blood cells.", (), "False", ""),
        ("How is the smear stained?", (), "Eosinophil", ""),
    ],
)
def test_what_the_cells_counted_deny_of_a_slides_answer_is_said(
    question: str, options: tuple[str, ...], answer: str, remark: str
):
    said = dataclasses.replace(as_question(question, options, level="slide"), answer=answer)
    told = counted("slide", Neutrophil=12, Lymphocyte=8).speaks_against(said)
    assert remark in told and bool(remark) == bool(told)


def test_another_name_than_the_classifiers_is_said_of_one_cell_only():
    said = dataclasses.replace(as_question("What type of white blood cell is this?"), answer="Monocyte")
    assert counted("crop", Neutrophil=1).speaks_against(said) == "the classifier says Neutrophil (0.90)"
    assert not counted("crop", Monocyte=1).speaks_against(said)
    assert not counted("field", Neutrophil=2).speaks_against(said)


def test_one_is_not_counted_as_many():
    cell = Cell("a:0", "test", "Neutrophil", "model", b"")
    found = Picture("a", "slide", (1, 1), 0.25, "", [cell], b"", 1.0, (1, 1))
    assert impression(found).startswith("1 white cell found on 1 of 1 tiles;")


@pytest.mark.slow
def test_no_slide_at_hand_is_taken_for_a_smear(shared: Path, tmp_path: Path):
    files = [p for p in (shared / "data/slides").rglob("*") if p.suffix in (".svs", ".tiff", ".dcm")]
    assert len(files) >= 5
    for number, path in enumerate(sorted(files)):
        for mpp in (0.0, 0.25):
            with pytest.raises(DataError):
                look(path, tmp_path / f"{number}{mpp}", mpp=mpp, kind="slide")
