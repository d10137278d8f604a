"""Where labelled cells come from. A source lists its cells cheaply; decoding and cropping are the workers' part.

Every item that a source meets is either listed or rejected with a reason, so that in = kept + rejected can hold.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from data_prep.schema import Box

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
SYSTEM_NAMES = ("thumbs.db", "desktop.ini")


@dataclasses.dataclass(frozen=True, slots=True)
class SourceCell:
    """One labelled cell before it is cropped.

    `path` is relative to the source's root, with forward slashes; `image` holds the bytes where there is no file.
    `box` None: the finder looks for the cell. `split` "": decided by `split.assign`.
    """

    cell_id: str
    label: str
    path: str = ""
    image: bytes = b""
    box: Box | None = None
    split: str = ""
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    domain: str = "id"
    label_source: str = "human"
    patient_id: str = ""
    slide_id: str = ""
    comments: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Reject:
    """An item that was not kept: its id (or path), a reason from a small set, and a sentence on what was wrong."""

    id: str
    reason: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What a source holds. `notes`: sentences for the user on things that are no rejects."""

    cells: Sequence[SourceCell]
    rejects: Sequence[Reject] = ()
    notes: Sequence[str] = ()
    licences: Sequence[str] = ()

    @property
    def items(self) -> int:
        return len(self.cells) + len(self.rejects)


def is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name.casefold() in SYSTEM_NAMES


def relative(path: Path, root: Path) -> str:
    return str(PurePosixPath(path.relative_to(root)))


def composed(name: str) -> str:
    """Unicode's composed form: file systems differ in how they store an accented name."""
    return unicodedata.normalize("NFC", name)


def stem_id(path: Path) -> str:
    """The file name without its ending, as part of an id."""
    return composed(path.stem).strip()


def reject_clashes(cells: Sequence[SourceCell]) -> tuple[list[SourceCell], list[Reject]]:
    """Cells whose id, ignoring case, is taken by an earlier one become rejects."""
    seen: dict[str, SourceCell] = {}
    kept, rejects = [], []
    for cell in cells:
        first = seen.setdefault(cell.cell_id.casefold(), cell)
        if first is cell:
            kept.append(cell)
        else:
            rejects.append(
                Reject(cell.path, "id clash", f"{cell.path} would get the same id as {first.path}: rename it")
            )
    return kept, rejects
