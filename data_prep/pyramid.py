"""Writes tiled pyramidal JPEG TIFFs that OpenSlide opens, tile by tile, so that a slide never has to fit in memory.

A BigTIFF of one directory per level; Pillow encodes the tiles, so no further codec package is needed.
"""

from __future__ import annotations

import io
import os
import struct
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from data_prep.schema import DataError

TILE = 256
SMALLEST_LEVEL = 512  # px; levels are halved until the longer side is no longer than this
SHORT, LONG, RATIONAL, LONG8 = (3, "H"), (4, "I"), (5, "II"), (16, "Q")  # TIFF field types: code, struct format

Read = Callable[[int, int, int, int], np.ndarray]


def write_pyramid(path: Path, width: int, height: int, read: Read, *, mpp: float = 0.0, quality: int = 92) -> None:
    """Writes `path` whole or not at all; equal pixels give equal bytes.

    Args:
        read: (x, y, w, h) -> uint8[h, w, 3], asked for 256 px tiles from left to right and top to bottom, once each.
        mpp: micrometres per pixel, stored as resolution; 0 leaves it out.

    Raises:
        DataError: a size below 1 px.
    """
    if width < 1 or height < 1:
        raise DataError(f"{path}: a slide of {width}x{height} px cannot be written")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".levels") as scratch, temporary.open("wb") as file:
            file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
            link = 8  # where the offset of the next directory belongs
            for level in range(64):
                half = ((width + 1) // 2, (height + 1) // 2)
                last = max(width, height) <= SMALLEST_LEVEL
                smaller = None if last else _scratch(Path(scratch) / str(level), half)
                tiles = _write_tiles(file, _tiles((width, height), read, smaller, quality))
                link = _write_directory(file, link, (width, height), level, tiles, mpp if level == 0 else 0.0)
                if smaller is None:
                    break
                (width, height), read = half, _array_reader(smaller)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _scratch(path: Path, size: tuple[int, int]) -> np.ndarray:
    """The next level while it is filled: on disk, so that its pages can leave memory."""
    return np.memmap(path, np.uint8, "w+", shape=(size[1], size[0], 3))


def _array_reader(pixels: np.ndarray) -> Read:
    return lambda x, y, w, h: pixels[y : y + h, x : x + w]


def _tiles(size: tuple[int, int], read: Read, smaller: np.ndarray | None, quality: int) -> Iterator[bytes]:
    """The level's JPEG tiles, edge tiles padded with their last pixels; fills `smaller` with 2 x 2 means."""
    for y in range(0, size[1], TILE):
        for x in range(0, size[0], TILE):
            tile = np.asarray(read(x, y, min(TILE, size[0] - x), min(TILE, size[1] - y)))
            h, w = tile.shape[:2]
            tile = np.pad(tile, ((0, TILE - h), (0, TILE - w), (0, 0)), mode="edge")
            if smaller is not None:
                blocks = tile.astype(np.uint16).reshape(TILE // 2, 2, TILE // 2, 2, 3).sum((1, 3))
                part = smaller[y // 2 : (y + TILE) // 2, x // 2 : (x + TILE) // 2]
                part[:] = ((blocks + 2) // 4)[: part.shape[0], : part.shape[1]]
            buffer = io.BytesIO()
            Image.fromarray(tile).save(buffer, "JPEG", quality=quality, subsampling=0)
            yield buffer.getvalue()


def _write_tiles(file: BinaryIO, tiles: Iterator[bytes]) -> tuple[list[int], list[int]]:
    """Offsets and lengths of the tiles written."""
    offsets, lengths = [], []
    for tile in tiles:
        offsets.append(file.tell())
        lengths.append(file.write(tile))
    return offsets, lengths


def _write_directory(
    file: BinaryIO, link: int, size: tuple[int, int], level: int, tiles: tuple[list[int], list[int]], mpp: float
) -> int:
    """Appends one image directory, links it at `link`, and returns the place of the link to the next one."""
    fields: list[tuple[int, tuple[int, str], Sequence[int]]] = [
        (254, LONG, [int(level > 0)]),  # a reduced version of another page
        (256, LONG, [size[0]]),
        (257, LONG, [size[1]]),
        (258, SHORT, [8, 8, 8]),
        (259, SHORT, [7]),  # JPEG
        (262, SHORT, [6]),  # YCbCr
        (277, SHORT, [3]),
        (322, SHORT, [TILE]),
        (323, SHORT, [TILE]),
        (324, LONG8, tiles[0]),
        (325, LONG, tiles[1]),
        (530, SHORT, [1, 1]),  # no chroma subsampling
    ]
    if mpp:
        per_centimetre = [round(1e4 / mpp * 1000), 1000]
        fields += [(282, RATIONAL, per_centimetre), (283, RATIONAL, per_centimetre), (296, SHORT, [3])]
    entries = b""
    for tag, (code, form), values in sorted(fields, key=lambda field: field[0]):
        packed = struct.pack(f"<{len(values)}{form[0]}", *values)
        if len(packed) > 8:
            place = file.tell()
            file.write(packed)
            packed = struct.pack("<Q", place)
        entries += struct.pack("<HHQ", tag, code, len(values) // len(form)) + packed.ljust(8, b"\0")
    start = file.tell()
    file.write(struct.pack("<Q", len(fields)) + entries + struct.pack("<Q", 0))
    end = file.tell()
    file.seek(link)
    file.write(struct.pack("<Q", start))
    file.seek(end)
    return end - 8
