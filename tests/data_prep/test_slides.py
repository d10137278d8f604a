"""Opening slides: real vendor files against OpenSlide's own reading, scale, transparency, plain and striped pictures."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image, ImageCms

from data_prep import slide_readers
from data_prep.pyramid import write_pyramid
from data_prep.schema import DataError
from data_prep.slide_readers import OpenSlidePixels, TiffPixels, on_white, reader_difference
from data_prep.slides import open_slide, resolve_scale, slide_facts

VENDOR_FILES = (  # file, vendor, size, levels, um/px (0: none usable)
    ("aperio_cmu1/CMU-1-Small-Region.svs", "aperio", (2220, 2967), 1, 0.499),
    ("aperio_tcga/tcga-cr-7395-01a-01-ts1.svs", "aperio", (4443, 3567), 2, 0.0),
    ("openslide_python_fixtures/small.svs", "aperio", (16, 16), 1, 0.499),
    ("openslide_python_fixtures/boxes.tiff", "generic-tiff", (300, 250), 4, 0.0),
    ("openslide_python_fixtures/boxes_0.dcm", "dicom", (16, 16), 1, 0.499),
)


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    rough = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    return np.asarray(Image.fromarray(rough).resize((700, 530), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("name, vendor, size, levels, mpp", VENDOR_FILES)
def test_vendor_files_read_as_openslide_reads_them(
    shared: Path, name: str, vendor: str, size: tuple[int, int], levels: int, mpp: float
) -> None:
    path = shared / "data" / "slides" / name
    with open_slide(path) as slide:
        assert slide.size == size
        facts = slide_facts(slide)
        assert (facts["reader"], facts["vendor"], facts["levels"]) == ("openslide", vendor, levels)
        if mpp:
            assert resolve_scale(slide.pixels.properties, 0, "", name).mpp == mpp
        else:
            with pytest.raises(DataError, match=r"no usable pixel size.*add a column mpp"):
                resolve_scale(slide.pixels.properties, 0, "", name)
        x, y = size[0] // 3, size[1] // 3
        w, h = min(300, size[0] - x), min(300, size[1] - y)
        own = openslide.OpenSlide(path).read_region((x, y), 0, (w, h))
        assert np.array_equal(slide.read(x, y, w, h), on_white(np.asarray(own)))


def test_transparency_and_what_lies_outside_are_white(tmp_path: Path) -> None:
    pixels = np.zeros((40, 40, 4), np.uint8)
    pixels[:, 20:] = (10, 20, 30, 255)
    pixels[0, 0] = (0, 0, 0, 128)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with open_slide(tmp_path / "a.png") as slide:
        read = slide.read(-10, -10, 60, 60)
    assert read.shape == (60, 60, 3)
    assert (read[:10] == 255).all() and (read[:, 55:] == 255).all()
    assert tuple(read[10, 10]) == (127, 127, 127) and tuple(read[20, 15]) == (255, 255, 255)
    assert tuple(read[20, 35]) == (10, 20, 30)


def test_a_pyramid_opens_with_its_scale_levels_and_pixels(tmp_path: Path, noise: np.ndarray) -> None:
    path = tmp_path / "血液 é.tiff"
    write_pyramid(path, 700, 530, lambda x, y, w, h: noise[y : y + h, x : x + w], mpp=0.265, quality=95)
    with open_slide(path) as slide:
        assert slide.size == (700, 530) and slide_facts(slide)["levels"] == 2
        assert resolve_scale(slide.pixels.properties, 0, "", "a").mpp == pytest.approx(0.265, abs=1e-4)
        assert np.abs(slide.read(0, 0, 700, 530).astype(int) - noise).mean() < 3
        assert slide.thumbnail(200).size == (200, 151)
    first = path.read_bytes()
    write_pyramid(path, 700, 530, lambda x, y, w, h: noise[y : y + h, x : x + w], mpp=0.265, quality=95)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    "options", [{"rowsperstrip": 37}, {"tile": (64, 96)}, {"compression": "zlib", "rowsperstrip": 50}]
)
def test_striped_tiffs_are_read_segment_by_segment(
    tmp_path: Path, noise: np.ndarray, options: dict[str, object]
) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, noise, photometric="rgb", **options)
    with open_slide(path) as slide:
        assert (slide.pixels.name == "tifffile") == ("tile" not in options)
        assert np.array_equal(slide.read(90, 30, 250, 301), noise[30:331, 90:340])
    segments = TiffPixels(path)
    assert np.array_equal(segments.read(90, 30, 250, 301), noise[30:331, 90:340])
    segments.close()


def test_two_readers_are_compared(tmp_path: Path, noise: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, noise, photometric="rgb", tile=(64, 64))
    assert reader_difference(path) == 0
    read = TiffPixels.read
    monkeypatch.setattr(TiffPixels, "read", lambda *args: read(*args)[..., ::-1])  # blue for red
    assert (reader_difference(path) or 0) > 3
    tifffile.imwrite(tmp_path / "striped.tif", noise, photometric="rgb", rowsperstrip=9)
    assert reader_difference(tmp_path / "striped.tif") is None


def tiles_equal_openslide(path: Path) -> None:
    """Every pixel, in reads that begin and end within tiles."""
    pixels = OpenSlidePixels(path)
    assert pixels._tiles is not None
    for x, y, w, h in ((0, 0, *pixels.size), (7, 3, 300, 290), (pixels.size[0] - 11, pixels.size[1] - 9, 11, 9)):
        assert np.array_equal(pixels.read(x, y, w, h), on_white(pixels._read(x, y, w, h)))
    pixels.close()


@pytest.mark.parametrize("photometric, subsampling", [("rgb", None), ("ycbcr", (1, 1)), ("ycbcr", (2, 2))])
def test_jpeg_tiles_read_directly_are_what_openslide_reads(
    tmp_path: Path, noise: np.ndarray, photometric: str, subsampling: tuple[int, int] | None
) -> None:
    pytest.importorskip("imagecodecs")
    form = {"photometric": photometric, "subsampling": subsampling, "compression": "jpeg", "tile": (128, 128)}
    tifffile.imwrite(tmp_path / "a.tif", noise, **form)
    tiles_equal_openslide(tmp_path / "a.tif")


def test_jpeg_tiles_of_a_real_aperio_slide_are_read_directly(shared: Path) -> None:
    tiles_equal_openslide(next((shared / "data" / "slides").rglob("CMU-1-Small-Region.svs")))


def test_tiles_that_differ_from_openslides_are_not_used(tmp_path: Path, noise: np.ndarray, monkeypatch) -> None:
    write_pyramid(tmp_path / "a.tiff", 700, 530, lambda x, y, w, h: noise[y : y + h, x : x + w])
    decode = TiffPixels._decode
    monkeypatch.setattr(TiffPixels, "_decode", lambda *args: decode(*args)[..., ::-1])  # blue for red
    with open_slide(tmp_path / "a.tiff") as slide:
        assert slide.pixels._tiles is None
        assert np.abs(slide.read(0, 0, 700, 530).astype(int) - noise).mean() < 9


@pytest.mark.parametrize(
    "properties, stated, mpp, source",
    [
        ({"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.25"}, 0.0, 0.25, "openslide.mpp-x"),
        ({"openslide.mpp-x": "0.25"}, 0.23, 0.23, "table"),
        ({"tiff.XResolution": "40000", "tiff.ResolutionUnit": "centimeter"}, 0.0, 0.25, "tiff.XResolution"),
        ({"tiff.XResolution": "101600", "tiff.ResolutionUnit": "inch"}, 0.0, 0.25, "tiff.XResolution"),
        ({"openslide.mpp-x": "353", "tiff.XResolution": "72", "tiff.ResolutionUnit": "inch"}, 0.0, None, "72 dpi"),
        ({"tiff.XResolution": "40000"}, 0.0, None, "no unit"),
        ({"openslide.mpp-x": "0", "openslide.mpp-y": "none"}, 0.0, None, "words"),
        ({"openslide.objective-power": "40"}, 0.0, None, "an objective is no pixel size"),
        ({"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.5"}, 0.0, None, "not square"),
    ],
)
def test_scale_comes_from_the_first_source_that_states_one(
    properties: dict[str, str], stated: float, mpp: float | None, source: str
) -> None:
    if mpp is None:
        with pytest.raises(DataError, match=r"^here: "):
            resolve_scale(properties, stated, "", "here")
        return
    found = resolve_scale(properties, stated, "", "here")
    assert (found.mpp, found.source) == (pytest.approx(mpp), source)
    assert bool(found.note) == (source == "table")  # 0.23 against the file's 0.25


@pytest.mark.parametrize("layout", [{"tile": (128, 128)}, {"rowsperstrip": 64}], ids=["openslide", "tifffile"])
@pytest.mark.parametrize(("stated", "unit", "mpp"), [(0.22, "µm", 0.22), (250.0, "nm", 0.25), (0.25, "", 0.25)])
def test_an_ome_tiff_states_its_scale(
    tmp_path: Path, noise, layout: dict, stated: float, unit: str, mpp: float
) -> None:
    metadata = {"axes": "YXS", "PhysicalSizeX": stated, "PhysicalSizeY": stated}
    metadata |= {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit} if unit else {}
    tifffile.imwrite(tmp_path / "a.ome.tif", noise, photometric="rgb", metadata=metadata, **layout)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        scale = resolve_scale(slide.pixels.properties, 0, "", "a")
        assert (scale.mpp, scale.source) == (mpp, "OME PhysicalSizeX")
        assert np.array_equal(slide.read(0, 0, 700, 530), noise)


def test_a_colour_profile_is_recorded_and_changes_no_pixel(tmp_path: Path, noise: np.ndarray) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, options in (("a.tif", {"tile": (128, 128)}), ("b.tif", {"rowsperstrip": 64})):
        tifffile.imwrite(tmp_path / name, noise, photometric="rgb", iccprofile=profile, **options)
    Image.fromarray(noise).save(tmp_path / "c.png", icc_profile=profile)
    for name in ("a.tif", "b.tif", "c.png"):
        with open_slide(tmp_path / name) as slide:
            assert slide_facts(slide)["icc_sha256"] == hashlib.sha256(profile).hexdigest()
            assert np.array_equal(slide.read(0, 0, 700, 530), noise)


@pytest.mark.parametrize("options", [{"tile": (64, 64)}, {"rowsperstrip": 9}], ids=["openslide", "tifffile"])
def test_threads_read_what_one_reads(tmp_path: Path, noise: np.ndarray, options: dict) -> None:
    tifffile.imwrite(tmp_path / "a.tif", noise, photometric="rgb", compression="zlib", **options)

    def own(k: int) -> bytes:
        with open_slide(tmp_path / "a.tif") as slide:
            return slide.read(k * 7, k * 5, 300, 200).tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(own, range(40))) == [own(k) for k in range(40)]


def test_many_slides_leave_no_file_open(tmp_path: Path, noise: np.ndarray) -> None:
    for name, options in (("a.tif", {"tile": (64, 64)}), ("b.tif", {"rowsperstrip": 9})):
        tifffile.imwrite(tmp_path / name, noise, photometric="rgb", **options)
    Image.fromarray(noise).save(tmp_path / "c.png")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for name in ("a.tif", "b.tif", "c.png"):
            with open_slide(tmp_path / name) as slide:
                slide_facts(slide)
                slide.read(0, 0, 20, 20)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_pictures_limit_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own is lower, and its sentence another."""
    Image.new("RGB", (400, 300)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with open_slide(tmp_path / "a.png") as slide:
        assert slide.size == (400, 300) and Image.MAX_IMAGE_PIXELS == 1000
    monkeypatch.setattr(slide_readers, "PICTURE_PIXELS", 10_000)
    with pytest.raises(DataError, match=r"400x300 px is too large; use a tiled TIFF"):
        open_slide(tmp_path / "a.png").__enter__()


def test_files_that_cannot_be_opened_say_why(tmp_path: Path) -> None:
    (tmp_path / "empty.svs").touch()
    (tmp_path / "text.svs").write_text("no slide")
    (tmp_path / "alone.mrxs").write_bytes(b"\xff\xd8")
    for name, words in (("empty.svs", "0 bytes"), ("text.svs", "does not open"), ("alone.mrxs", "Slidedat.ini")):
        with pytest.raises(DataError, match=words) as error, open_slide(tmp_path / name):
            raise AssertionError
        assert name in str(error.value)
    with pytest.raises(DataError, match="not a file"), open_slide(tmp_path / "missing.svs"):
        raise AssertionError
