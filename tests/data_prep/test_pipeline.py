"""The cell job end to end: same content whatever the workers, faults counted, finished work kept, gates that bite."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep import datasets, io, pipeline, probe, split, tokens, units
from data_prep.pipeline import CellJob, run
from data_prep.schema import Box, DataError
from data_prep.sources import SourceCell, bccd, pbc, synthetic
from pbs_jax.cli import main
from tests.data_prep.test_sources import voc


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty synthetic cells as class folders."""
    folder = tmp_path_factory.mktemp("pbc")
    synthetic.write_folders(folder, 10, seed=0)
    return folder


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    assert main(["data", "run", "--source", "pbc", "--root", str(root), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    return shutil.copytree(root, tmp_path / "root")


def quiet(_: str) -> None:
    """Swallows the pipeline's notes."""


def manifests(out: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(out.glob(f"*/{io.VERSION}/*")):
        if path.name != "run.json":
            yield f"{path.parent.parent.name}/{path.name}", path.read_bytes()


def test_datasets_fit_together(made: Path):
    cells = list(datasets.read_cells(made))
    assert len(cells) == 50
    assert {cell.split for cell in cells} == {"train", "val", "test"}
    assert all(cell.caption and len(cell.attributes) == 11 for cell in cells)
    asked = {qa.image_id for qa in datasets.read_questions(made)}
    assert asked == {cell.cell_id for cell in cells}
    tokenizer = tokens.load_tokenizer(made / "tokenizer")
    manifest = io.read_manifest(made / "cell_qa_tokens")
    assert manifest["inputs"]["tokenizer"] == tokenizer.sha256
    assert manifest["inputs"]["cell_qa"] == io.read_manifest(made / "cell_qa")["content_id"]
    packed = [
        id
        for part in manifest["splits"]
        for bin in io.open_dataset(made / "cell_qa_tokens", part)
        for id in bin["qa_ids"]
    ]
    assert sorted(packed) == sorted(qa.id for qa in datasets.read_questions(made))
    assert split.leaks(made) == []
    assert not (made / ".units").exists()
    assert main(["data", "verify", str(made)]) == 0


def test_records_keep_every_field(made: Path):
    cell = next(datasets.read_cells(made, "val"))
    odd = dataclasses.replace(
        cell, color_enhance=1.3, confidence=0.25, bbox=Box(-1, 2, 3, 4), patient_id="p", comments="é"
    )
    assert datasets.record_cell(datasets.cell_record(odd)) == odd
    question = next(qa for qa in datasets.read_questions(made, "val") if qa.options)
    odd_question = dataclasses.replace(
        question, source={"patch_x": 3, "bbox": {"left": 1}}, provenance={"by": "template"}
    )
    assert datasets.record_qa(datasets.qa_record(odd_question)) == odd_question


def test_a_second_run_has_nothing_to_do(made: Path, root: Path, capsys: pytest.CaptureFixture[str]):
    before = dict(manifests(made))
    assert main(["data", "run", "--source", "pbc", "--root", str(root), "--out", str(made)]) == 0
    assert capsys.readouterr().out.count("up to date") == 3
    assert dict(manifests(made)) == before


def test_workers_and_an_interruption_do_not_show(
    made: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipeline, "CELLS_PER_UNIT", 20)
    job = CellJob("pbc", tmp_path / "two", root, workers=2)
    with monkeypatch.context() as patch:
        patch.setattr(split, "assign", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(job, quiet)
    assert len(list(job.out.glob(".units/*/*.array_record"))) == 3
    damaged = next(job.out.glob(".units/*/unit-000001.array_record"))
    damaged.write_bytes(damaged.read_bytes()[:1000])
    cropped = []
    with monkeypatch.context() as patch:
        original = units.crop_cell
        patch.setattr(units, "crop_cell", lambda source, *a: cropped.append(source.cell_id) or original(source, *a))
        run(dataclasses.replace(job, workers=1), quiet)
    assert len(cropped) == 20  # the damaged unit only
    assert dict(manifests(job.out)) == dict(manifests(made))
    assert (job.out / "rejects.jsonl").read_bytes() == (made / "rejects.jsonl").read_bytes()


def test_faults_are_counted_and_the_rest_goes_on(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = copy / pbc.IMAGES
    victim = sorted((folder / "Basophil").iterdir())[0]
    victim.write_bytes(victim.read_bytes()[:300])
    (folder / "Basophil" / "notes.txt").write_text("x")
    (folder / "Blast").mkdir()
    shutil.copy(sorted((folder / "Monocyte").iterdir())[0], folder / "Blast" / "b.png")
    (folder / "Platelet").mkdir()
    out = tmp_path / "out"
    assert main(["data", "run", "--source", "pbc", "--root", str(copy), "--out", str(out)]) == 3
    shown = capsys.readouterr().out
    assert "identity: 53 in = 49 kept + 1 empty folder + 1 not an image file + 1 picture does not decode" in shown
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert len(rejects) == 4
    assert all(reject["detail"] in shown and "\n" not in reject["detail"] for reject in rejects)
    identity = io.read_manifest(out / "cells")["identity"]
    assert identity["in"] == identity["kept"] + sum(identity["rejected"].values()) == 53
    assert main(["data", "run", "--source", "pbc", "--root", str(copy), "--out", str(out)]) == 3  # up to date, still 3
    assert "up to date" in capsys.readouterr().out


def test_changed_input_is_noticed(copy: Path, tmp_path: Path):
    job = CellJob("pbc", tmp_path / "out", copy, limit=20)
    first = run(job, quiet)
    assert not run(job, quiet).fresh
    for cell in pipeline.list_source(job).cells[:1]:
        (copy / cell.path).write_bytes(synthetic.listing(10, seed=9).cells[0].image)
    second = run(job, quiet)
    assert second.fresh
    assert second.content_ids["cells"] != first.content_ids["cells"]
    (job.out / "cells" / io.VERSION / "ids.txt").unlink()
    assert run(job, quiet).fresh  # a damaged result is made again
    assert io.verify(job.out / "cells") == []


def test_boxes_against_the_decoded_picture(root: Path):
    path = pbc.listing(root).cells[0].path  # 256 x 256
    for box, reason in (
        (Box(50, 60, 40, 90), "inverted box"),
        (Box(50, 60, 50, 90), "box without area"),
        (Box(256, 60, 300, 90), "box outside its picture"),
        (Box(-40, 60, 0, 90), "box outside its picture"),
    ):
        with pytest.raises(units.RejectedCell) as caught:
            units.crop_cell(SourceCell("x", "Basophil", path, box=box), root, "reflect", 1.0)
        assert caught.value.reason == reason
    for box, want in ((Box(200, 60, 261, 90), Box(200, 60, 256, 90)), (Box(-5, 0, 20, 30), Box(0, 0, 20, 30))):
        cell, clipped = units.crop_cell(SourceCell("x", "Basophil", path, box=box), root, "reflect", 1.0)
        assert (cell.bbox, clipped) == (want, True)


def test_verify_sees_a_lost_dataset_and_another_tokenizer(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = tmp_path / "job"
    shutil.copytree(made, job)
    assert main(["data", "verify", str(job)]) == 0
    (job / "tokenizer" / "tokenizer.json").write_text("{}")
    assert main(["data", "verify", str(job)]) == 1
    assert "is not the tokenizer that wrote cell_qa_tokens" in capsys.readouterr().err
    shutil.rmtree(job / "cells")
    assert main(["data", "verify", str(job)]) == 1
    assert "cells is not the dataset" in capsys.readouterr().err


def test_bccd_with_the_tokenizer_of_pbc(made: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pictures = [root / cell.path for cell in pbc.listing(root).cells[::6]]
    base = tmp_path / "in" / bccd.FOLDER
    lines = [",Image,Category"]
    for folder in ("JPEGImages", "Annotations"):
        (base / folder).mkdir(parents=True)
    for k, picture in enumerate(pictures):
        shutil.copy(picture, base / "JPEGImages" / f"BloodImage_{k:05d}.png")
        box = {0: (300, 5, 310, 50), 1: (60, 60, 400, 190), 2: ("nan", 5, "inf", 50)}.get(k, (60, 60, 190, 190))
        (base / "Annotations" / f"BloodImage_{k:05d}.xml").write_text(voc(box))
        lines.append(f",{k},{('NEUTROPHIL', 'EOSINOPHIL', 'MONOCYTE')[k % 3]}")
    (base / "labels.csv").write_text("\n".join(lines) + "\n")
    command = ["data", "run", "--source", "bccd", "--root", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert main([*command, "--tokenizer", str(made / "tokenizer")]) == 3
    shown = capsys.readouterr().out
    assert "BloodImage_00000.png: box (300, 5)-(310, 50) lies outside the 256x256 px picture" in shown
    assert "1 boxes reached over" in shown
    assert (
        "BloodImage_00002.png: BloodImage_00002.xml is not readable as VOC boxes (the box (nan, 5.0, inf, 50.0)"
        in shown
    )
    kept = f"{len(pictures)} in = {len(pictures) - 2} kept + 1 box outside its picture + 1 unreadable boxes"
    assert f"identity: {kept}" in shown
    questions = list(datasets.read_questions(tmp_path / "out"))
    assert {(qa.split, qa.domain, qa.task) for qa in questions} == {("test", "ood", "cell_subtyping")}
    copied = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes()
    assert copied == (made / "tokenizer" / "tokenizer.json").read_bytes()


def test_unusable_commands_are_sentences(made: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, message in (
        (["--source", "pbc"], "needs --root"),
        (["--source", "synthetic", "--out", str(made)], "holds the datasets of source pbc"),
        (["--source", "pbc", "--root", str(tmp_path / "no")], "is missing: --root"),
        (["--source", "pbc", "--root", str(root), "--workers", "0"], "--workers is 0"),
        (["--source", "pbc", "--root", str(root), "--bin-length", "20", "--limit", "30"], "bin_length 20"),
        (["--source", "pbc", "--root", str(root), "--tokenizer", str(tmp_path)], "tokenizer.json is missing"),
    ):
        assert main(["data", "run", "--out", str(tmp_path / "out"), *arguments]) == 1
        error = capsys.readouterr().err.strip()
        assert message in error.splitlines()[-1]
    with pytest.raises(SystemExit) as caught:
        main(["data", "run", "--source", "tiff", "--out", str(tmp_path)])
    assert caught.value.code == 2


def test_gates_stop_the_run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = CellJob("pbc", tmp_path / "out", root, limit=25)
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.derived.PROBE_QUESTIONS", 1)
        patch.setattr(probe, "text_probe", lambda *_: {"true_false_logistic": 0.9})
        with pytest.raises(DataError, match=r"true_false_logistic 0\.900"):
            run(job, quiet)
    with monkeypatch.context() as patch:
        patch.setattr(split, "leaks", lambda _: ["a leak"])
        with pytest.raises(DataError, match=r"leak \(1\): a leak"):
            run(job, quiet)
    assert not (job.out / "state.json").exists()
    assert run(job, quiet).fresh


def test_inspect_and_verify(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cell = next(datasets.read_cells(made, "test"))
    image = tmp_path / "crop.jpg"
    assert main(["data", "inspect", str(made), cell.cell_id, "--image", str(image)]) == 0
    assert f"caption: {cell.caption}" in capsys.readouterr().out
    assert image.read_bytes() == cell.image
    assert main(["data", "inspect", str(made), "PBC:none"]) == 1
    assert 'no record "PBC:none"' in capsys.readouterr().err
    broken = shutil.copytree(made, tmp_path / "broken")
    shard = next(broken.glob("cells/*/cells-test*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["data", "verify", str(broken)]) == 1
    assert shard.name in capsys.readouterr().err
    assert main(["data", "verify", str(tmp_path)]) == 1
    assert "no finished dataset" in capsys.readouterr().err
