"""Sources: the real folders give the documented counts; every fault is a reject or a sentence, and nothing is lost."""

import csv
import shutil
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from PIL import Image

from data_prep.schema import ATTRIBUTES, Box, DataError
from data_prep.sources import bccd, pbc, synthetic


def test_pbc_as_documented(shared: Path):
    found = pbc.listing(shared / "data")
    assert (len(found.cells), found.rejects, found.notes) == (2900, [], [])
    counts = Counter((cell.label, cell.split) for cell in found.cells)
    assert counts.pop(("Others", "")) == 400
    assert set(counts.values()) == {300, 50, 150}
    assert {len(cell.attributes) for cell in found.cells if cell.label != "Others"} == {len(ATTRIBUTES)}
    assert not any(cell.attributes for cell in found.cells if cell.label == "Others")
    one = next(cell for cell in found.cells if cell.cell_id == "PBC:Basophil/BA_622087")
    assert (one.split, one.attributes["nucleus_shape"], one.attributes["granule_colour"]) == (
        "train",
        "segmented-bilobed",
        "purple",
    )


def test_bccd_agrees_with_the_crops_made_independently(shared: Path):
    found = bccd.listing(shared / "data")
    with (shared / "data/cells/bccd_crops/crops.csv").open() as file:
        rows = {row["image"]: row for row in csv.DictReader(file)}
    assert found.items == 364
    assert len(found.cells) == 341
    for cell in found.cells:
        row = rows[Path(cell.path).stem]
        assert cell.label == row["label"]
        assert cell.box == Box(*(int(row[side]) for side in ("xmin", "ymin", "xmax", "ymax")))
        assert (cell.split, cell.domain) == ("test", "ood")
    assert Counter(reject.reason for reject in found.rejects) == {
        "several subtypes": 15,
        "no white-cell box": 6,
        "several white-cell boxes": 1,
        "no subtype": 1,
    }


@pytest.fixture
def pbc_root(tmp_path: Path) -> Path:
    """Eight pictures in two class folders, annotated."""
    lines = [",".join(("split", "img_name", "label", *ATTRIBUTES))]
    for label in ("Basophil", "Monocyte"):
        folder = tmp_path / pbc.IMAGES / label
        folder.mkdir(parents=True)
        for k in range(4):
            Image.new("RGB", (20, 20), (k, 0, 0)).save(folder / f"x{k}.jpg")
            lines.append(",".join(("train", f"x{k}.jpg", label, *(values[0] for values in ATTRIBUTES.values()))))
    path = tmp_path / pbc.ANNOTATIONS
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines) + "\n")
    return tmp_path


def test_one_name_in_two_folders_is_two_cells(pbc_root: Path):
    found = pbc.listing(pbc_root)
    assert len({cell.cell_id for cell in found.cells}) == found.items == 8
    assert all(cell.attributes for cell in found.cells)


def test_stray_things_in_class_folders(pbc_root: Path):
    folder = pbc_root / pbc.IMAGES
    (folder / "Basophil" / "notes.txt").write_text("x")
    (folder / "Basophil" / "sub").mkdir()
    for hidden in (".DS_Store", "._x0.jpg", "Thumbs.db"):
        (folder / "Basophil" / hidden).write_text("x")
    (folder / "Lymphocyte").mkdir()
    (folder / "monocyte ").mkdir()
    (folder / "README.md").write_text("x")
    for target in ("monocyte /y.jpg", "loose.jpg", "Basophil/X0.JPG", "Basophil/x1.png", "Basophil/cell é.jpg"):
        shutil.copy(folder / "Monocyte" / "x0.jpg", folder / target)
    found = pbc.listing(pbc_root)
    assert {reject.id.removeprefix(f"{pbc.IMAGES}/"): reject.reason for reject in found.rejects} == {
        "Basophil/notes.txt": "not an image file",
        "Basophil/sub": "not an image file",
        "Lymphocyte": "empty folder",
        "monocyte /y.jpg": "unknown label folder",
        "loose.jpg": "no label folder",
        "Basophil/x0.jpg": "id clash",
        "Basophil/x1.png": "id clash",
    }
    assert "did you mean Monocyte?" in next(r.detail for r in found.rejects if r.reason == "unknown label folder")
    assert found.items == 8 + 7 - 0 + 1  # the accented one is kept, without annotation
    assert "PBC:Basophil/cell é" in {cell.cell_id for cell in found.cells}
    assert any(note.startswith("3 hidden") for note in found.notes)


def test_an_accented_name_matches_in_either_unicode_form(pbc_root: Path):
    folder, path = pbc_root / pbc.IMAGES / "Basophil", pbc_root / pbc.ANNOTATIONS
    (folder / "x0.jpg").rename(folder / "cellule\u0301.jpg")
    path.write_text(path.read_text().replace("x0.jpg,Basophil", "cellul\u00e9.jpg,Basophil"))
    found = pbc.listing(pbc_root)
    assert found.notes == []
    cell = next(cell for cell in found.cells if cell.cell_id == "PBC:Basophil/cellul\u00e9")
    assert len(cell.attributes) == 11


def test_annotation_faults(pbc_root: Path):
    path = pbc_root / pbc.ANNOTATIONS
    text = path.read_text()
    path.write_text(text.replace("train,x0.jpg,Basophil,small", "train,x0.jpg,Basophil,tiny"))
    (pbc_root / pbc.IMAGES / "Monocyte" / "x3.jpg").unlink()
    found = pbc.listing(pbc_root)
    assert [(r.reason, "cell_size 'tiny'" in r.detail) for r in found.rejects] == [("unknown annotation value", True)]
    assert found.notes == [f"1 lines of {pbc.ANNOTATIONS} have no picture"]
    path.write_text(text + text.splitlines()[1] + "\n")
    with pytest.raises(DataError, match=r"line 10 repeats the picture x0\.jpg"):
        pbc.listing(pbc_root)
    path.write_text(text.replace("cell_size", "size", 1))
    with pytest.raises(DataError, match="lacks the columns cell_size"):
        pbc.listing(pbc_root)
    path.unlink()
    with pytest.raises(DataError, match="is missing: --root"):
        pbc.listing(pbc_root)


def test_nothing_usable_is_an_error(tmp_path: Path, pbc_root: Path):
    with pytest.raises(DataError, match="is missing: --root"):
        pbc.listing(tmp_path / "elsewhere")
    folder = pbc_root / pbc.IMAGES
    shutil.rmtree(folder)
    (folder / "Basophil").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no usable picture: folder .*Basophil is empty"):
        pbc.listing(pbc_root)


def voc(*boxes: tuple[object, ...], name: str = "WBC") -> str:
    objects = "".join(
        f"<object><name>{name}</name><bndbox>"
        + "".join(f"<{s}>{escape(str(v))}</{s}>" for s, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        + "</bndbox></object>"
        for box in boxes
    )
    return f"<annotation><size><width>0</width><height>0</height></size>{objects}</annotation>"


def bccd_root(root: Path, fields: dict[int, tuple[str, str | None]]) -> Path:
    """`fields`: number -> (subtypes, VOC text or None for no file)."""
    base = root / bccd.FOLDER
    for folder in ("JPEGImages", "Annotations"):
        (base / folder).mkdir(parents=True)
    lines = [",Image,Category"]
    for number, (subtypes, text) in fields.items():
        Image.new("RGB", (64, 48), "white").save(base / "JPEGImages" / f"BloodImage_{number:05d}.jpg")
        lines.append(f',{number},"{subtypes}"')
        if text is not None:
            (base / "Annotations" / f"BloodImage_{number:05d}.xml").write_text(text)
    (base / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def test_bccd_faults_are_told_apart(tmp_path: Path):
    box = (5, 5, 30, 30)
    root = bccd_root(
        tmp_path,
        {
            0: ("NEUTROPHIL", voc(box, box)),  # equal boxes count once
            1: ("eosinophil", voc(("5.0", "5.4", "30", "30"))),
            2: ("NEUTROPHIL", voc(box, (1, 1, 9, 9))),
            3: ("NEUTROPHIL", voc(box, name="RBC")),
            4: ("NEUTROPHIL, EOSINOPHIL", voc(box)),
            5: ("", voc(box)),
            6: ("BLAST", voc(box)),
            7: ("NEUTROPHIL", None),
            8: ("NEUTROPHIL", voc(("a", 1, 2, 3))),
            9: ("NEUTROPHIL", "<annotation>"),
        },
    )
    (root / bccd.FOLDER / "JPEGImages" / "readme.txt").write_text("x")
    found = bccd.listing(root)
    assert [(cell.cell_id, cell.label) for cell in found.cells] == [
        ("BCCD:BloodImage_00000:0", "Neutrophil"),
        ("BCCD:BloodImage_00001:0", "Eosinophil"),
    ]
    assert [reject.reason for reject in found.rejects] == [
        "several white-cell boxes",
        "no white-cell box",
        "several subtypes",
        "no subtype",
        "unknown subtype",
        "no annotation file",
        "unreadable boxes",
        "unreadable boxes",
        "not an image file",
    ]
    assert found.items == 11


def test_synthetic_folders_read_back_like_pbc(tmp_path: Path):
    assert synthetic.write_folders(tmp_path, 10, seed=5) == 50
    read, drawn = pbc.listing(tmp_path), synthetic.listing(10, seed=5)
    assert read.rejects == []
    assert read.notes == []
    key = lambda cell: (cell.label, cell.split, tuple(cell.attributes[name] for name in ATTRIBUTES))  # noqa: E731
    assert Counter(map(key, read.cells)) == Counter(map(key, drawn.cells))
