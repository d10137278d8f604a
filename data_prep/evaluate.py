"""`pbs data evaluate`: scores the shipped cell finder on annotated real fields, a classifier on a cell job, and a slide
job's differentials on mosaics.

Fields have no pixel size; each set is resized by a fixed factor that brings its cells to the size they have at 0.25
um/px (chosen on BCCD's train list, elsewhere by the size of the red cells). Annotations are incomplete, so red cells that
nobody labelled are no errors. Goals are set for BCCD and Chula; the other sets and drawn smears are reported beside them.
"""

from __future__ import annotations

import dataclasses
import io
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from data_prep import slide_cells, smear_draw
from data_prep.evaluate_cells import calibration, white_cell
from data_prep.io import atomic_write, open_dataset
from data_prep.progress import progress
from data_prep.schema import WHITE_CELL_CLASSES, Box, DataError, stable_hash
from data_prep.slide_datasets import read_slides
from data_prep.slide_derived import slide_cells as slide_cells_known
from data_prep.slide_units import is_cut
from data_prep.stats import wilson

MPP = 0.25
BCCD, CHULA, DRAASLAN, PIG = 0.32, 0.75, 0.55, 2.0  # factors by which the fields are resized; a pig's red cell has 6 um
DRAWN, DRAWN_SIDE = 4, 1024  # smears and their px
OVERLAP = 0.5  # intersection over union of a right box
ZOOM = 2  # of fields that are shown
ENOUGH = 20  # cells of a class below which its recall says nothing
CONFIDENCES = (0.5, 0.8, 0.9)
RED_RADIUS = 15.0  # px at MPP: a labelled point within it of a found centre is found


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """right of `truth` annotated cells; `found`: how many the finder named, 0 where precision has no meaning; `cut`: those of
    them that nobody annotated and the field's edge cuts, which the slide job leaves out."""

    name: str
    right: int
    truth: int
    found: int
    cut: int = 0

    def line(self) -> str:
        text = f"{self.name}: recall {_rate(self.right, self.truth)}"
        if self.found:
            text += f", precision {self.right / self.found:.3f} (n {self.found})"
        if self.cut:
            text += f", {self.right / (self.found - self.cut):.3f} without {self.cut} that the edge cuts"
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A picture at MPP, the same halved; annotated boxes by kind, in its pixels."""

    rgb: np.ndarray
    half: slide_cells.Halved
    boxes: dict[str, list[Box]]


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What single tasks need beside --root."""

    truth: Path | None = None
    backbone: Path | None = None
    show: Path | None = None
    match_stain: bool = False


def load_field(path: Path, factor: float, boxes: dict[str, list[Box]]) -> Field:
    with Image.open(path) as image:
        return make_field(image, factor, boxes)


def make_field(image: Image.Image, factor: float, boxes: dict[str, list[Box]]) -> Field:
    size = (round(image.width * factor), round(image.height * factor))
    rgb = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX))
    return Field(rgb, slide_cells.halve(rgb, slide_cells.measure_stain([rgb])), boxes)


def _scaled(edges: Iterable[float], factor: float) -> Box:
    return Box(*(round(factor * edge) for edge in edges))


def bccd_fields(root: Path, part: str) -> Iterator[Field]:
    """The fields of BCCD's train, val or test list. Raises DataError when they are not under `root`."""
    folder = root / "fields" / "bccd"
    names = folder / "ImageSets" / "Main" / f"{part}.txt"
    if not names.is_file():
        raise DataError(f"{names} is missing: --root is the folder that holds fields/bccd")
    listed = names.read_text().split()
    for name in progress(listed, len(listed), f"bccd {part}"):
        boxes: dict[str, list[Box]] = {}
        for item in ET.parse(folder / "Annotations" / f"{name}.xml").iter("object"):
            edges = (float(item.findtext(f"bndbox/{edge}") or 0) for edge in ("xmin", "ymin", "xmax", "ymax"))
            boxes.setdefault(item.findtext("name") or "", []).append(_scaled(edges, BCCD))
        yield load_field(folder / "JPEGImages" / f"{name}.jpg", BCCD, boxes)


def draaslan_fields(folder: Path) -> Iterator[Field]:
    """Boxes of white and red cells; some are named as the other kind."""
    paths = sorted((folder / "images").glob("*.png"))
    for path in progress(paths, len(paths), folder.name):
        boxes: dict[str, list[Box]] = {}
        for line in (folder / "labels" / f"{path.stem}.txt").read_text().splitlines():
            kind, *words = line.split()  # as KITTI: three words, then left, top, right, bottom
            boxes.setdefault(kind.upper(), []).append(_scaled(map(float, words[3:7]), DRAASLAN))
        yield load_field(path, DRAASLAN, boxes)


def pig_fields(folder: Path) -> Iterator[Field]:
    """Boxes of white cells, as YOLO: middle and size in parts of the picture."""
    paths = sorted((folder / "images").glob("*.jpg"))
    for path in progress(paths, len(paths), folder.name):
        field = load_field(path, PIG, {"WBC": []})
        height, width = field.rgb.shape[:2]
        for line in (folder / "labels" / f"{path.stem}.txt").read_text().splitlines():
            x, y, w, h = map(float, line.split()[1:])
            edges = ((x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height)
            field.boxes["WBC"].append(_scaled(edges, 1))
        yield field


def drawn_fields() -> Iterator[Field]:
    """Smears as `pbs data synth` draws them, always the same, with the exact boxes of their white cells."""
    factor = smear_draw.MPP / MPP
    for number in progress(range(DRAWN), DRAWN, "drawn smears"):
        rng = np.random.default_rng(stable_hash("evaluate", number))
        pixels, cells, _ = smear_draw.draw_smear(DRAWN_SIDE, DRAWN_SIDE, 3 * WHITE_CELL_CLASSES, rng)
        boxes = [_scaled(dataclasses.astuple(cell.box), factor) for cell in cells]
        yield make_field(Image.fromarray(pixels), factor, {"WBC": boxes})


def reported(root: Path, line: Callable[[str, Iterable[Field]], str]) -> Iterator[str]:
    """The line on each set that no goal is set for."""
    sets = {"draaslan": draaslan_fields, "warty_pig_cc0": pig_fields}
    for name, fields in sets.items():
        folder = root / "fields" / name
        yield f"reported: {line(name, fields(folder)) if folder.is_dir() else f'nothing, {folder} is missing'}"
    yield f"reported: {line('drawn smears', drawn_fields())}"


def overlap(a: Box, b: Box) -> float:
    """Intersection over union."""
    both = Box(max(a.left, b.left), max(a.top, b.top), min(a.right, b.right), min(a.bottom, b.bottom))
    shared = both.area if both.width > 0 and both.height > 0 else 0
    return shared / max(a.area + b.area - shared, 1)


def matched(truth: Sequence[Box], found: Sequence[Box]) -> set[int]:
    """Which found boxes have an annotated one of their own at OVERLAP or better, best pairs first."""
    pairs = sorted(((overlap(t, f), i, j) for i, t in enumerate(truth) for j, f in enumerate(found)), reverse=True)
    taken: tuple[set[int], set[int]] = (set(), set())
    for value, i, j in pairs:
        if value >= OVERLAP and i not in taken[0] and j not in taken[1]:
            taken[0].add(i)
            taken[1].add(j)
    return taken[1]


def white_cells(root: Path, show: Path | None = None) -> list[Score]:
    """BCCD by list; the lists may share donors, so test is no external validation.

    show: PNG for the test fields where box and annotation part (green: annotated, red: found), to be looked at.
    """
    scores = []
    for part in ("train", "val", "test"):
        score, parted = score_white(f"white cells, BCCD {part}", bccd_fields(root, part))
        scores.append(score)
    if show is not None and parted:
        atomic_write(show, _sheet(parted))
    return scores


def _white_line(name: str, fields: Iterable[Field]) -> str:
    score, _ = score_white(f"white cells, {name}", fields)
    return dataclasses.replace(score, cut=0).line()  # boxes as wide as these small fields are wrong, not cut


def score_white(name: str, fields: Iterable[Field]) -> tuple[Score, list[Image.Image]]:
    """The score, and the fields where box and annotation part."""
    parted = []
    right = truth = found = cut = 0
    for field in fields:
        size = field.rgb.shape[1], field.rgb.shape[0]
        cells = slide_cells.white_cells(field.rgb, field.half, MPP, Box(0, 0, *size))
        annotated, boxes = field.boxes.get("WBC", []), [cell.box for cell in cells]
        hits = matched(annotated, boxes)
        if not len(hits) == len(annotated) == len(boxes):
            parted.append(_drawn(field.rgb, annotated, boxes))
        right, truth, found = right + len(hits), truth + len(annotated), found + len(boxes)
        cut += sum(is_cut(box, size) for k, box in enumerate(boxes) if k not in hits)
    return Score(name, right, truth, found, cut), parted


def _drawn(rgb: np.ndarray, annotated: Sequence[Box], found: Sequence[Box]) -> Image.Image:
    picture = Image.fromarray(rgb)
    picture = picture.resize((ZOOM * picture.width, ZOOM * picture.height))
    draw = ImageDraw.Draw(picture)
    for boxes, colour in ((annotated, "green"), (found, "red")):
        for box in boxes:
            draw.rectangle([ZOOM * edge for edge in dataclasses.astuple(box)], outline=colour, width=3)
    return picture


def _sheet(pictures: Sequence[Image.Image], columns: int = 3) -> bytes:
    width, height = (max(getattr(picture, side) for picture in pictures) for side in ("width", "height"))
    sheet = Image.new("RGB", (width * columns, height * -(-len(pictures) // columns)), "white")
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (number % columns * width, number // columns * height))
    encoded = io.BytesIO()
    sheet.save(encoded, "png")
    return encoded.getvalue()


def red_cells(root: Path) -> list[Score]:
    """BCCD boxes that hold a found centre; Chula points with one near."""
    scores = [score_red("red cells, BCCD test", bccd_fields(root, "test"))[0]]
    folder = root / "fields" / "chula_rbc12"
    labels = sorted((folder / "Label").glob("*.txt"))
    right = truth = 0
    for path in progress(labels, len(labels), "chula"):
        field = load_field(folder / "Dataset" / f"{path.stem}.jpg", CHULA, {})
        centres = slide_cells.red_cells(field.half, MPP).centres
        for line in path.read_text().splitlines():
            if line.strip():
                x, y = (CHULA * float(word) for word in line.split()[:2])
                truth += 1
                right += bool(len(centres)) and float(np.hypot(*(centres - (x, y)).T).min()) <= RED_RADIUS
    return [*scores, Score("red cells, Chula points", right, truth, 0)]


def score_red(name: str, fields: Iterable[Field]) -> tuple[Score, str]:
    """Boxes that hold a found centre; and how many cells were found, how wide."""
    right = truth = found = 0
    widths = []
    for field in fields:
        cells = slide_cells.red_cells(field.half, MPP)
        found += len(cells.centres)
        widths.append(cells.diameter_um)
        for box in field.boxes.get("RBC", []):
            truth += 1
            right += any(box.left <= x <= box.right and box.top <= y <= box.bottom for x, y in cells.centres)
    return Score(name, right, truth, 0), f"{found} found in {len(widths)} fields, {np.nanmedian(widths):.1f} um wide"


def _red_line(name: str, fields: Iterable[Field]) -> str:
    score, found = score_red(f"red cells, {name}", fields)
    return f"{score.line() if score.truth else f'{score.name}: no truth: counted only'}; {found}"


def nuclei(root: Path) -> list[str]:
    """Median overlap of the stained area with BCCD's nucleus masks (255), on fields that have both."""
    folder = root / "masks" / "bccd_nucleus"
    values = []
    paths = sorted(folder.glob("*.png"))
    for path in progress(paths, len(paths), "nuclei"):
        picture = root / "fields" / "bccd" / "JPEGImages" / f"BloodImage_{path.stem.rpartition('_')[2]}.jpg"
        if not picture.is_file():
            continue
        field = load_field(picture, BCCD, {})
        size = (field.half.nuclear.shape[1], field.half.nuclear.shape[0])
        with Image.open(path) as mask:
            nucleus = np.asarray(mask.convert("L").point(lambda v: 255 * (v > 205)).resize(size)) > 127
        stained = field.half.nuclear
        if nucleus.any():
            values.append((nucleus & stained).sum() / (nucleus | stained).sum())
    if not values:
        raise DataError(f"{folder} holds no mask of a field: --root is the folder that holds masks/bccd_nucleus")
    return [f"nuclei, BCCD masks: median IoU {np.median(values):.3f}, n {len(values)}"]


def subtypes(job: Path, backbone: Path | None, match_stain: bool = False) -> list[str]:
    """A classifier (see `subtype`) on the test cells of `job` that have one of the five types: per class, calibration, what it
    would keep at a confidence, and its confusions. match_stain: see `subtype.classifier`.

    Raises DataError without `backbone` and for a job with no such cell.
    """
    from data_prep.subtype import classifier  # brings jax

    if backbone is None:
        raise DataError("--task subtype needs --backbone, the workdir of a finished phase 0a or classifier")
    cells = [(r["image"], r["label"]) for r in open_dataset(job / "cells", "test") if r["label"] in WHITE_CELL_CLASSES]
    if not cells:
        raise DataError(f"{job}/cells has no test cell of {', '.join(WHITE_CELL_CLASSES)}")
    images, labels = zip(*cells, strict=True)
    named = list(classifier(backbone, match_stain=match_stain)(images, images))
    truth, chosen = np.asarray(labels), np.asarray([name for name, _ in named])
    return subtype_lines(truth, chosen, np.asarray([confidence for _, confidence in named]))


def subtype_lines(truth: np.ndarray, chosen: np.ndarray, confidence: np.ndarray) -> list[str]:
    """str[n], str[n] and the chosen class's probability float[n] in [0, 1] -> what to print."""
    right = truth == chosen
    recalls = {c: right[truth == c].mean() for c in WHITE_CELL_CLASSES if (truth == c).sum() >= ENOUGH}
    macro = f", macro over {len(recalls)} classes with at least {ENOUGH} cells {np.mean(list(recalls.values())):.3f}"
    lines = [f"subtype: accuracy {_share(right)}" + (macro if recalls else "")]
    lines += [f"  {c}: recall {_share(right[truth == c])}" for c in WHITE_CELL_CLASSES if (truth == c).any()]
    lines.append(calibration(right, confidence))
    for least in CONFIDENCES:
        kept = confidence >= least
        lines.append(f"  confidence >= {least}: {kept.mean():.0%} named, {_share(right[kept])} of them right")
    wrong = Counter(zip(truth[~right].tolist(), chosen[~right].tolist(), strict=True))
    return lines + [f"  {count} {gold} called {name}" for (gold, name), count in wrong.most_common()]


def _share(right: np.ndarray) -> str:
    return _rate(int(right.sum()), len(right))


def _rate(right: int, n: int) -> str:
    low, high = wilson(right, n)
    return f"{right / max(n, 1):.3f} ({low:.3f}-{high:.3f}, n {n})"


def differential(job: Path, truth: Path | None) -> list[str]:
    """Mean absolute error, in points, of each class's share on the test slides of `job` against what lies on them.

    Raises DataError without `truth`, and for slides that `truth`/truth says nothing of.
    """
    if truth is None:
        raise DataError("--task differential needs --truth, the folder of `pbs data mosaic`")
    counted, there = [], []
    for slide in read_slides(job, "test"):
        known = slide_cells_known(slide, truth)
        if known.source != "truth":
            raise DataError(
                f"{truth}/truth/{slide.slide_id}.json is missing: --truth is the folder of `pbs data mosaic`"
            )
        counted.append([slide.counts.get(label, 0) for label in WHITE_CELL_CLASSES])
        there.append([known.counts.get(label, 0) for label in WHITE_CELL_CLASSES])
    if not counted:
        raise DataError(f"{job}/slides has no test split: --root is the --out of `pbs data run --source slides`")
    found, real = np.asarray(counted, float), np.asarray(there, float)
    errors = 100 * np.abs(found / np.maximum(found.sum(1, keepdims=True), 1) - real / real.sum(1, keepdims=True))
    lines = [f"differential, {len(found)} test slides: {found.sum():.0f} white cells counted of {real.sum():.0f} there"]
    return lines + [
        f"  {label}: mean absolute error {mean:.2f} points"
        for label, mean in zip(WHITE_CELL_CLASSES, errors.mean(0), strict=True)
    ]


TASKS: dict[str, Callable[[Path, Options], list[str]]] = {
    "white_cells": lambda root, options: [
        *(score.line() for score in white_cells(root, options.show)),
        *reported(root, _white_line),
    ],
    "red_cells": lambda root, _: [*(score.line() for score in red_cells(root)), *reported(root, _red_line)],
    "nuclei": lambda root, _: nuclei(root),
    "subtype": lambda root, options: subtypes(root, options.backbone, options.match_stain),
    "white_cell": lambda root, options: white_cell(root, options.backbone, options.match_stain),
    "differential": lambda root, options: differential(root, options.truth),
}
