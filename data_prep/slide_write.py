"""Writes what the slide job made: every tile's score under OUT/qc, and the datasets `patches`, `cells`, `slides`."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import quote

from data_prep import differential, io, qc, qc_haemorasis, slide_cellpose, slide_table, subtype
from data_prep.datasets import CELL_FEATURES, cell_record
from data_prep.files import atomic_write, canonical_json
from data_prep.pipeline import unit_cells
from data_prep.progress import progress
from data_prep.schema import ARTIFACT, NO_WHITE_CELL, OTHERS, Cell
from data_prep.slide_datasets import PATCH_FEATURES, SLIDE_FEATURES, Slide, slide_record
from data_prep.slide_table import SlideRow
from data_prep.slide_units import BandReport, Look, Tile, why_failed
from data_prep.sources import Reject
from data_prep.tiling import SIDE, Grid

DATASETS = ("slides", "patches", "cells")
NO_TILES = "0 usable tiles"


@dataclasses.dataclass(frozen=True, slots=True)
class SlideJob:
    """What `pbs data run --source slides` was asked for. `backbone`: workdir of the phase 0a or classifier that names
    the cells, of which `white_cells`, a classifier too, first calls some artifacts; below `min_confidence` a cell is called
    Others, `match_stain` is of `subtype.classifier`. `grid_offset` shifts the tile grid."""

    out: Path
    root: Path | None = None
    table: Path | None = None
    backbone: Path | None = None
    white_cells: Path | None = None
    workers: int = 1
    seed: int = 0
    threshold: float = qc.THRESHOLD
    min_confidence: float = 0.0
    grid_offset: int = 0
    source: str = "slides"
    shard: str = ""  # "i/n": only the bands of every n-th slide, without the datasets
    beam: str = ""
    qc_source: Path | None = None  # of `qc_haemorasis`; None = the classical score decides
    cellpose_weights: Path | None = None  # None = the classical finder
    match_stain: bool = False

    def config(self) -> dict[str, Any]:
        """What decides the content: no path, no number of workers."""
        names = ("source", "seed", "threshold", "min_confidence", "grid_offset")
        qc_name = {"qc": qc_haemorasis.NAME} if self.qc_source else {}
        finder = {"cells": slide_cellpose.NAME} if self.cellpose_weights else {}
        stain = {"match_stain": True} if self.match_stain else {}
        return {name: getattr(self, name) for name in names} | {"side": SIDE} | qc_name | finder | stain


@dataclasses.dataclass(slots=True)
class Done:
    """A slide after its bands: what it is, and all its tiles."""

    look: Look
    grid: Grid
    reports: dict[int, BandReport]  # by number of the band

    @property
    def tiles(self) -> list[Tile]:
        return sorted(
            (tile for report in self.reports.values() for tile in report.tiles), key=lambda tile: (tile.y, tile.x)
        )

    def cells(self) -> Iterator[Cell]:
        """The white cells, band after band, read from their files."""
        for _, report in sorted(self.reports.items()):
            yield from unit_cells(report.cells)

    @property
    def failures(self) -> list[tuple[int, int, str]]:
        return sorted(failure for report in self.reports.values() for failure in report.failures)

    @property
    def kept(self) -> int:
        return sum(len(report.patches.keys) for report in self.reports.values())


def write_scores(out: Path, slides: Sequence[Done]) -> None:
    """OUT/qc/<slide_id>.json, kept slides and others: size, every tile's fate, the tiles that did not decode."""
    shutil.rmtree(out / "qc", ignore_errors=True)
    for slide in slides:
        tiles = [dataclasses.asdict(tile) for tile in slide.tiles]
        content = {"path": slide.look.row.path, "size": slide.look.size, "side": SIDE, "failures": slide.failures}
        atomic_write(scores_file(out, slide.look.row.slide_id), canonical_json(content | {"tiles": tiles}))


def scores_file(out: Path, slide_id: str) -> Path:
    """Ids may hold what file names may not: percent-escaped."""
    return out / "qc" / f"{quote(slide_id, safe='')}.json"


def write_datasets(
    job: SlideJob,
    rows: Sequence[SlideRow],
    slides: Sequence[Done],
    rejects: Sequence[Reject],
    inputs: Mapping[str, str],
    say: Callable[[str], None],
) -> list[str]:
    """Writes the datasets and returns the summary. What has no record is absent, older ones included."""
    reports = [report for slide in slides for _, report in sorted(slide.reports.items())]
    level = slide_table.split_level(rows)
    common: dict[str, Any] = {"config": job.config(), "inputs": inputs, "split_level": level}
    lost = Counter(reject.reason for reject in rejects if not reject.reason.startswith("tile "))
    if not slides:
        for name in DATASETS:
            shutil.rmtree(job.out / name, ignore_errors=True)
        return [f"slides: {len(rows)} in = 0 kept + {_counts(lost)}", f"{NO_TILES}: nothing was written"]
    tile_rejects = Counter(tile.reason for slide in slides for tile in slide.tiles if tile.reason)
    tile_rejects["partial, at the slide's edge"] += sum(slide.grid.partial for slide in slides)
    tile_rejects.update(why_failed(error) for slide in slides for *_, error in slide.failures)
    tiles_in = sum(slide.grid.tiles + slide.grid.partial for slide in slides)
    patches_id = io.finalise(
        job.out,
        "patches",
        PATCH_FEATURES,
        [report.patches for report in reports],
        id_feature="patch_id",
        rejected=+tile_rejects,
        records_in=tiles_in,
        **common,
    )
    found = sum(len(report.cells.keys) for report in reports)
    cut = sum(report.cut for report in reports)
    counted: dict[str, Counter[str]] = {slide.look.row.slide_id: Counter() for slide in slides}
    if found:
        io.write_dataset(
            job.out,
            "cells",
            CELL_FEATURES,
            map(cell_record, _named(job, slides, found, counted)),
            id_feature="cell_id",
            rejected={"cut by the slide's edge": cut} if cut else {},
            records_in=found + cut,
            config=job.config(),
            inputs={**inputs, "patches": patches_id},
            split_level=level,
        )
    else:
        shutil.rmtree(job.out / "cells", ignore_errors=True)
        say("note: no white cell was found, so there is no dataset cells")
    records = [_slide(slide, counted[slide.look.row.slide_id]) for slide in slides]
    io.write_dataset(
        job.out,
        "slides",
        SLIDE_FEATURES,
        map(slide_record, records),
        id_feature="slide_id",
        rejected=lost,
        records_in=len(rows),
        **common,
    )
    artifacts = sum(labels[ARTIFACT] for labels in counted.values())
    return [
        f"slides: {len(rows)} in = {len(slides)} kept{_plus(lost)}",
        f"tiles: {tiles_in} in = {sum(slide.kept for slide in slides)} kept{_plus(+tile_rejects)}",
        f"cells: {found + cut} found = {found} kept{f' + {cut} cut by the edge' if cut else ''}"
        + (f", {artifacts} of them no white cells" if artifacts else ""),
        f"split level: {level}",
        "all slides: " + differential.sentence(sum(counted.values(), Counter())),
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(counts.items()))


def _plus(counts: Mapping[str, int]) -> str:
    return "".join(f" + {n} {reason}" for reason, n in sorted(counts.items()))


def _named(job: SlideJob, slides: Sequence[Done], total: int, counted: Mapping[str, Counter[str]]) -> Iterator[Cell]:
    """The cells of all slides, by name where there is a classifier; fills `counted` (slide id -> class -> n)."""
    cells = progress((cell for slide in slides for cell in slide.cells()), total, "classes, cells")
    if job.backbone is None:
        yield from cells
        return
    whites = _classified(job, job.white_cells, "white_cell", slides) if job.white_cells else repeat(("", 1.0), total)
    names = _classified(job, job.backbone, "subtype", slides)
    for cell, (white, sure), (label, confidence) in zip(cells, whites, names, strict=True):
        kept, comment = label, ""
        if white == NO_WHITE_CELL:
            kept, confidence = ARTIFACT, sure
        elif confidence < job.min_confidence:
            kept, comment = OTHERS, f"{label} below the confidence asked for"
        counted[cell.slide_id][kept] += 1
        yield dataclasses.replace(cell, label=kept, label_source="model", confidence=confidence, comments=comment)


def _classified(job: SlideJob, workdir: Path, target: str, slides: Sequence[Done]) -> Iterator[subtype.Named]:
    """What the classifier in `workdir` says of each cell of all slides."""

    def images(slide: Done) -> Iterator[bytes]:
        return (cell.image for cell in slide.cells())

    classify = subtype.classifier(workdir, match_stain=job.match_stain, target=target)
    if job.match_stain:
        return (name for slide in slides for name in classify(images(slide), images(slide)))
    return classify(image for slide in slides for image in images(slide))  # whole batches, whatever a slide holds


def _slide(slide: Done, counted: Mapping[str, int]) -> Slide:
    row, tiles = slide.look.row, slide.tiles
    reasons = Counter(tile.reason for tile in tiles if tile.reason)
    diameters = [tile.red_um for tile in tiles if not tile.reason and tile.red_cells]
    details = slide.look.facts | {
        "tiles_rejected": dict(reasons),
        "tiles_undecodable": len(slide.failures),
        "tiles_partial": slide.grid.partial,
        "white_cells": sum(tile.white_cells for tile in tiles),
        "red_cells": sum(tile.red_cells for tile in tiles if not tile.reason),
        "red_cell_um": round(statistics.median(diameters), 3) if diameters else 0.0,
        "scale_note": slide.look.scale.note,
        "stain": dataclasses.asdict(slide.look.stain),
    }
    return Slide(
        slide_id=row.slide_id,
        split=row.split,
        width=slide.look.size[0],
        height=slide.look.size[1],
        tiles_in=slide.grid.tiles,
        tiles_kept=slide.kept,
        patient_id=row.patient_id,
        diagnosis=row.diagnosis,
        pattern=row.pattern,
        site=row.site,
        scanner=row.scanner,
        mpp=slide.look.scale.mpp,
        mpp_source=slide.look.scale.source,
        counts=differential.counts(counted),
        details=details,
    )
