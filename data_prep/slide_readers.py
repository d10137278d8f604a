"""The readers of slide files behind one interface: OpenSlide, tifffile segment by segment, Pillow for plain pictures."""

from __future__ import annotations

import contextlib
import functools
import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openslide
from PIL import Image

from data_prep.progress import progress
from data_prep.schema import DataError

TIFF_SUFFIXES = (".tif", ".tiff")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", *TIFF_SUFFIXES)
VENDOR_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".dcm", ".vms", ".vmu", ".bif", ".svslide", ".zvi", ".czi")
SLIDE_SUFFIXES = (*VENDOR_SUFFIXES, *PICTURE_SUFFIXES)
PICTURE_PIXELS = 400_000_000  # a plain picture is decoded whole: 1.2 GB
SEGMENT_PIXELS = 50_000_000  # of a tile or strip, which is decoded whole however little of it is asked for
CACHE = 64 * 2**20  # bytes of decoded tiles: those that neighbouring blocks share
JPEG, RGB = 7, 2  # TIFF's Compression and PhotometricInterpretation
ADOBE = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0"  # the marker before its last byte, which tells RGB (0) from YCbCr (1)
PLAIN_VENDORS = ("aperio", "generic-tiff")  # whose level 0 is page 0, tile beside tile
DECODE_ERRORS = (openslide.OpenSlideError, OSError, ValueError, SyntaxError, RuntimeError)


class Pixels(Protocol):
    """One opened file. `read` gives uint8[h, w, 3 or 4]; what lies outside the slide may be anything."""

    name: str
    size: tuple[int, int]
    levels: int
    properties: Mapping[str, str]
    icc: bytes

    def read(self, x: int, y: int, w: int, h: int) -> np.ndarray: ...

    def thumbnail(self, side: int) -> Image.Image: ...

    def close(self) -> None: ...


def on_white(pixels: np.ndarray) -> np.ndarray:
    """uint8[h, w, 3] from uint8[h, w, 3 or 4], straight alpha laid on white (an unscanned area is not black)."""
    if pixels.shape[2] == 3:
        return pixels
    alpha = pixels[..., 3:]
    if alpha.min() == 255:
        return np.ascontiguousarray(pixels[..., :3])
    weight = alpha.astype(np.uint16)
    return ((pixels[..., :3] * weight + 255 * (255 - weight) + 127) // 255).astype(np.uint8)


def open_pixels(path: Path) -> Pixels:
    """The first reader that opens the file. Raises DataError with one sentence on what to do."""
    if not path.is_file():
        raise DataError(f"slide {path} is not a file: correct its path in the table")
    if path.stat().st_size == 0:
        raise DataError(f"slide {path} is empty (0 bytes): copy it again")
    suffix = path.suffix.casefold()
    if suffix == ".mrxs":
        _check_mrxs(path)
    refused = ""
    if suffix not in PICTURE_SUFFIXES or suffix in TIFF_SUFFIXES:
        try:
            return OpenSlidePixels(path)
        except openslide.OpenSlideUnsupportedFormatError:
            refused = "not a format OpenSlide knows"
        except (openslide.OpenSlideError, DataError) as error:
            refused = f"OpenSlide {openslide.__library_version__}: {error}"
    readers: list[Callable[[Path], Pixels]] = [TiffPixels] if _is_tiff(path) else []
    readers += [PicturePixels] if suffix in PICTURE_SUFFIXES else []
    for reader in readers:
        try:
            return reader(path)
        except (*DECODE_ERRORS, ImportError, LookupError, Image.DecompressionBombError) as error:
            refused += f"{'; ' if refused else ''}{reader.__name__}: {error}"
    raise DataError(f"slide {path} does not open ({refused}): copy it again, or convert it to a tiled TIFF")


@functools.cache
def dicom_series(path: Path) -> str:
    """The series that a DICOM file is an instance of: all of them are one slide. "" for other files."""
    if path.suffix.casefold() != ".dcm":
        return ""
    try:
        with openslide.OpenSlide(path) as slide:
            return str(slide.properties.get("dicom.SeriesInstanceUID", ""))
    except openslide.OpenSlideError:
        return ""


def files_of(path: Path) -> list[Path]:
    """All files of a slide, in order: those of an MRXS slide's folder, those of a DICOM series beside each other."""
    if path.suffix.casefold() == ".mrxs":
        return [path, *sorted(part for part in path.with_suffix("").rglob("*") if part.is_file())]
    if series := dicom_series(path):
        return sorted(other for other in path.parent.iterdir() if dicom_series(other) == series)
    return [path]


def reads_regions(path: Path) -> bool:
    """Whether the file is read region by region, so that its size costs no memory."""
    for reader in (OpenSlidePixels, TiffPixels):
        try:
            reader(path).close()
            return True
        except (*DECODE_ERRORS, ImportError, LookupError):
            continue
    return False


def _check_segment(width: int, height: int) -> None:
    if width * height > SEGMENT_PIXELS:
        raise DataError(f"a tile or strip of {width}x{height} px is too large")


def _check_mrxs(path: Path) -> None:
    folder = path.with_suffix("")
    if not (folder / "Slidedat.ini").is_file():
        raise DataError(f"slide {path} needs the folder {folder.name}/ with Slidedat.ini beside it: copy both")


def _is_tiff(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


class OpenSlidePixels:
    """OpenSlide: vendor formats and tiled TIFF. Reads are composited over the slide's bounds as they are."""

    name = "openslide"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()
        self.size = self._slide.dimensions
        self.levels = self._slide.level_count
        self.properties: Mapping[str, str] = dict(self._slide.properties)
        for level in range(self.levels):
            sides = [self.properties.get(f"openslide.level[{level}].tile-{side}", 0) for side in ("width", "height")]
            _check_segment(*map(int, sides))
        profile = self._slide.color_profile
        self.icc = profile.tobytes() if profile else b""

    def _open(self) -> None:
        self._slide = openslide.OpenSlide(self._path)
        self._slide.set_cache(openslide.OpenSlideCache(CACHE))

    @functools.cached_property
    def _tiles(self) -> TiffPixels | None:
        """The same pixels tile by tile, where they are JPEG: OpenSlide takes more than twice as long, most of it to paint
        and convert what it has decoded. None where anything differs from what OpenSlide reads at three places. Looked for
        at the first read: many slides are opened for their properties alone."""
        if self.properties["openslide.vendor"] not in PLAIN_VENDORS:
            return None
        try:
            tiles = TiffPixels(self._path)
            alike = tiles.is_jpeg and tiles.is_complete and tiles.size == self.size
            if alike and _difference(self._read, tiles.read, self.size) == 0:
                return tiles
            tiles.close()
        except (*DECODE_ERRORS, LookupError):
            self._slide.close()  # an error leaves it broken
            self._open()
        return None

    def read(self, x: int, y: int, w: int, h: int) -> np.ndarray:
        if self._tiles:
            with contextlib.suppress(*DECODE_ERRORS, LookupError):  # OpenSlide decides what is readable
                return self._tiles.read(x, y, w, h)
        return self._read(x, y, w, h)

    def _read(self, x: int, y: int, w: int, h: int) -> np.ndarray:
        picture = self._slide.read_region((x, y), 0, (w, h))
        # Opaque, as nearly always: Pillow drops the fourth channel in a fifth of the time that NumPy takes.
        return np.asarray(picture.convert("RGB") if picture.getchannel("A").getextrema() == (255, 255) else picture)

    def thumbnail(self, side: int) -> Image.Image:
        level = self._slide.get_best_level_for_downsample(max(self.size) / side)
        if max(self._slide.level_dimensions[level]) <= 4 * side + 64:
            picture = self._slide.read_region((0, 0), level, self._slide.level_dimensions[level])
            picture.thumbnail((side, side))
            return picture
        return strided_thumbnail(self.read, self.size, side)

    def close(self) -> None:
        self._slide.close()
        if tiles := self.__dict__.get("_tiles"):
            tiles.close()


def strided_thumbnail(
    read: Callable[[int, int, int, int], np.ndarray], size: tuple[int, int], side: int
) -> Image.Image:
    """A thumbnail of a slide without a small enough level, block by block."""
    factor = max(1, math.ceil(max(size) / side))
    block = max(factor, 2048 // factor * factor)
    out = Image.new("RGB", (max(1, size[0] // factor), max(1, size[1] // factor)), "white")
    for y in progress(range(0, size[1], block), desc="overview, rows of blocks"):
        for x in range(0, size[0], block):
            w, h = min(block, size[0] - x), min(block, size[1] - y)
            if w >= factor and h >= factor:
                part = Image.fromarray(on_white(read(x, y, w, h)))
                out.paste(part.reduce(factor), (x // factor, y // factor))
    return out


class TiffPixels:
    """tifffile on page 0, segment by segment: striped, JPEG-2000 and OME TIFF. JPEG is Pillow's (libjpeg-turbo, as
    OpenSlide's); codecs beyond it, zlib and LZW need the extra `formats` (imagecodecs)."""

    name = "tifffile"

    def __init__(self, path: Path) -> None:
        import tifffile

        self._file = tifffile.TiffFile(path)
        self._page = page = self._file.pages.first
        channels = page.shape[-1] if len(page.shape) == 3 else 1
        if page.dtype != np.uint8 or channels not in (1, 3, 4) or page.planarconfig not in (None, 1):
            raise DataError(f"{path.name} has {page.dtype} pixels of shape {page.shape}: 8-bit RGB is read")
        across, down = self._segment
        _check_segment(across, down)
        self._decoded = functools.lru_cache(maxsize=CACHE // (across * down * 3))(self._decode)
        self.size = (page.imagewidth, page.imagelength)
        self.levels = len(self._file.series[0].levels)
        unit = {2: "inch", 3: "centimeter"}.get(int(_tag(page, "ResolutionUnit") or 0), "")
        self.properties: Mapping[str, str] = {"openslide.vendor": "tiff", "tiff.ResolutionUnit": unit}
        if (resolution := _tag(page, "XResolution")) and resolution[1]:
            self.properties |= {"tiff.XResolution": str(resolution[0] / resolution[1])}
        if self._file.is_ome:
            self.properties |= {"tiff.ImageDescription": self._file.ome_metadata or ""}
        self.is_jpeg = page.compression == JPEG and channels == 3 and page.is_tiled
        profile = _tag(page, "InterColorProfile")
        self.icc = bytes(profile) if profile else b""
        self.read(0, 0, 1, 1)  # a codec that is not installed shows here

    @property
    def _segment(self) -> tuple[int, int]:
        """Width and height of a tile or strip."""
        page = self._page
        if page.is_tiled:
            return page.tilewidth, page.tilelength
        return page.imagewidth, min(page.rowsperstrip, page.imagelength)

    @functools.cached_property
    def is_complete(self) -> bool:
        """Whether every tile was written."""
        return all(self._page.databytecounts)

    def read(self, x: int, y: int, w: int, h: int) -> np.ndarray:
        page, (across, down) = self._page, self._segment
        columns = -(-page.imagewidth // across)
        out = np.empty((h, w, 3), np.uint8)
        if not self.is_complete:
            out[:] = 255
        for row in range(y // down, -(-(y + h) // down)):
            for column in range(x // across, -(-(x + w) // across)):
                block = self._decoded(row * columns + column)
                if block is None:
                    continue  # a tile that was never written
                left, top = column * across, row * down
                x0, y0 = max(x, left), max(y, top)
                x1, y1 = min(x + w, left + block.shape[1]), min(y + h, top + block.shape[0])
                out[y0 - y : y1 - y, x0 - x : x1 - x] = block[y0 - top : y1 - top, x0 - left : x1 - left]
        return out

    def _decode(self, index: int) -> np.ndarray | None:
        """uint8[h, w, 3] of a tile or strip."""
        page, file = self._page, self._file.filehandle
        file.seek(page.dataoffsets[index])
        raw = file.read(page.databytecounts[index])
        if not raw:
            return None
        if self.is_jpeg:
            # A tile's stream lacks its tables and what its three channels are: the page says both.
            head = b"\xff\xd8" + ADOBE + bytes([page.photometric != RGB]) + (page.jpegtables or b"")[2:-2]
            with Image.open(io.BytesIO(head + raw[2:]), formats=("JPEG",)) as picture:
                if picture.size != self._segment:
                    raise DataError(f"a tile is {picture.size[0]}x{picture.size[1]} px, not as its page says")
                return np.asarray(picture)
        segment = page.decode(raw, index, jpegtables=page.jpegtables)[0]
        if segment is None:
            return None
        return on_white(np.broadcast_to(segment[0], (*segment.shape[1:3], max(segment.shape[3], 3))))

    def thumbnail(self, side: int) -> Image.Image:
        return strided_thumbnail(self.read, self.size, side)

    def close(self) -> None:
        self._decoded.cache_clear()
        self._file.close()


@contextlib.contextmanager
def _pillows_limit_off() -> Iterator[None]:
    """PICTURE_PIXELS is the limit here; Pillow's is less than half of it."""
    kept, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = kept


def _tag(page: Any, name: str) -> Any:
    tag = page.tags.get(name)
    return tag.value if tag else None


class PicturePixels:
    """A plain picture (PNG, JPEG, BMP, striped TIFF), decoded whole."""

    name = "pillow"

    def __init__(self, path: Path) -> None:
        with _pillows_limit_off(), Image.open(path) as image:
            if image.width * image.height > PICTURE_PIXELS:
                raise DataError(f"a plain picture of {image.width}x{image.height} px is too large; use a tiled TIFF")
            self.icc = image.info.get("icc_profile") or b""
            transparent = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
            self._pixels = np.asarray(image.convert("RGBA" if transparent else "RGB"))
        self.size = (self._pixels.shape[1], self._pixels.shape[0])
        self.levels = 1
        self.properties: Mapping[str, str] = {"openslide.vendor": "picture"}

    def read(self, x: int, y: int, w: int, h: int) -> np.ndarray:
        return self._pixels[y : y + h, x : x + w]

    def thumbnail(self, side: int) -> Image.Image:
        return strided_thumbnail(self.read, self.size, side)

    def close(self) -> None:
        self._pixels = np.empty((0, 0, 3), np.uint8)


def reader_difference(path: Path, side: int = 256) -> float | None:
    """Largest mean absolute difference, in grey levels, of three places read by OpenSlide and by tifffile; None where
    only one of them reads the file and these places. Readers have failed by wrong colours or zeros without any error."""
    with contextlib.ExitStack() as stack:
        try:
            one, other = OpenSlidePixels(path), TiffPixels(path)
            for reader in (one, other):
                stack.callback(reader.close)
            return _difference(one.read, other.read, one.size, side)
        except (*DECODE_ERRORS, ImportError, LookupError):
            return None


def _difference(
    one: Callable[[int, int, int, int], np.ndarray],
    other: Callable[[int, int, int, int], np.ndarray],
    size: tuple[int, int],
    side: int = 256,
) -> float:
    """Largest mean absolute difference of two ways to read, at three places from corner to corner."""
    w, h = min(side, size[0]), min(side, size[1])
    worst = 0.0
    for k in range(3):
        x, y = (size[0] - w) * k // 2, (size[1] - h) * k // 2
        first, second = (on_white(read(x, y, w, h)).astype(np.int16) for read in (one, other))
        worst = max(worst, float(np.abs(first - second).mean()))
    return worst
