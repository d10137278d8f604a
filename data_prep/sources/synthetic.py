"""The synthetic cells of `data_prep.synthetic` as a source."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from data_prep import synthetic
from data_prep.files import atomic_write
from data_prep.schema import ATTRIBUTES
from data_prep.sources import Listing, SourceCell, pbc


def listing(n_per_class: int, seed: int) -> Listing:
    """`n_per_class` drawn cells per class, with their boxes, attributes and splits; pictures as lossless PNG."""
    return Listing([source_cell(cell) for cell in synthetic.cells(n_per_class, seed)])


def source_cell(cell: synthetic.SyntheticCell) -> SourceCell:
    buffer = io.BytesIO()
    Image.fromarray(cell.image).save(buffer, "PNG", compress_level=1)
    return SourceCell(
        cell_id=cell.id,
        label=cell.label,
        image=buffer.getvalue(),
        box=cell.box,
        split=cell.split,
        attributes=cell.attributes,
        label_source="synthetic",
    )


def write_folders(out: Path, n_per_class: int, seed: int) -> int:
    """Writes the cells as OUT/cells/pbc_barcelona/<Class>/*.png with WBCAtt-like annotations, so that they can be read
    with `--source pbc --root OUT`. Returns the number of pictures."""
    lines = [",".join(("split", "img_name", "label", *ATTRIBUTES))]
    for number, cell in enumerate(synthetic.cells(n_per_class, seed)):
        name = f"{cell.label}_{number:06d}.png"
        atomic_write(out / pbc.IMAGES / cell.label / name, source_cell(cell).image)
        lines.append(",".join((cell.split, name, cell.label, *(cell.attributes[key] for key in ATTRIBUTES))))
    atomic_write(out / pbc.ANNOTATIONS, "\n".join(lines) + "\n")
    return len(lines) - 1
