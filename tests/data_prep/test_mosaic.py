"""Mosaics: fields at the right scale without white cells, cells cut and laid as they are, splits kept, resume."""

from __future__ import annotations

import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import openslide
import pytest
from PIL import Image
from scipy import ndimage

from data_prep import mosaic, mosaic_fields, mosaic_paste, mosaic_plan, mosaic_sources, segment
from data_prep.mosaic_fields import RED_CELL, Stain
from data_prep.schema import WHITE_CELL_CLASSES, DataError
from data_prep.sources import SourceCell, pbc

STAIN = Stain(np.array([252, 226, 200], np.float32), np.array([0.15, 0.24, 0.15], np.float32))
CHULA = "data/fields/chula_rbc12/Dataset"


def picture(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.fixture(scope="module")
def field(shared: Path) -> np.ndarray:
    made = mosaic_fields.prepare_field(picture(shared / CHULA / "106.jpg"))
    assert not isinstance(made, str), made
    return made


@pytest.fixture(scope="module")
def neutrophil(shared: Path) -> tuple[np.ndarray, segment.WhiteCell]:
    rgb = picture(shared / "data/cells/pbc_barcelona/Neutrophil/SNE_633168.jpg")
    found = segment.central_cell(rgb)
    assert found is not None
    return rgb, found


def test_a_field_is_in_units_of_its_own_red_cells(field: np.ndarray) -> None:
    mask = mosaic_fields.red_cells(field)
    assert np.allclose(np.median(field[mask], axis=0), 1, atol=0.1)
    assert abs(float(np.median(field[~mask]))) < 0.05
    areas = np.bincount(ndimage.label(mask)[0].ravel())[1:]
    assert 2 * np.sqrt(np.median(areas[areas > 300]) / np.pi) == pytest.approx(RED_CELL, rel=0.1)


def test_fields_that_cannot_serve_say_why(shared: Path) -> None:
    assert "drawn into it" in str(mosaic_fields.prepare_field(picture(shared / CHULA / "52.jpg")))
    flat = np.random.default_rng(0).integers(200, 210, (200, 300, 3), np.uint8)
    assert isinstance(mosaic_fields.prepare_field(flat), str)


def test_white_cells_of_a_field_are_removed(
    field: np.ndarray, neutrophil: tuple[np.ndarray, segment.WhiteCell]
) -> None:
    """A field into which a real white cell was laid: the finder sees it before, and no white cell after."""
    rgb, found = neutrophil
    stain = mosaic_fields.stain_of(rgb)
    assert stain is not None
    laid = mosaic_fields.render(field * stain.red, stain.background)
    cut = mosaic_paste.cut_out(rgb, found.outline, stain.background, 0.5, turn=0)
    mosaic_paste.paste(laid, stain, cut, 300, 200)
    assert len(segment.find_white_cells(laid)) == 1
    made = mosaic_fields.prepare_field(laid)
    assert not isinstance(made, str), made
    assert segment.find_white_cells(mosaic_fields.render(made * STAIN.red, STAIN.background)) == []


def test_a_quilt_is_the_fields_pixels_without_visible_seams(field: np.ndarray) -> None:
    rendered = mosaic_fields.render(field * STAIN.red, STAIN.background)
    made = [mosaic_fields.quilt([rendered], 700, np.random.default_rng(3)) for _ in range(2)]
    assert made[0].shape == (700, 700, 3) and np.array_equal(*made)
    edges = [np.abs(np.diff(p.astype(int), axis=0)).sum(-1) for p in (made[0], rendered)]
    assert np.quantile(edges[0], 0.999) <= 1.2 * np.quantile(edges[1], 0.999)
    with pytest.raises(DataError, match="no red-cell field"):
        mosaic_fields.quilt([], 700, np.random.default_rng(0))


def test_density_and_back() -> None:
    rgb = np.random.default_rng(0).integers(0, 200, (40, 50, 3), np.uint8)
    density = mosaic_fields.to_density(rgb, STAIN.background)
    assert np.abs(mosaic_fields.render(density, STAIN.background).astype(int) - rgb).max() <= 1


def test_a_cut_out_is_the_cell_alone_at_scale(neutrophil: tuple[np.ndarray, segment.WhiteCell]) -> None:
    rgb, found = neutrophil
    stain = mosaic_fields.stain_of(rgb)
    assert stain is not None
    cut = mosaic_paste.cut_out(rgb, found.outline, stain.background, 0.5, turn=0)
    rows, columns = np.nonzero(cut.alpha > 0.5)
    assert np.ptp(columns) + 1 == pytest.approx(found.box.width / 2, abs=4)
    assert np.ptp(rows) + 1 == pytest.approx(found.box.height / 2, abs=4)
    assert cut.alpha.max() == 1 and cut.alpha[0].max() == 0 and cut.alpha[:, 0].max() == 0
    turned = mosaic_paste.cut_out(rgb, found.outline, stain.background, 0.5, turn=5)
    assert np.array_equal(turned.alpha, np.rot90(cut.alpha)[:, ::-1])


def test_pasting_changes_the_cells_surroundings_only(
    field: np.ndarray, neutrophil: tuple[np.ndarray, segment.WhiteCell]
) -> None:
    rgb, found = neutrophil
    stain = mosaic_fields.stain_of(rgb)
    assert stain is not None
    before = mosaic_fields.quilt(
        [mosaic_fields.render(field * stain.red, stain.background)], 512, np.random.default_rng(0)
    )
    after = before.copy()
    cut = mosaic_paste.cut_out(rgb, found.outline, stain.background, 0.5, turn=0)
    height, width = cut.alpha.shape
    ((left, top),) = mosaic_paste.places(before, stain, [(width, height)], np.random.default_rng(0))
    box = mosaic_paste.paste(after, stain, cut, left, top)
    changed = np.abs(after.astype(int) - before).sum(-1) > 6
    reach = mosaic_paste.REACH
    changed[max(top - reach, 0) : top + height + reach, max(left - reach, 0) : left + width + reach] = False
    assert not changed.any()
    assert (box.left, box.top) >= (left, top) and box.right <= left + width and box.bottom <= top + height
    small = np.asarray(Image.fromarray(rgb).resize((rgb.shape[1] // 2, rgb.shape[0] // 2), Image.Resampling.LANCZOS))
    here = after[top : top + height, left : left + width][cut.alpha == 1]
    nucleus = np.sort(here.sum(-1))[: len(here) // 4].mean()
    assert nucleus == pytest.approx(np.sort(small.reshape(-1, 3).sum(-1))[: len(here) // 4].mean(), rel=0.1)
    seen = segment.find_white_cells(after)
    assert len(seen) == 1  # the finder of the pipeline sees it, and nothing else
    assert abs(seen[0].box.left - box.left) < 10 and abs(seen[0].box.bottom - box.bottom) < 10


def test_cells_lie_clear_of_each_other_or_it_says_so() -> None:
    empty = np.full((600, 600, 3), STAIN.background, np.uint8)
    spots = mosaic_paste.places(empty, STAIN, [(80, 70)] * 9, np.random.default_rng(0))
    centres = np.array([(x + 40, y + 35) for x, y in spots])
    apart = np.abs(centres[:, None] - centres[None]).max(-1)[~np.eye(9, dtype=bool)]
    assert apart.min() > 80
    with pytest.raises(DataError, match="no room for white cell"):
        mosaic_paste.places(empty, STAIN, [(80, 80)] * 60, np.random.default_rng(0))


def _pools(per_class: int) -> dict[str, list[mosaic_sources.Measured]]:
    return {
        split: [
            mosaic_sources.Measured(SourceCell(f"{split}:{label}:{k}", label), np.zeros((3, 2)), 140, STAIN)
            for label in WHITE_CELL_CLASSES
            for k in range(per_class)
        ]
        for split in ("train", "val", "test")
    }


def test_the_plan_keeps_splits_and_spreads_cells_and_patterns() -> None:
    fields = {split: [Path(f"{split}-{k}") for k in range(5)] for split in ("train", "val", "test")}
    plans = mosaic_plan.plan(_pools(60), fields, slides=100, held_out=30, val=10, seed=0)
    assert Counter(p.split for p in plans) == {"train": 60, "val": 10, "test": 30}
    assert Counter((p.split, p.pattern) for p in plans)["test", "E"] == 6
    for p in plans:
        assert {cell.source.cell_id.split(":")[0] for cell in p.cells} == {p.split}
        assert {path.name.split("-")[0] for path in p.fields} == {p.split}
        assert len({cell.source.cell_id for cell in p.cells}) == len(p.cells) >= 20
    for label in WHITE_CELL_CLASSES:
        used = Counter(
            c.source.cell_id for p in plans if p.split == "train" for c in p.cells if c.source.label == label
        )
        assert max(used.values()) - min(used.values()) <= 1
    again = mosaic_plan.plan(_pools(60), fields, slides=100, held_out=30, val=10, seed=1)
    assert [p.split for p in again] != [p.split for p in plans]
    with pytest.raises(DataError, match="too few usable cells"):
        mosaic_plan.plan(_pools(5), fields, slides=100, held_out=30, val=10, seed=0)


def _little_pbc(shared: Path, root: Path, per_split: int) -> None:
    """So many pictures of each class and split, and nine fields, laid out like the shared data."""
    rows = (shared / "data" / pbc.ANNOTATIONS).read_text().splitlines()
    table = list(csv.DictReader(rows))
    taken: Counter[tuple[str, str]] = Counter()
    (root / pbc.ANNOTATIONS).parent.mkdir(parents=True)
    kept = [rows[0]]
    for line, row in zip(rows[1:], table, strict=True):
        if taken[row["label"], row["split"]] < per_split:
            taken[row["label"], row["split"]] += 1
            kept.append(line)
            target = root / pbc.IMAGES / row["label"] / row["img_name"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(shared / "data" / pbc.IMAGES / row["label"] / row["img_name"])
    (root / pbc.ANNOTATIONS).write_text("\n".join(kept) + "\n")
    (root / mosaic.FIELDS).mkdir(parents=True)
    for name in sorted(path.name for path in (shared / CHULA).glob("*.jpg"))[:14]:
        (root / mosaic.FIELDS / name).symlink_to(shared / CHULA / name)


@pytest.mark.slow
def test_the_whole_job(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slides that OpenSlide opens, truth that agrees with the pixels, byte-equal after an interruption."""
    monkeypatch.setattr(mosaic_plan, "CELLS", (5, 7))
    _little_pbc(shared, tmp_path / "data", per_split=8)
    out = tmp_path / "M"
    job = mosaic.MosaicJob(tmp_path / "data", out, slides=5, held_out=2, side=768)
    mosaic.run(job, say=lambda text: None)
    with (out / "slides.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["split"] for row in rows) == {"train": 2, "val": 1, "test": 2}
    with (out / "background.csv").open() as file:
        assert [row["split"] for row in csv.DictReader(file)] == [r["split"] for r in rows if r["split"] != "train"]
    given = {cell.cell_id: cell.split for cell in pbc.listing(tmp_path / "data").cells}
    for row in rows:
        truth = json.loads((out / "truth" / f"{row['slide_id']}.json").read_text())
        assert truth["counts"] == {label: sum(c["label"] == label for c in truth["cells"]) for label in truth["counts"]}
        assert {given[cell["cell_id"]] for cell in truth["cells"]} == {row["split"]}
        with openslide.OpenSlide(out / row["path"]) as slide:
            assert slide.dimensions == (768, 768) and slide.level_count == 2
            assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(mosaic.MPP)
            pixels = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB")).astype(int)
        if row["split"] == "train":
            continue
        with openslide.OpenSlide(out / "background" / f"{row['slide_id']}.tiff") as slide:
            before = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB")).astype(int)
        different = np.abs(pixels - before).sum(-1)
        for left, top, right, bottom in (cell["box"] for cell in truth["cells"]):
            assert 25 < right - left < 140 and np.median(different[top:bottom, left:right]) > 40
            r = mosaic_paste.REACH + 16  # JPEG blocks
            different[max(top - r, 0) : bottom + r, max(left - r, 0) : right + r] = 0
        assert different.max() <= 30
    first = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (out / "mosaic.json").unlink()
    (out / "truth" / f"{rows[0]['slide_id']}.json").unlink()
    shutil.rmtree(out / "images")
    for row in rows[1:]:
        (out / "truth" / f"{row['slide_id']}.json").unlink()
    mosaic.run(job, say=lambda text: None)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == first
    lines: list[str] = []
    mosaic.run(job, say=lines.append)
    assert lines == [f"up to date: 5 slides under {out}"]


def test_numbers_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves no training slide"):
        mosaic.run(mosaic.MosaicJob(tmp_path, tmp_path / "M", slides=10, held_out=9))
