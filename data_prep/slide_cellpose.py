"""Cells of a tile by Cellpose-SAM (paper 3.1.2), in place of the classical finder; needs the extra `cellpose`.

The network sees a tile with its halo, and only tiles in which nuclear stain says that a white cell may be: on a CPU it
takes minutes a tile. Its instances are all cells; those with a nucleus are kept here, naming them comes later. A cell
belongs to the tile that holds its box's centre, so the seams of tiles cost nothing; what the slide's edge cuts is left
out, as in the paper. The weights are a file that the user gives: nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import zipfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import ndimage

from data_prep import slide_cells
from data_prep.files import sha256_file
from data_prep.schema import Box, DataError
from data_prep.slide_cells import FoundCell, Halved

NAME = "cellpose"
FAILED = "Cellpose returned no label image"
GPU_BATCH = 8  # windows of 256 px at once; halved until they fit


class NotSegmentedError(DataError):
    """The network gave no label image of a tile."""


class Segmenter(Protocol):
    """What is used of `cellpose.models.CellposeModel`."""

    gpu: bool

    def eval(self, x: np.ndarray, **options: Any) -> tuple[Any, ...]: ...


def weights_sha256(weights: Path) -> str:
    """The hash of the weights, which decide what is found. Raises DataError without the package or a whole file of weights."""
    if not weights.is_file():
        raise DataError(
            f"--cellpose-weights {weights} is no file: download cpsam from huggingface.co/mouseland/cellpose-sam first"
        )
    if importlib.util.find_spec("cellpose") is None:
        raise DataError('--cellpose-weights needs the package: pip install "pbs-jax[cellpose]"')
    if not zipfile.is_zipfile(weights):  # as torch saves; loading it would take gigabytes here
        raise DataError(f"--cellpose-weights {weights} holds no weights, or only a part: download cpsam again")
    return sha256_file(weights)


@functools.lru_cache(maxsize=1)
def load(weights: Path) -> Segmenter:
    """The network, once a process; float32 on a CPU, where bfloat16 may be missing."""
    import torch
    from cellpose.models import CellposeModel

    gpu = torch.cuda.is_available()
    return CellposeModel(gpu=gpu, pretrained_model=str(weights), use_bfloat16=gpu)


def instances(segmenter: Segmenter, rgb: np.ndarray) -> np.ndarray:
    """int32[h, w] of uint8[h, w, 3]: 0 = no cell. Raises NotSegmentedError when the network gives no label image."""
    batch = GPU_BATCH if segmenter.gpu else 1
    while True:
        try:
            labels = segmenter.eval(rgb, batch_size=batch, channel_axis=-1)[0]
            break
        except RuntimeError as error:  # torch has no narrower kind on every device
            if "out of memory" not in str(error).lower() or batch == 1:
                raise
            batch //= 2
    if labels is None or np.shape(labels) != rgb.shape[:2]:
        raise NotSegmentedError(FAILED)
    return np.asarray(labels, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class CellposeFinder:
    """Finds as `slide_cells.white_cells` does, by the network whose weights lie at `weights`."""

    weights: Path

    def __call__(self, rgb: np.ndarray, half: Halved, mpp: float, core: Box) -> list[FoundCell]:
        if not slide_cells.candidates_near(half, mpp, core):
            return []
        return with_nucleus(instances(load(self.weights), rgb), half, mpp, core)


def with_nucleus(labels: np.ndarray, half: Halved, mpp: float, core: Box) -> list[FoundCell]:
    """The instances of int32[h, w] whose centre lies in `core`, of a white cell's size and with as much nuclear stain as
    the smallest white cell's nucleus has, largest nucleus first.

    half: the same picture, halved.
    """
    height, width = half.nuclear.shape
    counts = np.bincount(labels[: 2 * height : 2, : 2 * width : 2][half.nuclear], minlength=labels.max() + 1)
    found = []
    for number, place in enumerate(ndimage.find_objects(labels), 1):
        if place is None:
            continue
        rows, columns = place
        box = Box(columns.start, rows.start, columns.stop, rows.stop)
        nucleus = float(counts[number]) * (2 * mpp) ** 2
        side = max(box.width, box.height) * mpp
        low, high = slide_cells.CELL_SIDE_UM
        if nucleus >= slide_cells.NUCLEUS_AREA_UM2[0] and low <= side <= high and slide_cells.owns(core, box):
            found.append(FoundCell(box, nucleus))
    return sorted(found, key=lambda cell: (-cell.nucleus_um2, cell.box.top, cell.box.left))
