"""slides.csv: what is wrong with it is said with file, line and column, before any pixel is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.schema import DataError
from data_prep.slide_readers import files_of
from data_prep.slide_table import load, split_level


def make(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return root


def table(root: Path, text: str) -> Path:
    path = root / "slides.csv"
    path.write_text(text, encoding="utf-8-sig")
    return path


@pytest.mark.parametrize(
    "text, words",
    [
        ("path,patient\na.svs,1\n", 'unknown column "patient".*did you mean patient_id'),
        ("patient_id\n1\n", "no column path"),
        ("path\nb.svs\n", "line 2: b.svs is not a file"),
        ("path,mpp\na.svs,quarter\n", 'line 2: mpp "quarter"'),
        ("path,split\na.svs,dev\n", 'split "dev" is not one of'),
        ("path,slide_id\na.svs,S\nd/a.svs,s\n", 'both get the slide_id "s"'),
        ("path,patient_id,split\na.svs,P1,train\nd/a.svs, P1,test\n", "patient P1 has slides in train .* and test"),
        ("path,site\na.svs\n", "line 2 has 1 values for 2 columns"),
        ("path\n../a.svs\n", "not a file|leaves the root"),
        ("path\n", "names no slide"),
    ],
)
def test_a_table_that_cannot_be_used_names_the_place(tmp_path: Path, text: str, words: str) -> None:
    root = make(tmp_path / "root", "a.svs", "d/a.svs")
    make(tmp_path, "a.svs")
    with pytest.raises(DataError, match=words):
        load(root, table(tmp_path, text))


def test_a_dicom_series_is_one_slide(shared: Path) -> None:
    rows = load(shared / "data" / "slides" / "openslide_python_fixtures", None)
    assert [row.path for row in rows if row.path.endswith(".dcm")] == ["boxes_0.dcm"]
    assert [path.name for path in files_of(shared / "data/slides/openslide_python_fixtures/boxes_1.dcm")] == [
        "boxes_0.dcm",
        "boxes_1.dcm",
    ]


def test_two_slides_of_a_patient_share_a_split_and_given_splits_stay(tmp_path: Path) -> None:
    names = [f"{k:02d}.svs" for k in range(80)]
    root = make(tmp_path / "root", *names)
    lines = [f"{name},P{k // 2},{'test' if k == 5 else ''}\n" for k, name in enumerate(names)]
    rows = load(root, table(tmp_path, "path,patient_id,split\n" + "".join(lines)))
    by_patient: dict[str, set[str]] = {}
    for row in rows:
        by_patient.setdefault(row.patient_id, set()).add(row.split)
    assert all(len(splits) == 1 for splits in by_patient.values()) and by_patient["P2"] == {"test"}
    assert {row.split for row in rows} == {"train", "val", "test"} and split_level(rows) == "patient"
    more = load(make(root, "zz.svs"), table(tmp_path, "path,patient_id,split\n" + "".join(lines) + "zz.svs,P99,\n"))
    assert [row for row in more if row.patient_id != "P99"] == rows  # appended slides move nothing


def test_without_a_table_files_are_found_and_companions_are_not_slides(tmp_path: Path) -> None:
    root = make(tmp_path, "a/1.svs", "b/1.svs", "x.mrxs", "x/Dat_1.tif", ".hidden/1.svs", "b/._1.svs", "note.txt")
    rows = load(root, None)
    assert [row.slide_id for row in rows] == ["a/1", "b/1", "x"] and split_level(rows) == "slide"
