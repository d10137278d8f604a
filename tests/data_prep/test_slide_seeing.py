"""What the user sees of a slide job: report, plan and doctor."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from data_prep import doctor
from data_prep.slide_plan import make_plan
from data_prep.slide_report import kept_grid, qc_map
from pbs_jax.cli import main


def test_the_report_shows_every_slide_and_warns_first(smears: Path, slide_job: Path, tmp_path: Path) -> None:
    target = tmp_path / "slides.html"
    assert main(["data", "report", str(slide_job), "--root", str(smears), "--out", str(target)]) == 0
    page = target.read_text()
    assert page.count("data:image/jpeg") == 2 * 3 + 12  # three pictures of each slide and its cells
    assert "Slide smear-3-0000" in page and "Slide smear-3-0001" in page and "no differential" in page
    assert "4</td>" in page and "not named" in page and "Not a diagnostic device" in page


def test_maps_colour_tiles_by_their_score_and_outline_the_kept() -> None:
    thumbnail = Image.new("RGB", (100, 50), (200, 200, 200))
    tiles = [{"x": 0, "y": 0, "score": 0.0, "reason": "blank"}, {"x": 512, "y": 0, "score": 1.0, "reason": ""}]
    score = {"size": [1024, 512], "side": 512, "tiles": tiles, "failures": []}
    left, right = (qc_map(thumbnail, score).getpixel((x, 25)) for x in (25, 75))
    assert left[0] > left[2] + 60 and right[2] > right[0] + 60  # red is bad, blue is good
    kept = kept_grid(thumbnail, score)
    assert kept.getpixel((75, 25)) == (200, 200, 200) and kept.getpixel((25, 25))[0] > 230


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
