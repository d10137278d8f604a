"""Review sheets: a fair and repeatable sample, verdicts back by id, acceptance with its interval."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from data_prep import io, review
from data_prep.schema import DataError
from data_prep.slide_datasets import PATCH_FEATURES, Patch, patch_id, patch_record
from data_prep.stats import wilson
from pbs_jax import cli
from tests.data_prep.cell_job import picture, write_job


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty cells with pictures, captions and questions."""
    out = tmp_path_factory.mktemp("review")
    write_job(out, 6)
    return out


def test_strata_are_even_and_the_sample_is_repeatable(root: Path) -> None:
    items = review.caption_items(root)
    chosen = review.sample(items, 20, seed=3)
    assert Counter(item.stratum for item in chosen) == dict.fromkeys(Counter(i.stratum for i in items), 4)
    assert chosen == review.sample(list(reversed(items)), 20, seed=3) != review.sample(items, 20, seed=4)


def test_small_strata_are_taken_whole() -> None:
    items = [review.Item(f"{k}", "rare" if k < 3 else "common", "", "") for k in range(100)]
    assert Counter(item.stratum for item in review.sample(items, 20, 0)) == {"rare": 3, "common": 17}


@pytest.mark.parametrize("kind", review.KINDS)
def test_the_sheet_has_a_row_and_a_picture_for_each(root: Path, tmp_path: Path, kind: str) -> None:
    args = ["data", "review", "--root", str(root), "--out", str(tmp_path), "--kind", kind, "--count", "15"]
    assert cli.main(args) == 0
    with (tmp_path / review.SHEET).open(newline="") as file:
        rows = list(csv.DictReader(file))
    page = (tmp_path / review.PAGE).read_text()
    assert len(rows) == 15 and not any(row["verdict"] for row in rows)
    assert page.count("data:image/jpeg") == 15 and all(row["id"] in page for row in rows)


def test_slides_are_reviewed_beside_their_fullest_patch(tmp_path: Path) -> None:
    """Captions of slides from captions.jsonl, the picture from another job's patches."""
    line = {"image_id": "S1", "caption": "No diagnosis is recorded."}
    (tmp_path / review.CAPTIONS).write_text(json.dumps(line) + "\n")
    patches = [
        Patch(patch_id("S1", x, 0), "S1", "train", x, 0, 1.0, picture(), tuple(f"c{k}" for k in range(x // 512)))
        for x in (0, 1024, 512)
    ]
    records = map(patch_record, patches)
    io.write_dataset(tmp_path / "job", "patches", PATCH_FEATURES, records, id_feature="patch_id", config={}, inputs={},
                     records_in=3, split_level="slide")  # fmt: skip
    chosen = review.write_sheet(tmp_path, tmp_path / "sheet", "captions", seen=tmp_path / "job")
    assert [(item.id, item.stratum, item.text) for item in chosen] == [("S1", "slides", line["caption"])]
    assert (tmp_path / "sheet" / review.PAGE).read_text().count("data:image/jpeg") == 1


def test_verdicts_come_back_with_a_wilson_interval(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = review.write_sheet(root, tmp_path, "captions", 20)
    sheet = tmp_path / review.SHEET
    with sheet.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for k, row in enumerate(rows):
        row["verdict"] = "reject" if k in (0, 5) else "unsure" if k == 1 else "Accept "
        row["reason"] = "not seen" if k == 0 else ""
    with sheet.open("w", newline="", encoding="utf-8-sig") as file:  # as spreadsheets save it
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(reversed(rows))
    whole = review.acceptance(sheet)[0]
    assert (whole.accepted, whole.rejected, whole.unsure) == (17, 2, 1)
    assert (whole.low, whole.high) == wilson(17, 19)
    assert review.rejected_ids(sheet) == {chosen[0].id: "not seen", chosen[5].id: ""}
    assert cli.main(["data", "review", "--verdicts", str(sheet)]) == 0
    assert "0.895" in capsys.readouterr().out
    with pytest.raises(DataError, match="holds verdicts"):
        review.write_sheet(root, tmp_path, "captions", 20)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("id,stratum,verdict,reason\n1,a,fine,\n", 'verdict "fine" is none of'),
        ("id,stratum,verdict,reason\n1,a,accept,\n1,a,reject,\n", "a second time"),
        ("id,stratum,verdict,reason\n1,a,,\n", "no verdict yet"),
        ("id,verdict\n1,accept\n", "lacks the column stratum, reason"),
    ],
)
def test_a_bad_sheet_is_named(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "v.csv").write_text(content)
    with pytest.raises(DataError, match=problem):
        review.acceptance(tmp_path / "v.csv")
