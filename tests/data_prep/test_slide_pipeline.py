"""The slide job end to end: what is in the smears is found, faults are named and counted, nothing depends on workers or
kills."""

from __future__ import annotations

import csv
import io as iolib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy import ndimage

from data_prep import files, io, smear
from data_prep.datasets import read_cells
from data_prep.evaluate import overlap
from data_prep.pyramid import write_pyramid
from data_prep.schema import Box, DataError
from data_prep.slide_datasets import read_patches, read_slides
from data_prep.slide_pipeline import SlideJob, run
from data_prep.slide_units import NATIVE_SCALE
from data_prep.slides import open_slide
from pbs_jax.cli import main
from tests.data_prep.conftest import slide_command
from tests.data_prep.test_pipeline import manifests, quiet


def test_cells_and_patches_are_those_of_the_smears(smears: Path, slide_job: Path) -> None:
    cells, patches = list(read_cells(slide_job)), {patch.patch_id: patch for patch in read_patches(slide_job)}
    slides = list(read_slides(slide_job))
    assert [slide.slide_id for slide in slides] == ["smear-3-0000", "smear-3-0001"]
    for slide in slides:
        truth = json.loads((smears / "truth" / f"{slide.slide_id}.json").read_text())
        own = [cell for cell in cells if cell.slide_id == slide.slide_id]
        assert len(own) == len(truth["cells"]) == slide.details["white_cells"]
        assert all(max(overlap(Box(*true["box"]), cell.bbox) for cell in own) > 0.6 for true in truth["cells"])
        assert (slide.tiles_in, slide.tiles_kept, slide.width, slide.height) == (2, 2, 1024, 512)
        assert (slide.mpp, slide.mpp_source, slide.counts) == (0.18, "nominal", {})
    for cell in cells:
        patch = patches[cell.patch_id]
        assert cell.cell_id in patch.cell_ids and cell.cell_id.startswith(f"{patch.patch_id}:")
        assert patch.patch_id == f"{cell.slide_id}:{patch.x}_{patch.y}" and cell.split == patch.split
        assert patch.x <= (cell.bbox.left + cell.bbox.right) / 2 < patch.x + 512
        assert Image.open(iolib.BytesIO(cell.image)).size == (224, 224)
    assert sum(len(patch.cell_ids) for patch in patches.values()) == len(cells)
    some = next(patch for patch in patches.values() if patch.x)
    with open_slide(smears / "images" / f"{some.slide_id}.tiff") as opened:
        pixels = opened.read(some.x, some.y, 512, 512)
    stored = np.asarray(Image.open(iolib.BytesIO(some.image)))
    assert np.abs(stored.astype(int) - pixels).mean() < 2


def test_a_second_run_finds_nothing_to_do_and_a_changed_table_something(
    smears: Path, slide_job: Path, tmp_path: Path
) -> None:
    job = SlideJob(root=smears, table=smears / "slides.csv", out=slide_job)
    assert not run(job, quiet).fresh
    assert main(["data", "verify", str(slide_job)]) == 0
    text = (smears / "slides.csv").read_text().replace("P3-0000", "P3-0009")
    (tmp_path / "slides.csv").write_text(text)
    out = shutil.copytree(slide_job, tmp_path / "out")
    assert run(SlideJob(root=smears, table=tmp_path / "slides.csv", out=out), quiet).fresh
    assert {slide.patient_id for slide in read_slides(out)} == {"P3-0009", "P3-0001"}


def test_empty_blurred_and_foreign_slides_end_as_rejects(
    smears: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "slides"
    folder.mkdir()
    Image.new("RGB", (1100, 600), (238, 236, 232)).save(folder / "blank.png")
    with open_slide(smears / "images" / "smear-3-0000.tiff") as slide:
        blurred = ndimage.gaussian_filter(slide.read(0, 0, 1024, 512), (6, 6, 0))
    Image.fromarray(blurred).save(folder / "blurred.png")
    shutil.copy(shared / "data/slides/aperio_cmu1/CMU-1-Small-Region.svs", folder / "tissue.svs")
    (folder / "tissue20x.svs").write_bytes((folder / "tissue.svs").read_bytes() + b" ")  # a copy would be told as one
    (folder / "cut.svs").write_bytes((folder / "tissue.svs").read_bytes()[:3000])
    (tmp_path / "slides.csv").write_text(
        "path,mpp\nblank.png,0.25\nblurred.png,0.18\ntissue.svs,0.25\ntissue20x.svs,\ncut.svs,0.25\n"
    )
    out = tmp_path / "out"
    line = ["data", "run", "--source", "slides", "--root", str(folder), "--table", str(tmp_path / "slides.csv")]
    assert main([*line, "--out", str(out)]) == 3
    printed = capsys.readouterr().out
    assert "0 usable tiles: nothing was written" in printed and "slides: 5 in = 0 kept" in printed
    rejects = {r["id"]: r for r in map(json.loads, (out / "rejects.jsonl").read_text().splitlines())}
    assert rejects["blank"]["reason"] == "0 usable tiles" and "2 blank" in rejects["blank"]["detail"]
    assert rejects["blurred"]["reason"] == "0 usable tiles" and "2 out of focus" in rejects["blurred"]["detail"]
    assert rejects["tissue"]["reason"] == "not a blood smear"
    assert rejects["tissue20x"]["reason"] == "not a 40x scan" and "0.499" in rejects["tissue20x"]["detail"]
    assert rejects["cut"]["reason"] == "does not open"
    assert not any((out / name).exists() for name in ("slides", "patches", "cells"))
    assert NATIVE_SCALE[1] < 0.499


def test_a_copy_of_a_slide_is_told_and_left_out(smears: Path, tmp_path: Path) -> None:
    root = shutil.copytree(smears / "images", tmp_path / "root")
    shutil.copy(root / "smear-3-0000.tiff", root / "again.tiff")
    (tmp_path / "t.csv").write_text("path,split\nsmear-3-0000.tiff,train\nagain.tiff,test\n")
    outcome = run(SlideJob(root=root, table=tmp_path / "t.csv", out=tmp_path / "out"), quiet)
    assert outcome.rejected == {"copy of another slide": 1}
    assert [slide.slide_id for slide in read_slides(tmp_path / "out")] == ["again"]
    reject = json.loads((tmp_path / "out" / "rejects.jsonl").read_text())
    assert "smear-3-0000.tiff and again.tiff (slide again) are the same" in reject["detail"]
    pace = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (pace["tiles"], pace["bands"], pace["bands_done_before"]) == (2, 1, 0) and pace["seconds"] > 0


def test_what_was_not_scanned_costs_a_slide_nothing(smears: Path, tmp_path: Path) -> None:
    """White pixels or transparent ones on three quarters of a slide."""
    (tmp_path / "root").mkdir()
    smear = np.asarray(_picture(smears))
    white = np.pad(smear, ((0, 512), (0, 1024), (0, 0)), constant_values=255)
    Image.fromarray(white).save(tmp_path / "root" / "white.png")
    clear = np.pad(np.dstack([smear, np.full_like(smear[..., :1], 255)]), ((0, 512), (0, 1024), (0, 0)))
    Image.fromarray(clear).save(tmp_path / "root" / "clear.png")
    (tmp_path / "t.csv").write_text("path,mpp\nwhite.png,0.18\nclear.png,0.18\n")
    assert not run(SlideJob(root=tmp_path / "root", table=tmp_path / "t.csv", out=tmp_path / "out"), quiet).rejected
    kept = {slide.slide_id: (slide.tiles_kept, slide.details["white_cells"]) for slide in read_slides(tmp_path / "out")}
    assert kept == {"clear": (2, 6), "white": (2, 6)}


def test_two_runs_on_one_output_do_not_mix(smears: Path, slide_job: Path) -> None:
    job = SlideJob(root=smears, table=smears / "slides.csv", out=slide_job)
    with files.alone(slide_job), pytest.raises(DataError, match="another run is writing"):
        run(job, quiet)
    (slide_job / "cells" / "..unit.a.b.tmp").write_bytes(b"half")
    (slide_job / ".units").mkdir()
    assert not run(job, quiet).fresh
    assert not list(slide_job.glob("*/.*")) and not (slide_job / ".units").exists()


@pytest.mark.slow
def test_a_damaged_tile_is_quarantined_and_the_rest_stays(smears: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(smears, tmp_path / "root")
    pixels = np.asarray(_picture(smears))
    path = folder / "images" / "smear-3-0000.tiff"
    wide = np.tile(pixels, (2, 2, 1))  # eight tiles: one of them is less than a fifth
    write_pyramid(path, 2048, 1024, lambda x, y, w, h: wide[y : y + h, x : x + w], mpp=0.18)
    with tifffile.TiffFile(path) as file:
        offset, length = file.pages.first.dataoffsets[0], file.pages.first.databytecounts[0]
    content = bytearray(path.read_bytes())
    content[offset : offset + length] = bytes(length)
    path.write_bytes(content)
    outcome = run(SlideJob(root=folder, table=folder / "slides.csv", out=tmp_path / "out"), quiet)
    assert outcome.rejected == {"tile does not decode": 1}
    identity = io.read_manifest(tmp_path / "out" / "patches")["identity"]
    assert identity == {"in": 10, "kept": 9, "rejected": {"does not decode": 1}}
    assert {slide.slide_id: slide.tiles_kept for slide in read_slides(tmp_path / "out")} == {
        "smear-3-0000": 7,
        "smear-3-0001": 2,
    }


def _picture(smears: Path) -> np.ndarray:
    with open_slide(smears / "images" / "smear-3-0000.tiff") as slide:
        return slide.read(0, 0, 1024, 512)


def test_options_that_cannot_be_used(smears: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"root": None}, "needs --root"),
        ({"workers": 0}, "--workers is 0"),
        ({"threshold": 1.5}, "--qc-threshold"),
        ({"grid_offset": 5}, "--grid-offset is 5"),
        ({"out": smears / "out"}, "lies in --root"),
    ):
        with pytest.raises(DataError, match=words):
            run(SlideJob(**{"root": smears, "table": smears / "slides.csv", "out": tmp_path} | options), quiet)


@pytest.mark.slow
def test_two_workers_write_what_one_writes(smears: Path, slide_job: Path, tmp_path: Path) -> None:
    run(SlideJob(root=smears, table=smears / "slides.csv", out=tmp_path, workers=2), quiet)
    assert dict(manifests(tmp_path)) == dict(manifests(slide_job))


@pytest.mark.slow
def test_killed_at_any_stage_the_next_run_ends_as_an_undisturbed_one(
    smears: Path, slide_job: Path, tmp_path: Path
) -> None:
    line = [sys.executable, "-m", "pbs_jax.cli", *slide_command(smears, tmp_path)]
    draw = random.Random(0)
    wanted = ("*.00000.json", "*/.*/*", "slides/1.0.0/manifest.json")  # a band is done, a dataset begun, all but done
    for pattern in wanted:
        process = subprocess.Popen(line, env=os.environ, stdout=subprocess.DEVNULL)
        while process.poll() is None and not any(tmp_path.rglob(pattern)):
            time.sleep(0.005)
        time.sleep(draw.random() / 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(SlideJob(root=smears, table=smears / "slides.csv", out=tmp_path), quiet).content_ids
    assert dict(manifests(tmp_path)) == dict(manifests(slide_job))


def test_smears_do_not_depend_on_what_is_there(smears: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "smear-3-0000.tiff").write_bytes(b"its truth was never written")
    smear.write_smears(tmp_path, 1, seed=3, width=1024, height=512, cells=6)
    for name in ("images/smear-3-0000.tiff", "truth/smear-3-0000.json"):
        assert (tmp_path / name).read_bytes() == (smears / name).read_bytes()
    with (smears / "slides.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["patient_id"] for row in rows}) == 2 and {row["mpp_source"] for row in rows} == {"nominal"}
