"""One picture of any kind as `pbs ask` and `pbs serve` take it: a single cell, a field, a slide; its white cells, or a refusal.

A refusal is a DataError whose sentence says why nothing is answered. Pixels are decoded only after their number is known.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep import (
    crops,
    datasets,
    differential,
    qc,
    segment,
    slide_cells,
    slide_pipeline,
    slide_readers,
    slide_units,
    slides,
    subtype,
)
from data_prep.claims import Facts, contradiction
from data_prep.schema import QA, Box, Cell, DataError
from data_prep.slide_datasets import read_slides
from data_prep.slide_table import COLUMNS, SlideRow
from data_prep.slide_write import SlideJob
from data_prep.slides import Scale
from data_prep.tiling import SIDE as PATCH_SIDE
from data_prep.tiling import TilePixels

KINDS = ("crop", "field", "slide")
SUFFIXES = slide_readers.SLIDE_SUFFIXES
__all__ = ["KINDS", "PATCH_SIDE", "SUFFIXES", "Picture", "Preparation", "classifier", "open_picture", "region"]
MOST_PIXELS = 50_000_000  # of a plain picture
SMALLEST = 64  # px, the shorter side
CROP_SIDE = 512  # px; a picture up to this side shows one cell when that stands in its middle and is large
CROP_SHARE, CROP_OFFSET = (0.28, 0.95), 0.08  # the cell's side and its distance from the middle, of the shorter side
OVERVIEW = 1400  # px, longer side
DRAWN = 0.02  # share of pixels in pure bright colour: no stain, a drawing
WHITE_UM = 13.0  # across a white cell, where nothing states a field's scale
SHARP = 0.34  # `qc.focus` of 98 of 100 of PBC's crops; blurred by 10 px, two thirds are below
NATIVE = 0.25  # um/px, at which focus was measured
FOUND_AT = 0.2  # um/px to which a finer field is reduced
LADDER_FROM = 0.1  # um/px where no white cell suggests a scale
LADDER = (1.0, 1.25, 0.8, 1.6, 0.64, 2.0)  # of the first guess
FIELD_SCALE = (0.03, 0.6)  # um/px of a photograph through a 40x to 100x objective
OWN_WORDS = {  # where the slide job's sentences speak of its table
    "add a column mpp to the table, e.g. 0.25": "give its mpp (um per pixel), e.g. 0.25",
    "correct the table's mpp": "correct its mpp",
    ": take it out of the table": "",
    ", or see the scores in qc/": "",
}
Classify = Callable[[Iterable[bytes]], Iterator[tuple[str, float]]]


@dataclasses.dataclass(frozen=True)
class Picture:
    """What was found. `cells`: crops ready for the model, boxes in pixels of the picture; `overview`: JPEG of the whole,
    smaller by `factor`; `folder`: the datasets of a slide; `remarks`: what a reader should know of the numbers."""

    name: str
    kind: str
    size: tuple[int, int]
    mpp: float
    mpp_source: str
    cells: list[Cell]
    overview: bytes
    factor: float
    tiles: tuple[int, int] = (1, 1)
    remarks: tuple[str, ...] = ()
    folder: Path | None = None

    def counts(self) -> dict[str, int]:
        """White cells by class."""
        return dict(Counter(cell.label for cell in self.cells if cell.label))

    def differential(self) -> tuple[str, list[differential.Share]]:
        """One sentence, and the shares in percent with their 95 % intervals ([] for too few cells)."""
        counted = differential.counts(self.counts())
        return differential.sentence(counted), differential.shares(counted)

    def speaks_against(self, qa: QA) -> str:
        """What of an answered question the cells deny, as the classifier names them; "" where they deny nothing."""
        if qa.level == "slide":
            facts = Facts(counts=differential.counts(self.counts()))
            denied = contradiction(dataclasses.replace(qa, task="cell_differential"), facts)
            return f"the cells counted say otherwise: {denied}" if denied else ""
        cell = self.cells[0]
        denied = contradiction(qa, Facts(label=cell.label)) if len(self.cells) == 1 else None
        return f"the classifier says {cell.label} ({cell.confidence:.2f})" if denied else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Preparation:
    """How the model's training crops were made: `geometry` and `color_enhance` of its cells. Raises DataError for a geometry
    that is not ours."""

    geometry: str = crops.geometry_name("reflect")
    color_enhance: float = 1.0

    def __post_init__(self) -> None:
        if self.geometry not in (known := [crops.geometry_name(fill) for fill in crops.FILLS]):
            raise DataError(
                f'the checkpoint learnt from crops of geometry "{self.geometry}", this version makes {" or ".join(known)}'
            )

    @property
    def fill(self) -> str:
        return next(fill for fill in crops.FILLS if crops.geometry_name(fill) == self.geometry)


def classifier(backbone: Path) -> Classify:
    """Names cells by the head of a finished phase 0a (see `subtype.classifier`)."""
    return subtype.classifier(backbone, batch_size=16)


def open_picture(
    path: Path,
    prepare: Preparation,
    *,
    kind: str = "auto",
    mpp: float = 0.0,
    work: Path,
    backbone: Path | None = None,
    classify: Classify | None = None,
    name: str = "",
) -> Picture:
    """The picture with its white cells, named by `classify` (crop, field) or by `backbone`'s head (slide).

    kind: auto, crop, field or slide. mpp: um/px, 0 = what the file says, else for a field estimated from its red cells.
    work: a folder for the datasets of a slide. Raises DataError, the reason of a refusal.
    """
    name = (name or path.name).encode(errors="replace").decode()  # a name on disk may be no text
    low, high = slides.SCALE_RANGE
    if mpp and not low <= mpp <= high:
        raise DataError(f"{name}: mpp is {mpp:g}: give {low:g} to {high:g} um per pixel, or leave it out")
    try:
        return _open(path, prepare, kind, mpp, work, backbone, classify, name)
    except DataError as error:
        raise DataError(str(error).replace(str(path), name)) from error  # a server's folders are nobody's business


def _open(
    path: Path,
    prepare: Preparation,
    kind: str,
    mpp: float,
    work: Path,
    backbone: Path | None,
    classify: Classify | None,
    name: str,
) -> Picture:
    _check(path, name)
    with slides.open_slide(path) as slide:
        size, reader = slide.size, slide.pixels.name
        if min(size) < SMALLEST:
            raise DataError(f"{name} is {size[0]}x{size[1]} px: the shorter side must have {SMALLEST} px or more")
        plain = reader == "pillow" or (
            slide.pixels.levels == 1 and path.suffix.casefold() in slide_readers.TIFF_SUFFIXES
        )
        large = size[0] * size[1] > MOST_PIXELS
        if kind != "slide" and (kind != "auto" or (plain and not large)):
            if large:
                raise DataError(f"{name} is {size[0]}x{size[1]} px, too many for a {kind}: open it as slide")
            rgb = slide.read(0, 0, *size)
            if slide_cells.colourless([rgb]):
                raise DataError(f"{name} has no colour: answers are about stained smears")
            if ((rgb.max(-1) > 180) & (np.ptp(rgb, axis=-1) > 150)).mean() > DRAWN:
                raise DataError(f"{name} has the colours of a drawing, not of a stained smear")
            if kind == "crop" or (kind == "auto" and _shows_one_cell(rgb)):
                return _crop(name, rgb, prepare, classify)
            return _field(name, rgb, prepare, _stated(slide, mpp, name), classify)
    return _slide(path, name, size, prepare, mpp, work, backbone)


def _check(path: Path, name: str) -> None:
    """Refuses by the header alone what would be decoded whole and take too much memory, and names what is no picture at all."""
    if not path.is_file():
        raise DataError(f"{path} is not a file: give an image or a slide")
    suffix = path.suffix.casefold()
    if suffix in slide_readers.VENDOR_SUFFIXES or slide_readers.reads_regions(path):
        return
    try:
        with Image.open(path) as image:
            form, pixels = image.format, image.width * image.height
    except Image.DecompressionBombError as error:
        raise DataError(f"{name} is too large for a plain picture ({error}): convert it to a tiled TIFF") from error
    except (OSError, ValueError, SyntaxError) as error:
        if suffix in slide_readers.PICTURE_SUFFIXES:
            return  # a broken file: the reader says how
        raise DataError(f"{name} is not an image or slide that can be read ({error})") from error
    if pixels > MOST_PIXELS:
        raise DataError(f"{name} has {pixels:,} px, more than {MOST_PIXELS:,}: convert it to a tiled TIFF")
    if suffix not in slide_readers.PICTURE_SUFFIXES:
        raise DataError(f"{name} is a {form} picture with the ending {path.suffix or '(none)'}: save it as PNG or JPEG")


def _overview(image: Image.Image, size: tuple[int, int]) -> tuple[bytes, float]:
    """JPEG at most OVERVIEW px, and by how much it is smaller than `size`."""
    image = image.convert("RGB")
    image.thumbnail((OVERVIEW, OVERVIEW))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=88)
    return out.getvalue(), size[0] / image.width


def _shows_one_cell(rgb: np.ndarray) -> bool:
    height, width = rgb.shape[:2]
    if max(height, width) > CROP_SIDE:
        return False
    cell = segment.central_cell(rgb)
    if cell is None:
        return False
    box, shorter = cell.box, min(height, width)
    off = np.hypot(box.left + box.right - width, box.top + box.bottom - height) / 2
    low, high = CROP_SHARE
    return low * shorter <= max(box.width, box.height) <= high * shorter and off <= CROP_OFFSET * shorter


def _crop(name: str, rgb: np.ndarray, prepare: Preparation, classify: Classify | None) -> Picture:
    height, width = rgb.shape[:2]
    found = segment.central_cell(rgb)
    if found is None:
        raise DataError(f"{name} shows no white cell: no stained nucleus near its middle; open a whole field as field")
    sharp = _focus(rgb, WHITE_UM / max(found.box.width, found.box.height))
    bad, _ = qc.PARTS["focus"]
    if 0 < sharp < bad:  # 0: no red cell's edge to judge by
        raise DataError(f"{name} is out of focus (edges of {sharp:.2f}, sharp crops have {SHARP} or more)")
    doubt = f"may be out of focus (edges of {sharp:.2f}, sharp crops have {SHARP} or more)"
    remarks = (doubt,) if 0 < sharp < SHARP else ()
    cells = _cells(name, rgb, [found.box], prepare, classify)
    overview, factor = _overview(Image.fromarray(rgb), (width, height))
    return Picture(name, "crop", (width, height), 0.0, "", cells, overview, factor, remarks=remarks)


def _focus(rgb: np.ndarray, mpp: float) -> float:
    """`qc.focus` of a picture at the scale of a slide."""
    small, _ = _reduced(rgb, NATIVE / mpp)
    return qc.focus(slide_cells.halve(small, slide_cells.measure_stain([small])))


def _reduced(rgb: np.ndarray, factor: float) -> tuple[np.ndarray, float]:
    """A picture smaller by a factor, never larger, with even sides; and the factor taken."""
    height, width = rgb.shape[:2]
    factor = max(factor, 1.0)
    size = round(width / factor) // 2 * 2, round(height / factor) // 2 * 2
    if factor == 1:
        return rgb[: size[1], : size[0]], factor
    return np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.LANCZOS)), factor


def _stated(slide: slides.Slide, mpp: float, name: str) -> Scale:
    """What the user or the file says of the scale; 0 when neither does."""
    if mpp:
        return slides.resolve_scale({}, mpp, "given", name)
    try:
        return slides.resolve_scale(slide.pixels.properties, 0.0, "", name)
    except DataError:
        return Scale(0.0, "")


def _field(name: str, rgb: np.ndarray, prepare: Preparation, scale: Scale, classify: Classify | None) -> Picture:
    height, width = rgb.shape[:2]
    stated = scale.mpp > 0
    scale, boxes, cut = _white_cells_of_a_field(name, rgb, scale)
    remarks = []
    if not stated:
        remarks.append(f"scale {scale.source}: {scale.mpp:.3f} um/px")
    if cut:
        remarks.append(f"white cells at the edge, left out: {cut}")
    named = _cells(name, rgb, boxes, prepare, classify)
    overview, shown = _overview(Image.fromarray(rgb), (width, height))
    return Picture(
        name, "field", (width, height), scale.mpp, scale.source, named, overview, shown, remarks=tuple(remarks)
    )


def _white_cells_of_a_field(name: str, rgb: np.ndarray, scale: Scale) -> tuple[Scale, list[Box], int]:
    """(scale, boxes of the whole white cells, how many the edge cuts). Without a stated scale the one that its white cells
    suggest is tried first, then those beside it: a clump or a cell at the edge can mislead by a factor of two. Raises
    DataError with the first one's reason."""
    if scale.mpp:
        return scale, *_found_at(name, rgb, scale)
    reason: DataError | None = None
    for guess in _guesses(name, rgb):
        try:
            return guess, *_found_at(name, rgb, guess)
        except DataError as error:
            reason = reason or error
    raise DataError(f"{reason}; its scale is unknown: if it is a smear, give its mpp (um per pixel)") from reason


def _guesses(name: str, rgb: np.ndarray) -> list[Scale]:
    """Scales that a photograph may have, the likeliest first: at which its white cells are 13 um across, then a ladder.
    Raises DataError where none is a smear's."""
    found = [cell for cell in segment.find_white_cells(rgb) if not cell.on_border]
    sides = [max(cell.box.width, cell.box.height) for cell in found]
    low, high = FIELD_SCALE
    first = WHITE_UM / float(np.median(sides)) if sides else LADDER_FROM
    source = "estimated from white cells" if sides else "estimated"
    guesses = [Scale(round(first * step, 4), source) for step in LADDER if low <= first * step <= high]
    if not guesses:
        raise DataError(
            f"{name}: its stained bodies would be white cells at {first:.2g} um/px, which is no smear's: give its mpp"
        )
    return guesses


def _found_at(name: str, rgb: np.ndarray, scale: Scale) -> tuple[list[Box], int]:
    """Quality is judged and cells are found at the scale of a slide; boxes are in the field's own pixels."""
    small, factor = _reduced(rgb, FOUND_AT / scale.mpp)
    size = small.shape[1], small.shape[0]
    whole = Box(0, 0, *size)
    row = SlideRow(path=name, slide_id="field")
    stain = slide_cells.measure_stain([small])
    look = slide_units.Look(row, size, Scale(scale.mpp * factor, scale.source), stain, {})
    fate, patch, cells, cut = slide_units.do_tile(
        TilePixels(whole, whole, small), slide_cells.halve(small, stain), look, qc.THRESHOLD
    )
    if patch is None:
        raise DataError(
            f"{name} fails quality control: {fate.reason} (score {fate.score:.2f}, {qc.THRESHOLD} is needed)"
        )
    if not cells:
        more = f"; cut by its edge: {cut}" if cut else ""
        raise DataError(f"{name} shows no whole white cell{more}")
    return [Box(*(round(side * factor) for side in dataclasses.astuple(cell.bbox))) for cell in cells], cut


def _cells(
    name: str, rgb: np.ndarray, boxes: Iterable[Box], prepare: Preparation, classify: Classify | None
) -> list[Cell]:
    picture, fill = Image.fromarray(rgb), prepare.fill
    found = [
        Cell(
            cell_id=f"{name}:{k}",
            split="test",
            label="",
            label_source="model",
            image=crops.encode_jpeg(crops.context_crop(picture, box, fill, prepare.color_enhance)),
            bbox=box,
            geometry=prepare.geometry,
            color_enhance=prepare.color_enhance,
        )
        for k, box in enumerate(boxes)
    ]
    if classify is None:
        return found
    names = classify(cell.image for cell in found)
    return [
        dataclasses.replace(cell, label=label, confidence=share)
        for cell, (label, share) in zip(found, names, strict=True)
    ]


def _slide(
    path: Path,
    name: str,
    size: tuple[int, int],
    prepare: Preparation,
    mpp: float,
    work: Path,
    backbone: Path | None,
) -> Picture:
    """Through the slide job, on disk in `work`: a second question about the slide finds its datasets there."""
    if prepare != Preparation():
        raise DataError(
            f"{name}: the checkpoint learnt from crops of {prepare.geometry}, colour x{prepare.color_enhance:g}; slides are cut as "
            f"{Preparation().geometry}, x1"
        )
    work.mkdir(parents=True, exist_ok=True)
    table = work / "slides.csv"
    row = SlideRow(path=path.name, slide_id="slide", split="test", mpp=mpp, mpp_source="given" if mpp else "")
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerow(getattr(row, column) or "" for column in COLUMNS)
    out = work / "data"
    slide_pipeline.run(SlideJob(out=out, root=path.parent, table=table, backbone=backbone), say=lambda text: None)
    if not (out / "slides").is_dir():
        rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
        reason = rejects[0]["reason"] if rejects else "no usable tile"
        detail = (
            rejects[0]["detail"].removeprefix(f"{path.name}: ") if rejects else "it is smaller than one tile of 512 px"
        )
        for words, ours in OWN_WORDS.items():
            detail = detail.replace(words, ours)
        raise DataError(f"{name} is refused ({reason}): {detail}")
    slide = next(iter(read_slides(out)))
    usable = f"{slide.tiles_kept} of {slide.tiles_in} tiles pass quality control"
    cells = list(datasets.read_cells(out)) if (out / "cells").is_dir() else []
    if not cells:
        raise DataError(f"{name} shows no white cell; {usable}")
    remarks = (usable,)
    tiles = (slide.tiles_in, slide.tiles_kept)
    with slides.open_slide(path) as opened:  # last: without smaller levels in the file it takes minutes
        overview, factor = _overview(opened.thumbnail(OVERVIEW), size)
    return Picture(name, "slide", size, slide.mpp, slide.mpp_source, cells, overview, factor, tiles, remarks, out)


def region(path: Path, box: Box, side: int) -> bytes:
    """JPEG of `side` px of a slide around a box. Raises DataError."""
    x, y = (box.left + box.right - side) // 2, (box.top + box.bottom - side) // 2
    with slides.open_slide(path) as slide:
        return crops.encode_jpeg(Image.fromarray(slide.read(x, y, side, side)))
