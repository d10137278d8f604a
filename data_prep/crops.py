"""One crop geometry for every source: the white cell's box, squared on its longer side, times 1.8, at 224 px.

The integer arithmetic is that of the official `prepare.py` (official_code.md 2.1). It fills what lies outside the image
with white (`fill="white"`, bit-exact); new crops mirror the image there instead, because most PBC crops leave their
360 px picture and a white frame would tell the source.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageEnhance

from data_prep.schema import CROP_CONTEXT, CROP_SIDE, Box, DataError

CONTEXT_EACH_SIDE = 0.4  # (CROP_CONTEXT - 1) / 2
FILLS = ("reflect", "white")
JPEG_OPTIONS = {"quality": 95, "subsampling": 0}  # 4:4:4: granule colour matters


def geometry_name(fill: str) -> str:
    """The text that records the geometry with data and checkpoints."""
    return f"box{CROP_CONTEXT}-{fill}-lanczos{CROP_SIDE}"


def crop_window(box: Box) -> Box:
    """The square window around a box; it may leave the image. Raises DataError for a box without area."""
    if box.width <= 0 or box.height <= 0:
        raise DataError(f"box {box} has no area: right must exceed left and bottom must exceed top")
    left, top, right, bottom = box.left, box.top, box.right, box.bottom
    odd = abs(box.width - box.height)
    if box.width > box.height:
        top, bottom = top - odd // 2, bottom + odd - odd // 2
    else:
        left, right = left - odd // 2, right + odd - odd // 2
    edge = int(CONTEXT_EACH_SIDE * (right - left))
    return Box(left - edge, top - edge, right + edge, bottom + edge)


def context_crop(image: Image.Image, box: Box, fill: str = "reflect", color_enhance: float = 1.0) -> Image.Image:
    """RGB crop of CROP_SIDE px.

    Args:
        image: RGB picture that `box` refers to.
        fill: "reflect" mirrors the picture where the window leaves it, "white" pads as the official code.
        color_enhance: saturation factor, applied before the crop is resized (official value for training crops 1.3).

    Raises:
        DataError: a box without area or outside the image, or an unknown fill.
    """
    if fill not in FILLS:
        raise DataError(f'crop fill "{fill}" is unknown: use {" or ".join(FILLS)}')
    window = crop_window(box)
    width, height = image.size
    inside = Box(max(window.left, 0), max(window.top, 0), min(window.right, width), min(window.bottom, height))
    if inside.width <= 0 or inside.height <= 0 or box.left >= width or box.top >= height:
        raise DataError(f"box {box} lies outside its image of {width}x{height} px")
    if fill == "reflect":
        inside = Box(0, 0, width, height)
    part = image.crop((inside.left, inside.top, inside.right, inside.bottom))
    if color_enhance != 1.0:
        part = ImageEnhance.Color(part).enhance(color_enhance)
    top, bottom = max(inside.top - window.top, 0), max(window.bottom - inside.bottom, 0)
    left, right = max(inside.left - window.left, 0), max(window.right - inside.right, 0)
    pixels = np.asarray(part)
    margins = ((top, bottom), (left, right), (0, 0))
    if fill == "reflect":
        pixels = np.pad(pixels, margins, mode="reflect")
        row, column = max(window.top, 0), max(window.left, 0)
        side = window.width
        pixels = pixels[row : row + side, column : column + side]
    else:
        pixels = np.pad(pixels, margins, constant_values=255)
    return Image.fromarray(pixels).resize((CROP_SIDE, CROP_SIDE), Image.Resampling.LANCZOS)


def encode_jpeg(image: Image.Image) -> bytes:
    """JPEG q95 4:4:4 bytes, equal for equal pixels."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **JPEG_OPTIONS)
    return buffer.getvalue()


def decode_rgb(data: bytes) -> Image.Image:
    """A fully decoded RGB picture; transparency is laid on white. Raises DataError for bytes that do not decode."""
    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"it does not decode as an image ({error})") from error
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
