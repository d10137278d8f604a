"""Rehearsal of the released data without them: three mosaics named as slides of S-BIAD440, their released questions, and
every command from that folder to the answers of phase 4. Questions are about other slides: nothing here says how good
the answers are. Phase 0 and an untrained phase 1 come from drawn cells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep import mosaic, mosaic_plan
from data_prep.caption import cell_caption
from data_prep.datasets import read_cells
from data_prep.io import open_dataset, read_manifest
from data_prep.schema import Box, Cell
from data_prep.slide_datasets import read_patches
from pbs_jax import cli
from pbs_jax.bench.records import load_predictions
from pbs_jax.train import loop
from tests.data_prep.test_mosaic import _little_pbc
from tests.launch.test_path import path_commands
from tests.train.conftest import one_device, small_config

SLIDES = {"train": ("III_1", "slide_train"), "val": ("III_15", "slide_val"), "test": ("III_14", "slide_id_test")}
CELLS = {"val": "cell_val", "test": "cell_id_test"}  # cell_train is not at hand


def released(shared: Path, name: str, slide: str) -> list[dict[str, Any]]:
    lines = (shared / "data" / "pbsbench" / f"{name}.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["source"]["slide_id"] == slide]


def places(truth: dict[str, Any], slide: str) -> list[dict[str, Any]]:
    """Image id, source and caption of the truth's cells that lie in one patch, as the release writes them."""
    found = []
    for number, cell in enumerate(truth["cells"]):
        box = Box(*cell["box"])
        x, y = box.left // 512 * 512, box.top // 512 * 512
        if box.right <= x + 512 and box.bottom <= y + 512:
            inner = {"left": box.left - x, "top": box.top - y, "right": box.right - x, "bottom": box.bottom - y}
            source = {
                "dataset": "S-BIAD440", "path": f"images/{slide}.tiff", "slide_id": slide, "patch_x": x, "patch_y": y,
                "patch_size": 512, "object_index": number, "bbox": inner,
            }  # fmt: skip
            text = cell_caption(Cell("", "train", cell["label"], "human", b"", attributes=cell["attributes"]))
            found.append({"image_id": f"S-BIAD440:{slide}:{x}_{y}:{number:04d}", "source": source, "caption": text})
    return found


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def biad(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """images/III_1.tiff, III_15, III_14 and records/*.jsonl: slide records as released, cell records moved to cells that
    are there."""
    monkeypatch.setattr(mosaic_plan, "CELLS", (6, 8))
    _little_pbc(shared, tmp_path / "pbc", per_split=8)
    made, root = tmp_path / "M", tmp_path / "S-BIAD440"
    mosaic.run(mosaic.MosaicJob(tmp_path / "pbc", made, slides=3, held_out=1, side=1024), say=lambda text: None)
    (root / "images").mkdir(parents=True)
    captions: list[dict[str, Any]] = []
    for (split, (slide, questions)), tiff in zip(SLIDES.items(), sorted((made / "images").iterdir()), strict=True):
        shutil.move(tiff, root / "images" / f"{slide}.tiff")
        write(root / "records" / f"{questions}.jsonl", released(shared, questions, slide))
        found = places(json.loads((made / "truth" / f"{tiff.stem}.json").read_text()), slide)
        captions += [place | {"split": split} for place in found]
        if name := CELLS.get(split):
            asked = released(shared, name, slide)[: 2 * len(found)]
            moved = [qa | {k: found[n % len(found)][k] for k in ("image_id", "source")} for n, qa in enumerate(asked)]
            write(root / "records" / f"{name}.jsonl", moved)
    write(root / "records" / "cell_captions.jsonl", captions)
    return root


def run_line(words: list[str]) -> None:
    """A command as documented; trainings are a few steps long, on one device."""
    if words[0] != "train":
        assert cli.main(words) == 0, words
        return
    given = dict(word.split("=", 1) for word in words[1:])
    name, workdir, root = (given.pop(key) for key in ("--config", "--workdir", "--config.data.root"))
    changes = {key.removeprefix("--config.").replace(".", "__"): value for key, value in given.items()}
    loop.train(small_config(name, Path(root), batch_size=2, **changes), Path(workdir), one_device())


@pytest.mark.slow
def test_from_the_folder_to_phase_4(
    biad: Path, drawn: Path, phases: dict[str, Path], repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lines of launch/README.md, from the folder that they name."""
    monkeypatch.chdir(tmp_path)
    Path("cells").symlink_to(drawn)
    Path("runs").mkdir()
    for name, phase in (("backbone", "backbone"), ("1", "qformer"), ("lm", "language_model")):
        (Path("runs") / name).symlink_to(phases[phase])
    for words in path_commands(repo, "From the released data to phase 4"):
        run_line(words)

    data, slides, questions = Path("released"), Path("wsi"), Path("released/slide_qa")
    cells, patches = list(read_cells(data)), list(read_patches(data))
    assert {cell.split for cell in cells} == {"train", "val", "test"} and all(cell.caption for cell in cells)
    assert {cell.patch_id for cell in cells} == {patch.patch_id for patch in patches}
    ids = {split: f"S-BIAD440:{slide}" for split, (slide, _) in SLIDES.items()}
    for split, id in ids.items():
        assert open_dataset(slides / "slides", split).ids == [id]
        assert {record["image_id"] for record in open_dataset(data / "slide_qa_tokens", split)} == {id}
    answered = {prediction.qa.id for prediction in load_predictions(Path("bench/released/predictions.jsonl"))}
    assert answered == set(open_dataset(questions, "test").ids)
    assert read_manifest(data / "cells")["details"]["slides_in_several_splits"] == 0
