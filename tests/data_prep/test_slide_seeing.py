"""What the user sees of a slide job: report, inspect, plan and doctor."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import doctor
from data_prep.datasets import read_cells
from data_prep.schema import Box
from data_prep.slide_plan import make_plan
from data_prep.slide_report import DOT, dots, kept_grid, qc_map, throughput
from pbs_jax.cli import main


def test_the_report_shows_every_slide_and_warns_first(smears: Path, slide_job: Path, tmp_path: Path) -> None:
    target = tmp_path / "slides.html"
    assert main(["data", "report", str(slide_job), "--root", str(smears), "--out", str(target)]) == 0
    page = target.read_text()
    assert page.count("data:image/jpeg") == 2 * 3 + 12  # three pictures of each slide and its cells
    assert "Slide smear-3-0000" in page and "Slide smear-3-0001" in page and "no differential" in page
    assert "4</td>" in page and "not named" in page and "Not a diagnostic device" in page
    assert "Throughput: 4 tiles in " in page


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (None, "not recorded"),
        ((40, 0, 192, 12.34, 2), "192 tiles in 12.3 s by 2 workers: 15.6 tiles/s"),
        (
            (40, 8, 30, 10.0, 1),
            "30 tiles in 10.0 s by 1 worker: 3.0 tiles/s, after 8 of 40 bands done by an earlier run",
        ),
        ((40, 40, 0, 0.4, 1), "0 tiles in 0.4 s by 1 worker, after 40 of 40 bands done by an earlier run"),
    ],
)
def test_throughput_counts_the_tiles_of_the_last_run_only(
    run: tuple[float, ...] | None, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    if run is not None:
        path.write_text(
            json.dumps(dict(zip(("bands", "bands_done_before", "tiles", "seconds", "workers"), run, strict=True)))
        )
    assert throughput(path) == text


def test_a_job_without_one_of_its_shards_is_not_reported(
    smears: Path, slide_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(slide_job, tmp_path / "out")
    next((out / "patches").rglob("*array_record*")).unlink()
    assert main(["data", "report", str(out), "--root", str(smears)]) == 1
    assert "patches-" in (said := capsys.readouterr().err) and "is missing: copy it again" in said
    assert not (out / "slides.html").exists()


def test_inspect_says_why_a_slide_was_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reject = {"id": "s1", "reason": "0 usable tiles", "detail": "a.tiff: 0 usable tiles of 2 (2 blank): scan it again"}
    (tmp_path / "rejects.jsonl").write_text(json.dumps(reject) + "\n")
    assert main(["data", "inspect", str(tmp_path), "s1"]) == 0
    assert capsys.readouterr().out == f"rejected, {reject['reason']}: {reject['detail']}\n"


def test_maps_colour_tiles_by_their_score_and_outline_the_kept() -> None:
    thumbnail = Image.new("RGB", (100, 50), (200, 200, 200))
    tiles = [{"x": 0, "y": 0, "score": 0.0, "reason": "blank"}, {"x": 512, "y": 0, "score": 1.0, "reason": ""}]
    score = {"size": [1024, 512], "side": 512, "tiles": tiles, "failures": []}
    left, right = (qc_map(thumbnail, score).getpixel((x, 25)) for x in (25, 75))
    assert left[0] > left[2] + 60 and right[2] > right[0] + 60  # red is bad, blue is good
    kept = kept_grid(thumbnail, score)
    assert kept.getpixel((75, 25)) == (200, 200, 200) and kept.getpixel((25, 25))[0] > 230


@pytest.mark.parametrize("number", [1, 30, 1000, 7856, 100_000])
def test_dots_are_seen_and_leave_the_tiles_in_sight(number: int, slide_job: Path) -> None:
    cell = next(iter(read_cells(slide_job)))
    x, y = np.random.default_rng(0).integers(0, (8000, 4000), (number, 2)).T.tolist()
    cells = [dataclasses.replace(cell, bbox=Box(a, b, a + 70, b + 70)) for a, b in zip(x, y, strict=True)]
    drawn = np.asarray(dots(Image.new("RGB", (440, 220), (200, 160, 170)), cells, {"size": [8070, 4070]}), float)
    changed = np.abs(drawn - (200, 160, 170)).max(-1)
    assert 0 < changed.mean() < 20 and changed.max() > 25


def test_a_dot_on_a_dark_nucleus_is_bright(slide_job: Path) -> None:
    cell = dataclasses.replace(next(iter(read_cells(slide_job))), bbox=Box(40, 40, 60, 60))
    assert dots(Image.new("RGB", (100, 100), (40, 0, 80)), [cell], {"size": [100, 100]}).getpixel((50, 50)) == DOT


@pytest.mark.slow
def test_the_plan_is_within_a_factor_of_two(smears: Path, slide_job: Path) -> None:
    plan = make_plan(smears, smears / "slides.csv", 0.5)
    assert (plan.slides, plan.tiles, plan.kept, plan.cells) == (2, 4, 4, 12)
    written = sum(
        path.stat().st_size for name in ("patches", "cells") for path in (slide_job / name).rglob("*array_record*")
    )
    assert 0.5 < plan.gigabytes * 1e9 / written < 2 and plan.cpu_hours > 0


def test_the_doctor_names_what_is_wrong(smears: Path, slide_job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slides"
    folder.mkdir()
    whole = smears / "images" / "smear-3-0000.tiff"
    shutil.copy(whole, folder / "a.tiff")
    shutil.copy(whole, folder / "b.tiff")
    (folder / "cut.tiff").write_bytes(whole.read_bytes()[: whole.stat().st_size * 6 // 10])
    found = [finding.text for finding in doctor.slides(folder, None) if finding.bad]
    assert any(text.startswith("b and a are the same file") for text in found)
    assert any(text.startswith("cut: does not open") for text in found) and len(found) == 2
    assert not [finding.text for finding in doctor.dataset(slide_job) if finding.bad and "GB free" not in finding.text]
    shard = next((slide_job / "patches").rglob("*array_record*"))
    spoilt = shutil.copytree(slide_job, tmp_path / "made")
    path = spoilt / shard.relative_to(slide_job)
    path.write_bytes(path.read_bytes()[:-100])
    assert any("cut short" in finding.text for finding in doctor.dataset(spoilt) if finding.bad)
    assert main(["data", "doctor"]) == 0


@pytest.mark.parametrize("name", ["report", "plan", "doctor", "run", "synth"])
def test_commands_explain_themselves(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["data", name, "--help"])
    assert stop.value.code == 0 and len(capsys.readouterr().out) > 200
