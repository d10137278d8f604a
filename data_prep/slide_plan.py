"""`pbs data plan`: what a slide job will cost, from a few tiles of its slides done for real and timed.

Tiles, kept share, cells and bytes are measured on the sample; so is the CPU time. Only the accelerator's rate is an
assumption, and is printed as one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from data_prep import qc_haemorasis, slide_cellpose, slide_cells, slide_table, subtype
from data_prep.progress import progress
from data_prep.schema import stable_hash
from data_prep.slide_units import Look, LookUnit, block_tiles, do_tile, look
from data_prep.slides import open_slide
from data_prep.sources import Reject
from data_prep.tiling import Grid

LOOKS = 8  # slides opened for the estimate; the others are taken to be like them, by their file size
BLOCKS = 6  # blocks of tiles done in all
WRITTEN_TWICE = 2.0  # a unit's file, then the shard made from it
IMAGES_A_SECOND = 500.0  # 224 px through a ViT-L on one TPU v5e chip at 40 % of its peak: assumed, not measured


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The estimate. `gigabytes`: of the datasets; `disk`: while the job runs. `rejects`: slides that will be refused,
    among the `opened`."""

    slides: int
    opened: int
    tiles: int
    kept: int
    cells: int
    gigabytes: float
    disk: float
    cpu_hours: float
    chip_hours: float
    rejects: tuple[Reject, ...]

    def lines(self) -> list[str]:
        return [
            f"slides: {self.slides}, of which {self.opened} were opened for this",
            f"tiles: about {self.tiles:,}, of which kept about {self.kept:,}",
            f"white cells: about {self.cells:,}",
            f"disk: about {self.gigabytes:.3g} GB of datasets, {self.disk:.3g} GB while the job runs",
            f"CPU: about {self.cpu_hours:.3g} core-hours on this machine, divided by --workers",
            f"features: about {self.chip_hours:.3g} chip-hours at {IMAGES_A_SECOND:.0f} images a second (assumed)",
            *(f"will be rejected, of those opened: {reject.detail}" for reject in self.rejects),
        ]


def make_plan(
    root: Path,
    table: Path | None,
    threshold: float,
    seed: int = 0,
    *,
    backbone: Path | None = None,
    qc_source: Path | None = None,
    cellpose_weights: Path | None = None,
) -> Plan:
    """Estimates a job of these options (see `SlideJob`) within a factor of two where the sampled slides are like the others.
    Raises DataError as the job would for a table that cannot be used."""
    rows = slide_table.load(root, table, seed)
    sizes = {row.slide_id: (root / row.path).stat().st_size for row in rows}
    sample = sorted(rows, key=lambda row: stable_hash("plan", row.slide_id))[:LOOKS]
    began = time.process_time()
    seen = [look(LookUnit(root, row, qc_source)) for row in progress(sample, len(sample), "plan, slides")]
    looking = (time.process_time() - began) / len(sample)
    good = [found for found in seen if isinstance(found, Look)]
    rejects = tuple(found for found in seen if isinstance(found, Reject))
    bytes_seen = sum(sizes[row.slide_id] for row in sample)
    scale = sum(sizes.values()) / max(bytes_seen, 1)
    tiles = scale * sum(Grid(*found.size).tiles for found in good)
    done = _sample(root, good, threshold, qc_source, cellpose_weights)
    start, per_cell = _naming(backbone, done.crops) if backbone else (0.0, 0.0)
    per_tile = 1 / max(done.tiles, 1)
    kept, cells = tiles * done.kept * per_tile, tiles * done.cells * per_tile
    gigabytes = tiles * done.size * per_tile / 1e9
    seconds = tiles * done.seconds * per_tile + looking * len(rows) + start + cells * per_cell
    return Plan(
        len(rows),
        len(sample),
        round(tiles),
        round(kept),
        round(cells),
        gigabytes,
        gigabytes * WRITTEN_TWICE,
        seconds / 3600,
        (kept + cells) / IMAGES_A_SECOND / 3600,
        rejects,
    )


@dataclasses.dataclass(slots=True)
class _Done:
    tiles: int = 0
    kept: int = 0
    cells: int = 0
    size: int = 0
    seconds: float = 0.0
    crops: list[bytes] = dataclasses.field(default_factory=list)


def _naming(backbone: Path, crops: Sequence[bytes]) -> tuple[float, float]:
    """CPU-seconds until the classifier has named its first cells, and of a cell after that."""
    began = time.process_time()
    classify = subtype.classifier(backbone)
    named = list(classify(crops))
    ready = time.process_time()
    list(classify(crops))
    return ready - began, (time.process_time() - ready) / max(len(named), 1)


def _sample(
    root: Path, looks: Sequence[Look], threshold: float, qc_source: Path | None, cellpose_weights: Path | None
) -> _Done:
    """A few blocks, spread over the slides and over each slide, done as the job does them but not written."""
    done = _Done()
    find = slide_cellpose.CellposeFinder(cellpose_weights) if cellpose_weights else slide_cells.white_cells
    places = [(found, k) for k in range(BLOCKS) for found in looks][:BLOCKS]
    for found, k in progress(places, len(places), "plan, tiles"):
        grid = Grid(*found.size)
        blocks = [block for number in range(grid.bands) for block in grid.blocks(number)]
        if not blocks:
            continue
        block = blocks[(2 * k + 1) * len(blocks) // (2 * BLOCKS)] if len(blocks) >= BLOCKS else blocks[k % len(blocks)]
        score = qc_haemorasis.scorer(qc_source, found.row.slide_id) if qc_source else None
        began = time.process_time()
        with open_slide(root / found.row.path) as slide:
            for pixels, half in block_tiles(slide, block, found):
                if pixels.error:
                    continue
                _, patch, cells, _ = do_tile(pixels, half, found, threshold, score, find)
                done.tiles += 1
                done.kept += patch is not None
                done.cells += len(cells)
                done.crops += [cell.image for cell in cells]
                done.size += (len(patch.image) if patch else 0) + sum(len(cell.image) for cell in cells)
        done.seconds += time.process_time() - began
    return done
