"""Opening slides of any vendor: one reader interface, physical scale from a stated order of sources, alpha on white.

OpenSlide first; tiled, striped, JPEG-2000 or OME TIFFs that it refuses go to tifffile, plain pictures to Pillow.
Coordinates are level-0 pixels, half-open; only level 0 is read (lower levels differ between readers). Label and macro
pictures are never read: they can name the patient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.schema import DataError
from data_prep.slide_readers import DECODE_ERRORS, on_white, open_pixels, reader_difference

SCALE_RANGE = (0.05, 5.0)  # um/px of any microscope scanner; 72 dpi, the picture programs' default, is 353
SAME_PIXELS = 3.0  # grey levels: two JPEG decoders differ by less than 1
SAME_SCALE = 0.05  # relative difference up to which two statements of the scale agree
OME_MICROMETRES = {"µm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}  # µm is the schema's default
PER_UNIT_MICROMETRES = {"inch": 25_400.0, "centimeter": 10_000.0}


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """Micrometres per pixel, 0 for unknown; `source` says who stated it; `note`: what disagrees, if anything."""

    mpp: float
    source: str
    note: str = ""


class Slide:
    """An opened slide that survives a decode error: the handle is opened anew, since OpenSlide's stays broken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pixels = open_pixels(path)

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.size

    def read(self, x: int, y: int, w: int, h: int) -> np.ndarray:
        """uint8[h, w, 3]; transparent pixels and those outside the slide are white.

        Raises:
            DataError: the pixels do not decode, also after the file was opened again.
        """
        width, height = self.size
        left, top, right, bottom = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
        if (left, top, right, bottom) == (x, y, x + w, y + h):
            return on_white(self._decode(x, y, w, h))
        out = np.full((h, w, 3), 255, np.uint8)
        if right > left and bottom > top:
            inside = on_white(self._decode(left, top, right - left, bottom - top))
            out[top - y : bottom - y, left - x : right - x] = inside
        return out

    def _decode(self, x: int, y: int, w: int, h: int) -> np.ndarray:
        try:
            return self.pixels.read(x, y, w, h)
        except DECODE_ERRORS:
            self.pixels.close()
            try:
                self.pixels = open_pixels(self.path)
                return self.pixels.read(x, y, w, h)
            except DECODE_ERRORS as error:
                self.pixels = open_pixels(self.path)
                raise DataError(f"{self.path.name}: {w}x{h} px at ({x}, {y}) do not decode ({error})") from error

    def thumbnail(self, side: int) -> Image.Image:
        """RGB picture of the whole slide, at most `side` px. Raises DataError."""
        try:
            return Image.fromarray(on_white(np.asarray(self.pixels.thumbnail(side))))
        except DECODE_ERRORS as error:
            raise DataError(f"{self.path.name}: no thumbnail ({error})") from error


@contextlib.contextmanager
def open_slide(path: Path) -> Iterator[Slide]:
    """An opened slide. Raises DataError that says what is wrong with the file and what to do."""
    slide = Slide(path)
    try:
        yield slide
    finally:
        slide.pixels.close()


def resolve_scale(properties: Mapping[str, str], stated: float, stated_source: str, where: str) -> Scale:
    """The scale of a slide: the table's, else the vendor's properties, else OME's, else the TIFF resolution.

    Args:
        stated: the table's mpp, 0 when it has none; it wins, and a disagreement becomes a note.

    Raises:
        DataError: pixels that are not square, or no plausible scale anywhere: names the line to add to the table.
    """
    found = _property_scale(properties, where)
    if stated:
        if not SCALE_RANGE[0] <= stated <= SCALE_RANGE[1]:
            raise DataError(f"{where}: mpp {stated:g} in the table is outside {SCALE_RANGE[0]}-{SCALE_RANGE[1]} um/px")
        odd = found is not None and abs(found.mpp / stated - 1) > SAME_SCALE
        note = f"the file says {found.mpp:g} um/px ({found.source}), the table {stated:g}" if found and odd else ""
        return Scale(stated, stated_source or "table", note)
    if found is None:
        objective = properties.get("openslide.objective-power")
        hint = f" (it names a {objective}x objective, which is no pixel size)" if objective else ""
        raise DataError(
            f"{where}: the file states no usable pixel size{hint}: add a column mpp to the table, e.g. 0.25"
        )
    return found


def _property_scale(properties: Mapping[str, str], where: str) -> Scale | None:
    """What the file states, if plausible."""
    unit = PER_UNIT_MICROMETRES.get(properties.get("tiff.ResolutionUnit", ""), 0.0)
    resolution = _number(properties.get("tiff.XResolution"))
    stated = {
        "openslide.mpp-x": [_number(properties.get(f"openslide.mpp-{axis}")) for axis in "xy"],
        "OME PhysicalSizeX": _ome_sides(properties.get("tiff.ImageDescription", "")),
        "tiff.XResolution": [unit / resolution if resolution else 0.0],
    }
    for source, sides in stated.items():
        if all(sides) and max(sides) / min(sides) - 1 > SAME_SCALE:
            raise DataError(
                f"{where}: pixels of {sides[0]:g} x {sides[1]:g} um are not square: resample the slide first"
            )
        if SCALE_RANGE[0] <= sides[0] <= SCALE_RANGE[1]:
            return Scale(round(sides[0], 6), source)
    return None


def _ome_sides(description: str) -> list[float]:
    """Width and height of a pixel in um by the first image of an OME-XML text; zeros for any other text."""
    pixels = (
        re.search(r"<(?:\w+:)?Pixels\b[^>]*>", description) if "<OME" in description or ":OME" in description else None
    )
    sides = []
    for axis in "XY":
        found = re.search(rf'\bPhysicalSize{axis}="([^"]*)"', pixels.group()) if pixels else None
        unit = re.search(rf'\bPhysicalSize{axis}Unit="([^"]*)"', pixels.group()) if pixels else None
        sides.append(_number(found and found.group(1)) * OME_MICROMETRES.get(unit.group(1) if unit else "µm", 0.0))
    return sides


def _number(text: str | None) -> float:
    """A positive finite number, else 0 (vendors write "0", "" and words)."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def slide_facts(slide: Slide) -> dict[str, Any]:
    """What the manifest records of a slide file: reader, vendor, levels, the hash of its colour profile, and what is odd
    about its pixels (two readers see different ones)."""
    pixels = slide.pixels
    difference = reader_difference(slide.path) or 0.0
    odd = f"OpenSlide and tifffile differ by {difference:.1f} grey levels: look at its colours, or convert it"
    return {
        "reader": pixels.name,
        "vendor": pixels.properties.get("openslide.vendor", ""),
        "levels": pixels.levels,
        "icc_sha256": hashlib.sha256(pixels.icc).hexdigest() if pixels.icc else "",
        "odd": odd if difference > SAME_PIXELS else "",
    }
