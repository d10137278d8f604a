"""LMU, APL and LISC in their publishers' layouts, with made pictures: labels by Table 7, boxes by masks, faults named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.datasets import read_cells
from data_prep.pipeline import CellJob, run
from data_prep.schema import OTHERS, Box, DataError
from data_prep.sources import external


def picture(path: Path, number: int = 0, size: tuple[int, int] = (120, 100)) -> None:
    """A pale picture with one dark disc of 40 px in the middle, no two alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[: size[1], : size[0]]
    pixels = np.full((size[1], size[0], 3), (225, 205, 215), np.uint8)
    pixels[(x - size[0] // 2) ** 2 + (y - size[1] // 2) ** 2 < 400] = (90 + 5 * number, 40, 150)
    Image.fromarray(pixels).save(path)


def test_lmu_folders_are_types(tmp_path: Path) -> None:
    for code in ("NGS", "LYA", "MYO", "EBO"):
        picture(tmp_path / "AML-Cytomorphology" / code / f"{code}_0001.tiff")
    (tmp_path / "annotations.dat").write_text("no picture")
    picture(tmp_path / "AML-Cytomorphology" / "XYZ" / "XYZ_0001.tiff")
    found = external.listing(tmp_path, "lmu")
    labels = {cell.cell_id: (cell.label, cell.comments) for cell in found.cells}
    assert labels == {
        "AML-Cytomorphology_LMU:NGS/NGS_0001.tiff": ("Neutrophil", "segmented"),
        "AML-Cytomorphology_LMU:LYA/LYA_0001.tiff": ("Lymphocyte", "atypical"),
        "AML-Cytomorphology_LMU:MYO/MYO_0001.tiff": (OTHERS, "myeloblast"),
        "AML-Cytomorphology_LMU:EBO/EBO_0001.tiff": (OTHERS, "Erythroblast"),
    }
    assert {(cell.split, cell.domain, cell.box) for cell in found.cells} == {("test", "ood", None)}
    assert [reject.reason for reject in found.rejects] == ["unknown label folder"]


def test_apl_ids_are_the_releases_and_patients_are_kept(tmp_path: Path) -> None:
    tail = "Patient_16/Signed slides/Lymphocyte, variant/VLY_8779340.jpg"
    picture(tmp_path / "All" / tail)
    picture(tmp_path / "All" / "Patient_16/Signed slides/Promyelocyte/PMY_1.jpg")
    found = {cell.cell_id: cell for cell in external.listing(tmp_path, "apl").cells}
    cell = found[f"APL:All/All/{tail}"]
    assert (cell.label, cell.patient_id) == ("Lymphocyte", "APL:Patient_16")
    assert Counter(cell.label for cell in found.values()) == {"Lymphocyte": 1, OTHERS: 1}


@pytest.fixture
def lisc(tmp_path: Path) -> Path:
    for number, name in enumerate(("Baso/1", "neut/1", "neut/2", "mixt/1")):
        picture(tmp_path / "Main Dataset" / f"{name}.bmp", number)
        mask = np.zeros((100, 120), np.uint8)
        mask[30:70, 40:80] = 128
        if name == "neut/2":
            mask[:20, :20] = 128
        folder, _, stem = name.partition("/")
        file = tmp_path / external.MASKS / folder / "areaforexpert1" / f"{stem}_expert.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(file)
    return tmp_path


def test_lisc_cells_lie_where_the_expert_marked_them(lisc: Path) -> None:
    found = external.listing(lisc, "lisc")
    assert {cell.cell_id: (cell.label, cell.box) for cell in found.cells} == {
        "WBC_LISC:Baso/1.bmp": ("Basophil", Box(40, 30, 80, 70)),
        "WBC_LISC:neut/1.bmp": ("Neutrophil", Box(40, 30, 80, 70)),
    }
    assert {reject.id: reject.reason for reject in found.rejects} == {
        "Main Dataset/mixt/1.bmp": "several subtypes", "Main Dataset/neut/2.bmp": "no usable mask",
    }  # fmt: skip


def test_a_wrong_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        external.listing(tmp_path / "none", "lmu")
    with pytest.raises(DataError, match="holds no usable picture of APL: it is empty"):
        external.listing(tmp_path, "apl")


@pytest.mark.slow
def test_the_cell_job_makes_out_of_domain_cells(lisc: Path, tmp_path: Path) -> None:
    outcome = run(CellJob("lisc", tmp_path / "out", root=lisc), say=lambda line: None)
    cells = list(read_cells(tmp_path / "out"))
    assert {(cell.label, cell.domain, cell.split) for cell in cells} == {
        ("Basophil", "ood", "test"), ("Neutrophil", "ood", "test"),
    }  # fmt: skip
    assert outcome.rejected == {"several subtypes": 1, "no usable mask": 1}
