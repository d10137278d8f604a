"""Finds the files that released records name in a folder of somebody's download: moved, renamed or exported by Roboflow.

The order of attempts is that of the official code (official_code.md 2.2): the path itself, the end of the path, the
file name, the name before a Roboflow export. More than one file for a step is an answer too: it is ambiguous.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

import numpy as np
from skimage.measure import label, regionprops

from data_prep.crops import decode_rgb
from data_prep.schema import Box, DataError
from data_prep.sources import IMAGE_SUFFIXES, is_hidden, relative

_EXPORT = re.compile(r"_(?:bmp|jpe?g|png|tiff?)\.rf\.[^.]+$")  # at the end of a Roboflow file's stem
_MASK_NAME = re.compile(r"_(?:expert|mask)$")
SPECK = 0.05  # of the largest marked area: smaller ones are slips of the pen
BACKGROUND = 0.25  # of a mask's brightest value; JPEG noise lies below, cytoplasm (155 of 255) above


class NotFound(Exception):
    """`reason` "missing" or "ambiguous", and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def file_at(root: Path, locator: str) -> Path | None:
    """The file of exactly this path below a folder (links are followed), or None. Raises NotFound for one that leads
    out."""
    if ".." in PurePosixPath(locator).parts or PurePosixPath(locator).is_absolute():
        raise NotFound("missing", f"{locator} leads out of {root}")
    return root / locator if (root / locator).is_file() else None


def provider_key(name: str) -> str:
    """The stem of a file as its provider named it: folded case, no Roboflow export suffix."""
    return _EXPORT.sub("", PurePosixPath(name).stem.casefold())


class FileIndex:
    """The pictures below a folder. Raises DataError when it is no folder."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise DataError(f"{root} is not a folder: give the one that the data set was unpacked into")
        self.root = root
        self._by_name: dict[str, list[str]] = {}
        self._by_key: dict[str, list[str]] = {}
        for path in sorted(root.rglob("*")):
            if path.suffix.casefold() in IMAGE_SUFFIXES and not is_hidden(path) and path.is_file():
                name = relative(path, root)
                self._by_name.setdefault(path.name.casefold(), []).append(name)
                self._by_key.setdefault(provider_key(name), []).append(name)

    def find(self, locator: str) -> Path:
        """The one file that a record's path means. Raises NotFound: missing, or ambiguous with the candidates."""
        if exact := file_at(self.root, locator):
            return exact
        named = self._by_name.get(PurePosixPath(locator).name.casefold(), [])
        ending = [name for name in named if f"/{name}".casefold().endswith(f"/{locator}".casefold())]
        for found in (ending, named, self._by_key.get(provider_key(locator), [])):
            if found:
                return self._only(found, locator)
        raise NotFound("missing", f"{locator} is nowhere below {self.root}")

    def find_mask(self, picture: str) -> Path:
        """The mask of a picture: of the same stem, perhaps with _expert or _mask behind. Raises NotFound."""
        key = provider_key(picture)
        found = [name for k, names in self._by_key.items() if _MASK_NAME.sub("", k) == key for name in names]
        if not found:
            raise NotFound("missing", f"{picture} has no mask below {self.root}")
        return self._only(found, f"the mask of {picture}")

    def _only(self, found: list[str], wanted: str) -> Path:
        if len(found) > 1:
            some = ", ".join(found[:3])
            raise NotFound("ambiguous", f"{wanted} may be any of {len(found)} files below {self.root}: {some}")
        return self.root / found[0]


def mask_box(data: bytes, size: tuple[int, int]) -> Box:
    """The box of the one cell that an expert's mask marks (nucleus and cytoplasm, in any shades on black).

    Raises DataError when it marks nothing or several cells, or is of another size (width, height) than its picture.
    """
    grey = np.asarray(decode_rgb(data).convert("L"))
    if grey.shape[::-1] != size:
        raise DataError(f"the mask has {grey.shape[1]}x{grey.shape[0]} px, its picture {size[0]}x{size[1]}")
    areas = regionprops(label(grey > BACKGROUND * grey.max()))
    largest = max((area.area for area in areas), default=0)
    cells = [area for area in areas if area.area >= SPECK * largest]
    if len(cells) != 1:
        raise DataError(f"the mask marks {len(cells)} cells; exactly one tells which is meant")
    top, left, bottom, right = cells[0].bbox
    return Box(left, top, right, bottom)
