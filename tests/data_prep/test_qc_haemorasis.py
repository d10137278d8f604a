"""Tiles judged as the paper has it: by the network, or by the scores that Haemorasis left in its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from data_prep import qc_haemorasis
from data_prep.files import sha256_file
from data_prep.schema import Box, DataError
from data_prep.slide_datasets import read_patches, read_slides
from data_prep.slides import open_slide
from pbs_jax.cli import main
from pbs_jax.models.densenet import DenseNet, DenseNetConfig
from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.qc import densenet_table, load_qc
from tests.data_prep.conftest import slide_command

TINY = DenseNetConfig(hidden=5, blocks=(2, 1), growth=4, stem=6)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn network of the real class, imported as a user would."""
    folder = tmp_path_factory.mktemp("qc")
    state = nnx.to_pure_dict(nnx.state(DenseNet(TINY, rngs=nnx.Rngs(0))))
    np.savez(folder / "net.npz", **to_torch(jax.tree.map(np.asarray, state), densenet_table(TINY)))
    assert main(["weights", "import", "qc", str(folder / "net.npz"), "--out", str(folder / "net")]) == 0
    return folder / "net"


def tiles(out: Path, slide_id: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Every tile's fate, as OUT/qc holds it."""
    return {(tile["x"], tile["y"]): tile for tile in json.loads((out / "qc" / f"{slide_id}.json").read_text())["tiles"]}


def test_the_network_decides_on_the_pixels_of_the_tile(
    smears: Path, slide_job: Path, net: Path, tmp_path: Path
) -> None:
    graph, params = load_qc(net)
    forward = jax.jit(lambda pixels: jax.nn.sigmoid(nnx.merge(graph, params)(pixels)))
    good = {}
    for path in sorted((smears / "images").iterdir()):
        with open_slide(path) as slide:
            for x, y in tiles(slide_job, path.stem):
                pixels = slide.read(x, y, 512, 512)[None].astype(np.float32) / 255
                good[path.stem, x, y] = float(forward(pixels)[0])
    low, *_, high = sorted(good.values())
    limit = (low + high) / 2
    main([*slide_command(smears, tmp_path), "--qc-source", str(net), "--qc-threshold", str(limit)])
    kept = {(patch.slide_id, patch.x, patch.y) for patch in read_patches(tmp_path)}
    assert kept == {place for place, probability in good.items() if probability >= limit}
    for (name, x, y), probability in good.items():
        assert tiles(tmp_path, name)[x, y]["score"] == pytest.approx(probability, abs=1e-5)


def test_scores_come_from_the_tools_own_files(smears: Path, slide_job: Path, tmp_path: Path) -> None:
    first, second = (row.slide_id for row in read_slides(slide_job))
    folder = tmp_path / "_quality_control"
    folder.mkdir()
    (folder / first).write_text("2023 loading\nOUT,0,0,1,0.93\nOUT,512,0,0,0.12\n")
    (folder / second).write_text("OUT,0,0,0,0.49\n")
    out = tmp_path / "out"
    assert main([*slide_command(smears, out), "--qc-source", str(folder)]) == 3  # no tile of `second` is usable
    assert [(patch.slide_id, patch.x, patch.qc_score) for patch in read_patches(out)] == [
        (first, 0, pytest.approx(0.93))
    ]
    assert "classical" in json.dumps(tiles(out, first)[0, 0]), "the other score is kept"
    assert tiles(out, second)[512, 0]["reason"] == "no haemorasis score"


def test_a_slide_without_a_file_is_a_reject(smears: Path, slide_job: Path, tmp_path: Path) -> None:
    first = next(iter(read_slides(slide_job))).slide_id
    folder = tmp_path / "_quality_control"
    folder.mkdir()
    (folder / first).write_text("OUT,0,0,1,0.93\n")
    assert main([*slide_command(smears, tmp_path / "out"), "--qc-source", str(folder)]) == 3
    assert "has no file of slide" in (tmp_path / "out" / "rejects.jsonl").read_text()


@pytest.mark.parametrize(("text", "said"), [("OUT,0,x,1,0.9\n", r":1 is not OUT"), ("nothing\n", "holds no line")])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s").write_text(text)
    with pytest.raises(DataError, match=said):
        qc_haemorasis.scorer(tmp_path, "s")(Box(0, 0, 512, 512), np.zeros((512, 512, 3), np.uint8))


@pytest.mark.parametrize(
    ("slide_id", "file"),
    [
        ("s", "s"), ("s", "s.txt"), ("a.b", "a.b"), ("a.b", "a.b.txt"), ("a/1", "a/1"), ("a/1", "a/1.csv"),
        ("a/1", "1"), ("a/b.c", "b.c.txt"),
    ],
)  # fmt: skip
def test_the_file_of_a_slide_is_found(slide_id: str, file: str, tmp_path: Path) -> None:
    for name in (file, "other"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("OUT,0,0,1,0.9\n")
    assert qc_haemorasis.file_of(tmp_path, slide_id) == tmp_path / file


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("1.txt", "1.csv"), "has several files of slide a/1: 1.csv, 1.txt; leave one"),
        (("b/1",), "has no file of slide a/1: it holds b/1"),  # another slide's
    ],
)
def test_a_file_is_not_guessed(files: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("OUT,0,0,1,0.9\n")
    with pytest.raises(DataError, match=said):
        qc_haemorasis.file_of(tmp_path, "a/1")


def test_one_file_does_not_score_two_slides(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("OUT,0,0,1,0.9\n")
    qc_haemorasis.refuse_shared(tmp_path, ["a/1", "c"])
    with pytest.raises(DataError, match="may be of slide a/1 or b/1"):
        qc_haemorasis.refuse_shared(tmp_path, ["a/1", "b/1"])


def test_other_scores_are_another_job(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("OUT,0,0,1,0.9\n")
    before = qc_haemorasis.source_sha256(tmp_path)
    assert before == sha256_file(tmp_path / "s")
    (tmp_path / "s").write_text("OUT,0,0,1,0.8\n")
    assert qc_haemorasis.source_sha256(tmp_path) != before
    with pytest.raises(DataError, match="neither the --out of"):
        qc_haemorasis.source_sha256(tmp_path / "none")
