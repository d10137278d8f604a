"""What mosaics are made of: white cells measured and red-cell fields prepared, each in the split it may be used in.

Both steps leave their results in files of the work folder and find them there when a job is taken up again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import mosaic_fields, segment, split, units
from data_prep.crops import decode_rgb
from data_prep.executors import Quarantined, run_units
from data_prep.files import atomic_write, canonical_json
from data_prep.mosaic_fields import Stain
from data_prep.progress import progress
from data_prep.schema import SPLITS, WHITE_CELL_CLASSES, DataError, stable_hash
from data_prep.sources import IMAGE_SUFFIXES, SourceCell, is_hidden, relative

FEWEST_FIELDS = 3  # per split


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One usable white cell: where its picture lies, its outline (float[n,2]) and its picture's stain."""

    source: SourceCell
    outline: np.ndarray
    width: int
    stain: Stain


def pictures(folder: Path) -> list[Path]:
    """All pictures below a folder. Raises DataError when there is none."""
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and not is_hidden(p))
    if not found:
        raise DataError(f"{folder} holds no red-cell fields: give --fields a folder of smear pictures")
    return found


def _measure(work: tuple[Sequence[SourceCell], Path, Path]) -> Path:
    """Measures some pictures into one JSON file, or finds it there."""
    sources, root, target = work
    if not target.is_file():
        atomic_write(target, canonical_json([_measure_cell(source, root) for source in sources]))
    return target


def _measure_cell(source: SourceCell, root: Path) -> dict[str, Any]:
    """`item`: what the split needs (absent: the cell job rejects it too); then `reason` why the cell cannot be pasted, or
    its outline, width and stain."""
    rgb = np.asarray(decode_rgb((root / source.path).read_bytes()))
    found = segment.central_cell(rgb)
    if found is None:
        return {"reason": "no nucleus found"}
    crop = units.crop_cell(dataclasses.replace(source, box=found.box), root, "reflect", 1.0)[0].image
    item = split.Item(
        id=source.cell_id,
        label=source.label,
        split=source.split,
        sha256=hashlib.sha256(crop).hexdigest(),
        dhash=split.difference_hash(decode_rgb(crop)),
    )
    record: dict[str, Any] = {"item": dataclasses.asdict(item)}
    if source.label not in WHITE_CELL_CLASSES:
        return record | {"reason": "type outside the five classes"}
    if found.on_border:
        return record | {"reason": "reaches its picture's edge"}
    if (stain := mosaic_fields.stain_of(rgb)) is None:
        return record | {"reason": "no plasma around it"}
    arrays = {"outline": found.outline, "background": stain.background, "red": stain.red}
    return record | {name: np.round(value, 4).tolist() for name, value in arrays.items()} | {"width": found.box.width}


def measured_cells(
    root: Path, cells: Sequence[SourceCell], work: Path, *, seed: int, workers: int
) -> tuple[dict[str, list[Measured]], Counter[str]]:
    """The usable cells of each split, in id order, split as the cell job splits them; and why others are left out."""
    ordered = sorted(cells, key=lambda cell: cell.cell_id)
    chunks = list(itertools.batched(ordered, units.CELLS_PER_UNIT))
    todo = [(chunk, root, work / f"cells-{number:05d}.json") for number, chunk in enumerate(chunks)]
    for number, result in progress(run_units(_measure, todo, workers), len(todo), "white cells, units"):
        if isinstance(result, Quarantined):
            raise DataError(f"the pictures from {chunks[number][0].path} on: {result.reason}")
    records = [record for _, _, target in todo for record in json.loads(target.read_bytes())]
    assigned = split.assign([split.Item(**r["item"]) for r in records if "item" in r], seed).splits
    pools: dict[str, list[Measured]] = {name: [] for name in SPLITS}
    for source, record in zip(ordered, records, strict=True):
        if "reason" not in record and source.cell_id in assigned:
            outline, background, red = (np.array(record[name], np.float32) for name in ("outline", "background", "red"))
            cell = Measured(source, outline, record["width"], Stain(background, red))
            pools[assigned[source.cell_id]].append(cell)
    return pools, Counter(record["reason"] for record in records if "reason" in record)


def _prepare(work: tuple[Path, Path]) -> str:
    """Writes one prepared field, or returns why it cannot serve; an earlier run's is used again."""
    picture, target = work
    if target.is_file():
        return ""
    field = mosaic_fields.prepare_field(np.asarray(decode_rgb(picture.read_bytes())))
    if isinstance(field, str):
        return field
    buffer = io.BytesIO()
    np.save(buffer, field.astype(np.float16))
    atomic_write(target, buffer.getvalue())
    return ""


def prepared_fields(
    root: Path, pictures: Sequence[Path], work: Path, *, seed: int, workers: int
) -> tuple[dict[str, list[Path]], dict[str, str]]:
    """Files of the usable fields of each split, shared out by hash; and why others are left out.

    Raises DataError when there are too few.
    """
    names = [relative(path, root) for path in pictures]
    targets = [work / f"{stable_hash('field', name):016x}.npy" for name in names]
    reasons = dict(
        progress(run_units(_prepare, list(zip(pictures, targets, strict=True)), workers), len(pictures), "fields")
    )
    rejects: dict[str, str] = {}
    good = []
    for number, target in enumerate(targets):
        result = reasons[number]
        reason = result.reason if isinstance(result, Quarantined) else result
        if reason:
            rejects[names[number]] = reason
        else:
            good.append((stable_hash("field", seed, names[number]), target))
    ordered = [target for _, target in sorted(good)]
    test, val = (max(FEWEST_FIELDS, round(len(ordered) * split.SHARES[name])) for name in ("test", "val"))
    fields = {"test": ordered[:test], "val": ordered[test : test + val], "train": ordered[test + val :]}
    if len(fields["train"]) < FEWEST_FIELDS:
        raise DataError(f"{root} holds {len(good)} usable red-cell fields: {3 * FEWEST_FIELDS} are needed at least")
    return fields, rejects
