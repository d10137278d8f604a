"""slides.csv: which slides a job takes and what is known of them. Every line is checked before any pixel is read.

Splits keep a patient together (else a slide): a given split is kept, one patient in two splits is an error; without a
split a hash of the patient decides, so that appended slides never move what is there.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_prep.schema import SPLITS, DataError
from data_prep.slide_readers import SLIDE_SUFFIXES, files_of
from data_prep.sources import composed, is_hidden, relative
from data_prep.split import by_hash

PATTERNS = ("", "A", "B", "C", "D", "E")


@dataclasses.dataclass(frozen=True, slots=True)
class SlideRow:
    """One slide to process. `path` is relative to the root; "" and 0 stand for unknown."""

    path: str
    slide_id: str
    patient_id: str = ""
    diagnosis: str = ""
    pattern: str = ""
    split: str = ""
    site: str = ""
    scanner: str = ""
    mpp: float = 0.0
    mpp_source: str = ""

    @property
    def group(self) -> str:
        """What must stay in one split."""
        return f"patient {self.patient_id}" if self.patient_id else f"slide {self.slide_id}"


COLUMNS = tuple(field.name for field in dataclasses.fields(SlideRow))


def load(root: Path, table: Path | None, seed: int = 0) -> list[SlideRow]:
    """The slides of a job in the order of their ids, each with a split.

    Raises:
        DataError: naming the file, line and column: an unknown column, a missing file, two equal ids, a patient in two
            splits, a value that cannot be used, or no slide at all.
    """
    if not root.is_dir():
        raise DataError(f"--root {root} is not a folder: give the folder that holds the slides")
    rows = _discovered(root) if table is None else _listed(root, table)
    if not rows:
        raise DataError(f"{table or root} names no slide (endings read: {', '.join(SLIDE_SUFFIXES)})")
    _refuse_clashes(rows)
    return sorted(_with_splits(rows, seed), key=lambda row: row.slide_id)


def split_level(rows: Iterable[SlideRow]) -> str:
    """What the splits keep apart: patients where every slide names its own, else slides."""
    return "patient" if all(row.patient_id for row in rows) else "slide"


def _discovered(root: Path) -> list[SlideRow]:
    """All slides below the root; the folders that belong to MRXS files are theirs, a DICOM series is its first file."""
    files = sorted(path for path in root.rglob("*") if path.suffix.casefold() in SLIDE_SUFFIXES and path.is_file())
    folders = {path.with_suffix("") for path in files if path.suffix.casefold() == ".mrxs"}
    files = [path for path in files if not any(is_hidden(part) for part in (path, *_below(path, root)))]
    return [
        SlideRow(relative(path, root), default_id(relative(path, root)))
        for path in files
        if not folders.intersection(path.parents) and files_of(path)[0] == path
    ]


def _below(path: Path, root: Path) -> list[Path]:
    return [parent for parent in path.parents if parent.is_relative_to(root) and parent != root]


def default_id(path: str) -> str:
    """The relative path without its ending, Unicode composed: two folders may hold files of one name."""
    return composed(path.rpartition(".")[0] or path).strip()


def _listed(root: Path, table: Path) -> list[SlideRow]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"the table {table} cannot be read as CSV in UTF-8 ({error})") from error
    if not lines:
        raise DataError(f"the table {table} is empty: its first line names the columns, path at least")
    header = [name.strip() for name in lines[0]]
    _check_header(header, table)
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if any(value.strip() for value in line):
            if len(line) != len(header):
                raise DataError(f"{table} line {number} has {len(line)} values for {len(header)} columns")
            values = dict(zip(header, (composed(value).strip() for value in line), strict=True))
            rows.append(_row(values, root, f"{table} line {number}"))
    return rows


def _check_header(header: Sequence[str], table: Path) -> None:
    for name in header:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise DataError(f'{table} has an unknown column "{name}"{hint} The columns are {", ".join(COLUMNS)}')
    if len(set(header)) != len(header):
        raise DataError(f"{table} names a column twice: {', '.join(header)}")
    if "path" not in header:
        raise DataError(f"{table} has no column path: it names each slide's file, relative to --root")


def _row(values: dict[str, str], root: Path, where: str) -> SlideRow:
    path = values["path"].replace("\\", "/")
    if not path:
        raise DataError(f"{where} has no path")
    file = root / path
    if not file.is_file():
        raise DataError(f"{where}: {path} is not a file below {root}: correct the path")
    if not file.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{where}: {path} leaves the root {root}: give the folder that holds all slides as --root")
    split, pattern = values.get("split", ""), values.get("pattern", "")
    if split and split not in SPLITS:
        raise DataError(f'{where}: split "{split}" is not one of {", ".join(SPLITS)}')
    if pattern not in PATTERNS:
        raise DataError(f'{where}: pattern "{pattern}" is not one of A to E')
    texts = {name: values.get(name, "") for name in ("patient_id", "diagnosis", "site", "scanner", "mpp_source")}
    return SlideRow(
        path,
        values.get("slide_id") or default_id(path),
        pattern=pattern,
        split=split,
        mpp=_scale(values.get("mpp", ""), where),
        **texts,
    )


def _scale(text: str, where: str) -> float:
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise DataError(f'{where}: mpp "{text}" is not a positive number of micrometres per pixel, e.g. 0.25')
    return value


def _refuse_clashes(rows: Sequence[SlideRow]) -> None:
    """Ids are compared without case: some disks do not tell `A.svs` from `a.svs`."""
    seen: dict[str, SlideRow] = {}
    for row in rows:
        if not row.slide_id or any(c in row.slide_id for c in "\t\r\n"):
            raise DataError(f"{row.path}: slide_id {row.slide_id!r} is empty or holds a tab or line break")
        first = seen.setdefault(row.slide_id.casefold(), row)
        if first is not row:
            raise DataError(
                f'{first.path} and {row.path} both get the slide_id "{row.slide_id}": name them apart in the table'
            )


def _with_splits(rows: Sequence[SlideRow], seed: int) -> list[SlideRow]:
    given: dict[str, SlideRow] = {}
    for row in rows:
        if row.split:
            first = given.setdefault(row.group, row)
            if first.split != row.split:
                raise DataError(
                    f"{row.group} has slides in {first.split} ({first.slide_id}) and {row.split} ({row.slide_id}): "
                    "give all slides of a patient one split"
                )
    return [
        dataclasses.replace(row, split=given[row.group].split if row.group in given else by_hash(seed, row.group))
        for row in rows
    ]
