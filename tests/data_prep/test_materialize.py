"""Released records to datasets: official pixels, files found under other names, everything lost is listed."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep import pyramid, split
from data_prep.datasets import read_cells, read_questions
from data_prep.external_files import FileIndex, NotFound, mask_box
from data_prep.io import open_dataset, read_manifest, verify
from data_prep.materialize import MaterializeJob, run
from data_prep.schema import Box, DataError
from data_prep.slide_datasets import read_patches
from pbs_jax import cli


def quiet(text: str) -> None:
    pass


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def cell_question(number: int, slide: str, x: int, y: int, object_index: int, box: dict[str, int], **changes: Any):
    name = f"{x}_{y}"
    return {
        "id": f"{number:020x}",
        "image_id": f"S-BIAD440:{slide}:{name}:{object_index:04d}",
        "image_path": f"cells/S-BIAD440/{slide}/{name}_{object_index:04d}.png",
        "patch_path": f"patches/S-BIAD440/{slide}/{name}.png",
        "source": {
            "dataset": "S-BIAD440", "path": f"images/{slide}.tiff", "slide_id": slide, "patch_x": x, "patch_y": y,
            "patch_size": 512, "object_index": object_index, "bbox": box,
        },
        "level": "cell", "domain": "id", "split": "train", "task": "morphology", "question_type": "true_false",
        "question": "(True/False) The nucleus is lobed.", "answer": "True",
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def goldens(shared: Path) -> Path:
    return shared / "data" / "goldens"


@pytest.fixture(scope="module")
def golden_job(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[MaterializeJob, list[dict[str, Any]]]:
    """A lossless slide of the three golden patches side by side, and records of its fifteen boxes."""
    root = tmp_path_factory.mktemp("biad")
    items = json.loads((goldens / "cases.json").read_text())["crops"]["items"]
    names = sorted({item["patch"] for item in items})
    slide = Image.new("RGB", (512 * len(names), 512))
    for k, name in enumerate(names):
        slide.paste(Image.open(goldens / name.replace("color1.3", "raw")).convert("RGB"), (512 * k, 0))
    (root / "images").mkdir()
    slide.save(root / "images" / "III_1.tiff")
    records = [
        cell_question(n, "III_1", 512 * names.index(item["patch"]), 0, n, item["bbox"]) for n, item in enumerate(items)
    ]
    file = write_records(root / "cell_train.jsonl", records)
    job = MaterializeJob((file,), {"S-BIAD440": root}, root.parent / "golden_out", bin_length=256)
    run(job, quiet)
    return job, items


def pixels(data: bytes | Path) -> np.ndarray:
    return np.asarray(Image.open(data if isinstance(data, Path) else io.BytesIO(data)).convert("RGB"))


def test_crops_and_patches_are_the_official_ones_pixel_for_pixel(golden_job, goldens: Path):
    job, items = golden_job
    cells = {int(cell.cell_id[-4:]): cell for cell in read_cells(job.out)}
    assert len(cells) == len(items) == 15
    for number, item in enumerate(items):
        np.testing.assert_array_equal(pixels(cells[number].image), pixels(goldens / item["crop"]), err_msg=item["crop"])
    patches = list(read_patches(job.out))
    assert len(patches) == 3 and sum(len(patch.cell_ids) for patch in patches) == 15
    for k, patch in enumerate(sorted(patches, key=lambda patch: patch.x)):
        np.testing.assert_array_equal(pixels(patch.image), pixels(goldens / "crops" / f"field{k}_patch_color1.3.png"))


def test_the_datasets_are_whole_joined_and_say_what_they_are(golden_job):
    job, items = golden_job
    names = [path.name for path in job.out.iterdir() if path.is_dir()]
    assert {"cells", "patches", "cell_qa", "cell_qa_tokens", "tokenizer"} == set(names)
    assert not [problem for name in names if name != "tokenizer" for problem in verify(job.out / name)]
    cell = next(cell for cell in read_cells(job.out) if cell.cell_id.endswith(":512_0:0005"))
    assert (cell.patch_id, cell.slide_id) == ("S-BIAD440:III_1:512_0", "S-BIAD440:III_1")
    assert cell.bbox.left == 512 + items[5]["bbox"]["left"] and cell.color_enhance == 1.3
    assert "white" in cell.geometry
    manifest = read_manifest(job.out / "cells")
    assert manifest["config"]["source"] == "released" and manifest["split"]["level"] == "image"
    assert len(open_dataset(job.out / "cell_qa_tokens", "train")) > 0
    assert not [leak for leak in split.leaks(job.out) if "cell_qa" in leak]
    assert not run(job, quiet).fresh


def test_shards_make_what_one_run_makes(golden_job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With two pictures a unit; a patch is never split."""
    monkeypatch.setattr("data_prep.materialize.PICTURES_PER_UNIT", 2)
    job, _ = golden_job
    sharded = [MaterializeJob(job.records, job.sources, tmp_path, bin_length=256, shard=f"{k}/2") for k in range(2)]
    for part in sharded:
        assert run(part, quiet).content_ids == {} and not (tmp_path / "cells").exists()
    cuts = []
    monkeypatch.setattr("data_prep.materialize_units.read_patch", lambda *_: cuts.append(1))
    whole = run(MaterializeJob(job.records, job.sources, tmp_path, bin_length=256), quiet)
    assert not cuts  # all came from the shards' files
    assert whole.content_ids == {
        name: read_manifest(job.out / name)["content_id"] for name in ("cells", "patches", "cell_qa", "cell_qa_tokens")
    }


def sparse_slide(path: Path, width: int, height: int) -> None:
    """A slide of released size in a few MB: all its tiles are one."""
    buffer = io.BytesIO()
    gradient = np.add.outer(np.arange(256), np.zeros(256)).astype(np.uint8)
    Image.fromarray(np.stack([gradient, gradient.T, gradient], -1)).save(buffer, "JPEG", quality=95, subsampling=0)
    tile = buffer.getvalue()
    count = -(-width // 256) * -(-height // 256)
    with path.open("wb") as file:
        file.write(b"II\x2b\0\x08\0\0\0" + bytes(8) + tile)
        pyramid._write_directory(file, 8, (width, height), 0, ([16] * count, [len(tile)] * count), 0.25)


def test_released_records_on_a_slide_of_released_size(shared: Path, tmp_path: Path):
    """Unchanged records of III_1, at their coordinates of up to 210,000 px, through OpenSlide."""
    released = (shared / "data" / "pbsbench" / "cell_val.jsonl").read_text().splitlines()
    records = [record for line in released if (record := json.loads(line))["source"]["slide_id"] == "III_1"]
    assert len(records) > 10 and max(record["source"]["patch_y"] for record in records) > 60_000
    (tmp_path / "images").mkdir()
    sparse_slide(tmp_path / "images" / "III_1.tiff", 210_432, 109_568)
    file = write_records(tmp_path / "cell_val.jsonl", records)
    outcome = run(MaterializeJob((file,), {"S-BIAD440": tmp_path}, tmp_path / "out"), quiet)
    assert not outcome.rejected and "cell_qa_tokens" not in outcome.content_ids  # nothing to train a tokenizer on
    cells = list(read_cells(tmp_path / "out", "val"))
    assert {cell.cell_id for cell in cells} == {record["image_id"] for record in records}
    assert all(pixels(cell.image).shape == (224, 224, 3) for cell in cells)
    assert sorted(qa.id for qa in read_questions(tmp_path / "out")) == sorted(record["id"] for record in records)


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


APL = "All/All/Patient_25/Signed slides"


def test_released_out_of_domain_pictures(shared: Path, tmp_path: Path):
    """The real file of 1,500 pictures, nine of them at hand: renamed, moved, doubled; the rest is listed as missing."""
    lmu, apl, lisc, masks = (tmp_path / name for name in ("lmu", "apl", "lisc", "masks"))
    picture(lmu / "AML-Cytomorphology" / "NGS" / "NGS_5602.tiff", (10, 20, 30))  # moved one folder down
    picture(apl / APL / "Monocyte" / "MO_6394626.jpg", (40, 50, 60))  # the same name under two folders
    picture(apl / APL / "Lymphocyte" / "MO_6394626.jpg", (40, 50, 60))
    picture(lisc / "train" / "Baso_46-1__8_bmp.rf.0a1b2c.jpg", (70, 80, 90), (80, 60))
    for augmented in ("aa", "bb"):
        picture(lisc / "train" / f"lymp_32-1__9_bmp.rf.{augmented}.jpg", (1, 2, 3))
    mask = np.zeros((60, 80), np.uint8)
    mask[20:40, 30:54], mask[26:32, 36:44], mask[2, 2] = 128, 255, 255  # cytoplasm, nucleus, a slip of the pen
    masks.mkdir()
    Image.fromarray(mask).save(masks / "Baso_46-1__8_expert.bmp")
    sources = {"AML-Cytomorphology_LMU": lmu, "APL": apl, "WBC_LISC": lisc}
    records = shared / "data" / "pbsbench" / "cell_ood_test.jsonl"
    job = MaterializeJob((records,), sources, tmp_path / "out", masks={"WBC_LISC": masks})
    outcome = run(job, quiet)
    cells = {cell.cell_id: cell for cell in read_cells(job.out)}
    labels = {id.partition(":")[2].rpartition("/")[2]: cell.label for id, cell in cells.items()}
    assert labels == {"NGS_5602.tiff": "Neutrophil", "MO_6394626.jpg": "", "Baso_46-1__8.bmp": "Basophil"}
    assert len(cells) == 4  # the doubled one is two pictures of two labels
    assert {cell.color_enhance for cell in cells.values()} == {1.0} and {c.domain for c in cells.values()} == {"ood"}
    assert pixels(cells["AML-Cytomorphology_LMU:NGS/NGS_5602.tiff"].image).shape == (30, 40, 3)  # pixels as they are
    basophil = cells["WBC_LISC:Baso_46-1__8.bmp"]
    assert basophil.bbox == Box(30, 20, 54, 40) and pixels(basophil.image).shape == (224, 224, 3)
    assert {cell.patient_id for cell in cells.values()} == {"APL:Patient_25", ""}  # the path names it, or nobody does
    lost = [json.loads(line) for line in (job.out / "rejects.jsonl").read_text().splitlines()]
    reasons = Counter(reject["reason"] for reject in lost)
    assert reasons["file missing"] == 1495 and reasons["file ambiguous"] == 1
    ambiguous = next(reject for reject in lost if reject["reason"] == "file ambiguous")
    assert "lymp_32-1__9" in ambiguous["id"] and ".rf.aa" in ambiguous["detail"]
    questions = len(list(read_questions(job.out)))
    assert questions + reasons["its cell: file missing"] + reasons["its cell: file ambiguous"] == 4495
    assert outcome.rejected == dict(reasons)


def test_a_path_that_leads_out_of_the_source_is_not_followed(tmp_path: Path):
    picture(tmp_path / "secret.png", (0, 0, 0))
    (tmp_path / "root").mkdir()
    index = FileIndex(tmp_path / "root")
    for path in ("../secret.png", str(tmp_path / "secret.png")):
        with pytest.raises(NotFound, match="leads out"):
            index.find(path)


@pytest.mark.parametrize(
    ("marked", "message"), [([], "marks 0 cells"), ([(0, 9), (20, 29)], "marks 2 cells"), ([(0, 9)], "")]
)
def test_a_mask_must_mark_one_cell(marked: list[tuple[int, int]], message: str):
    mask = np.zeros((30, 30), np.uint8)
    for start, end in marked:
        mask[start:end, 5:15] = 2  # as an index image
    buffer = io.BytesIO()
    Image.fromarray(mask).save(buffer, "PNG")
    if message:
        with pytest.raises(DataError, match=message):
            mask_box(buffer.getvalue(), (30, 30))
    else:
        assert mask_box(buffer.getvalue(), (30, 30)) == Box(5, 0, 15, 9)
    with pytest.raises(DataError, match="30x30 px, its picture 40x30"):
        mask_box(buffer.getvalue(), (40, 30))


BOX = {"left": 100, "top": 100, "right": 160, "bottom": 150}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with one pink slide of 1024 x 512 px."""
    picture(tmp_path / "images" / "III_1.tiff", (230, 200, 210), (1024, 512))
    return tmp_path


def test_every_fault_of_a_record_is_listed_and_the_rest_goes_on(plain: Path):
    flat = BOX | {"right": 100}
    moved = cell_question(4, "III_1", 0, 0, 4, BOX)
    moved["image_id"] = moved["image_id"].replace("0_0", "512_0")
    records = [
        cell_question(0, "III_1", 0, 0, 1, BOX),
        cell_question(1, "III_1", 1024, 0, 1, BOX),
        cell_question(2, "III_1", 0, 0, 2, flat),
        cell_question(3, "VII_9", 0, 0, 1, BOX),
        moved,
        cell_question(5, "III_1", 512, 0, 1, BOX),
        cell_question(7, "III_1", 0, 0, 7, BOX, source={"dataset": "S-BIAD440", "path": "images/III_1.tiff"}),
        cell_question(6, "III_1", 512, 0, 1, BOX, split="test"),
    ]
    args = ["data", "materialize", "--records", str(write_records(plain / "r.jsonl", records))]
    args += ["--source", f"S-BIAD440={plain}", "--out", str(plain / "out")]
    assert cli.main(args) == 3
    rejects = list(map(json.loads, (plain / "out" / "rejects.jsonl").read_text().splitlines()))
    lost = {r["id"]: r["reason"] for r in rejects}
    assert {reason for id, reason in lost.items() if ":" in id} == {
        "unusable patch", "unusable box", "file missing", "unusable source",
    }  # fmt: skip
    assert lost[records[5]["id"]] == "its picture is held out"
    said = [r["detail"] for r in rejects if r["reason"] == "unusable source"]
    assert any(text.endswith("where it lies: the id names another place than the source") for text in said)
    assert any(text.endswith("where it lies: no slide_id") for text in said)
    identity = read_manifest(plain / "out" / "cells")["identity"]
    assert identity["in"] == 7 and identity["kept"] == 2
    assert {cell.split for cell in read_cells(plain / "out")} == {"train", "test"}
    assert {qa.id for qa in read_questions(plain / "out")} == {records[0]["id"], records[-1]["id"]}


def test_captions_join_and_slides_get_a_table(plain: Path):
    cell = cell_question(1, "III_1", 0, 0, 1, BOX)
    caption = {name: cell[name] for name in ("image_id", "image_path", "patch_path", "source", "split")}
    slide = cell | {
        "id": f"{2:020x}", "image_id": "S-BIAD440:III_1", "level": "slide", "task": "diagnosis", "split": "val",
        "source": {"dataset": "S-BIAD440", "path": "images/III_1.tiff", "slide_id": "III_1"},
    }  # fmt: skip
    gone = slide | {
        "id": f"{3:020x}",
        "image_id": "S-BIAD440:X_9",
        "source": slide["source"] | {"path": "images/X_9.tiff"},
    }
    write_records(plain / "cell_captions.jsonl", [caption | {"caption": "A neutrophil."}])
    write_records(plain / "slide_val.jsonl", [slide, gone])
    outcome = run(MaterializeJob((plain,), {"S-BIAD440": plain}, plain / "out"), quiet)
    assert [cell.caption for cell in read_cells(plain / "out")] == ["A neutrophil."]
    assert (plain / "out" / "slides.csv").read_text() == "path,slide_id,split\nimages/III_1.tiff,S-BIAD440:III_1,val\n"
    assert open_dataset(plain / "out" / "slide_qa", "val").ids == [slide["id"]]
    assert outcome.rejected == {"slide missing": 1, "its slide: slide missing": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": {}}, "give --source S-BIAD440=FOLDER"),
        ({"sources": {"S-BIAD440": Path("."), "APL": Path(".")}}, "no record names the data set APL"),
        ({"masks": {"S-BIAD440": Path(".")}}, "masks are for external pictures"),
        ({"shard": "2/2"}, "not i/n"),
        ({"records": (Path("nowhere.jsonl"),)}, "nowhere.jsonl does not exist"),
    ],
)
def test_bad_options_are_sentences(plain: Path, change: dict[str, Any], message: str):
    file = write_records(plain / "r.jsonl", [cell_question(1, "III_1", 0, 0, 1, BOX)])
    given: dict[str, Any] = {"records": (file,), "sources": {"S-BIAD440": plain}, "out": plain / "out"} | change
    with pytest.raises(DataError, match=message):
        run(MaterializeJob(**given), quiet)
