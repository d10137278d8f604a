"""What an export writes: the official key sets, the same bytes each time, and nothing half-done or silently wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file

from data_prep.schema import QA, DataError
from pbs_jax import cli
from pbs_jax.bench import remarks, score
from pbs_jax.models.alignment import Alignment
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverResampler
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.sizes import get_size
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.export import export, phase_tables
from pbs_jax.weights.files import read_card, seen_by_backbone, write_safetensors
from pbs_jax.weights.importers import DINOBLOOM_SAW
from tests.models.golden import Golden
from tests.weights.conftest import Chain

GOLDEN = QFormerConfig(
    dim=48, layers=4, heads=4, ffn_dim=96, vocab=101, max_positions=40, encoder_width=40, queries=8, projection=20,
    pad_id=0, cls_id=1, dec_id=100,
)  # fmt: skip


def shapes_of(phase: str, config: QFormerConfig, lm_dim: int) -> dict[str, tuple[int, ...]]:
    """torch name -> shape of a phase's model.safetensors at any size; bools stand for the weights."""
    size = dataclasses.replace(get_size("nano"), qformer=config)
    size = dataclasses.replace(size, vit=dataclasses.replace(size.vit, dim=config.encoder_width))
    modules = {
        "qformer": lambda: QFormer(config, rngs=nnx.Rngs(0)),
        "projector": lambda: Projector(config.dim, lm_dim, rngs=nnx.Rngs(0)),
        "patch_perceiver": lambda: PerceiverResampler(size.patch_perceiver, rngs=nnx.Rngs(0)),
        "slide_perceiver": lambda: PerceiverResampler(size.slide_perceiver(config.dim), rngs=nnx.Rngs(0)),
        "alignment": lambda: Alignment(config.dim, size.patch_perceiver.dim, config.projection, rngs=nnx.Rngs(0)),
    }
    found = {}
    for name, table in phase_tables(phase, size).items():
        state = nnx.to_pure_dict(nnx.state(nnx.eval_shape(modules[name])))
        leaves = {"/".join(path): np.zeros(leaf.shape, bool) for path, leaf in flatten_dict(state).items()}
        found |= {key: value.shape for key, value in to_torch(leaves, table).items()}
    return found


def test_phases_1_and_3_have_the_official_keys(shared: Path) -> None:
    weights = Golden(shared, "qformer").w
    official = {name: value.shape for name, value in weights.items() if not name.endswith("position_ids")}
    assert shapes_of("cell_representation", GOLDEN, 64) == official
    third = {f"model.visual.encoder.{name}": shape for name, shape in official.items()}
    projector = {"model.visual.projector.weight": (64, 48), "model.visual.projector.bias": (64,)}
    assert shapes_of("cell_qa", GOLDEN, 64) == third | projector


@pytest.mark.parametrize(
    ("phase", "tensors", "parameters"),
    [
        ("cell_representation", 345, 206_637_945),
        ("cell_patch_alignment", 37, 15_385_856),
        ("cell_qa", 347, 209_394_041),
        ("slide_qa", 35, 17_551_616),
    ],
)
def test_full_size_counts_are_the_official_ones(phase: str, tensors: int, parameters: int) -> None:
    found = shapes_of(phase, QFormerConfig.blip2(), 3584)
    assert (len(found), sum(int(np.prod(shape)) for shape in found.values())) == (tensors, parameters)


def test_phases_2_and_4_have_the_official_keys(shared: Path) -> None:
    """The resampler's names are those of the golden files, under each phase's prefix; phase 2 has two projections."""
    names = set(Golden(shared, "perceiver_cell").w)
    slide = {f"model.visual.encoder.resampler.{name}" for name in names}
    projector = {f"model.visual.projector.{kind}" for kind in ("weight", "bias")}
    assert set(shapes_of("slide_qa", GOLDEN, 64)) == slide | projector
    sides = {f"{side}_projection.{kind}" for side in ("cell", "patch") for kind in ("weight", "bias")}
    patch = {f"patch_encoder.resampler.{name}" for name in names}
    assert set(shapes_of("cell_patch_alignment", GOLDEN, 64)) == patch | sides


@pytest.mark.parametrize(
    "phase", ["backbone", "language_model", "cell_representation", "cell_patch_alignment", "cell_qa", "slide_qa"]
)
def test_every_phase_is_exported_whole_and_alike_each_time(chain: Chain, tmp_path: Path, phase: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert cli.main(["weights", "export", "--workdir", str(chain.runs[phase]), "--out", str(one)]) == 0
    two.mkdir()
    (two / "frozen.safetensors").write_bytes(b"of an earlier export")
    export(chain.runs[phase], two)
    names = {path.name for path in one.iterdir()}
    assert names == {path.name for path in two.iterdir()}
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)
    assert ("frozen.safetensors" in names) == (phase in ("cell_qa", "slide_qa"))

    assert f"- phase: {phase}" in (one / "CARD.md").read_text()
    card = read_card(one)
    assert (card["phase"], card["step"], card["facts"]["datasets"]) == (phase, 7, {"cells": "c"})
    assert card["trees"] == {name: tree_sha256(chain.params[name]) for name in card["trees"]}
    tensors = load_file(one / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {np.dtype("float32")}
    with safe_open(one / "model.safetensors", "numpy") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt" and json.loads(metadata["facts"]) == card["facts"]
    prefixes = {
        "backbone": ("blocks.", "stem.", "cls_token", "pos_embed", "norm.", "head."),
        "language_model": ("model.embed_tokens.", "model.layers.", "model.norm."),
        "cell_representation": ("qformer.",),
        "cell_patch_alignment": ("patch_encoder.resampler.", "cell_projection.", "patch_projection."),
        "cell_qa": ("model.visual.encoder.qformer.", "model.visual.projector."),
        "slide_qa": ("model.visual.encoder.resampler.", "model.visual.projector."),
    }[phase]
    assert all(name.startswith(prefixes) for name in tensors)


def test_values_arrive_under_their_names(chain: Chain, tmp_path: Path) -> None:
    export(chain.runs["cell_qa"], tmp_path)
    model, frozen = (load_file(tmp_path / f"{name}.safetensors") for name in ("model", "frozen"))
    cases: list[tuple[np.ndarray, Any]] = [
        (model["model.visual.projector.weight"], chain.params["projector"]["linear"]["kernel"].T),
        (
            model["model.visual.encoder.qformer.Qformer.bert.encoder.layer.1.attention.self.key.weight"],
            chain.params["qformer"]["layers"]["attention"]["key"]["kernel"][1].T,
        ),
        (frozen["backbone.blocks.1.ls2.gamma"], chain.params["backbone"]["blocks"]["ls2"][1]),
        (
            frozen["language_model.model.layers.1.mlp.down_proj.weight"],
            chain.params["language_model"]["layers"]["down"]["kernel"][1].T,
        ),
    ]
    for found, expected in cases:
        np.testing.assert_array_equal(found, expected)


def test_without_the_frozen_parts(chain: Chain, tmp_path: Path) -> None:
    export(chain.runs["cell_qa"], tmp_path, frozen=False)
    assert not (tmp_path / "frozen.safetensors").exists()
    with pytest.raises(DataError, match="only cell_qa and slide_qa have frozen parts"):
        export(chain.runs["backbone"], tmp_path, frozen=True)


def test_a_changed_file_is_refused(chain: Chain, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"export\.json is missing"):
        read_card(tmp_path)
    export(chain.runs["cell_qa"], tmp_path)
    path = tmp_path / "frozen.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"frozen\.safetensors is not the file that .*export\.json describes"):
        read_card(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"frozen\.safetensors is missing"):
        read_card(tmp_path)


def test_weights_that_are_not_sound_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for wrong in (np.array([1.0, np.nan], np.float32), np.zeros(2, np.float64)):
        with pytest.raises(DataError, match=r"tensor a is .*only sound float32"):
            write_safetensors(path, {"a": wrong}, {})
    assert not any(tmp_path.iterdir())


def test_a_chain_that_has_changed_is_refused(chain: Chain, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(chain.runs["cell_qa"] / "checkpoints")
    content = json.loads((chain.runs["cell_qa"] / "handover.json").read_text())
    for fact, message in (
        ("tokenizer_sha256", "another tokenizer"),
        ("backbone_sha256", "no longer holds the backbone"),
    ):
        changed = content | {"facts": content["facts"] | {fact: "0" * 64}}
        (run / "handover.json").write_text(json.dumps(changed))
        with pytest.raises(DataError, match=message):
            export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_on_images_that_the_backbone_saw_are_marked(chain: Chain, tmp_path: Path) -> None:
    """DinoBloom's list goes from the import through the export into a table's row and note."""
    backbone = tmp_path / "backbone"
    backbone.mkdir()
    (backbone / "handover.json").write_text(json.dumps({"facts": {"seen": list(DINOBLOOM_SAW)}}))
    seen = seen_by_backbone({"backbone": str(backbone)})
    fields = {"id": "q", "image_id": "i", "level": "cell", "domain": "ood", "split": "test", "task": "morphology"}
    fields |= {"question_type": "open", "question": "?", "answer": "x"}
    asked = [QA(**fields, source={"dataset": name}) for name in ("S-BIAD440", "WBC_LISC", "APL")]
    found = remarks.seen_by_backbone({"model": {"seen_by_backbone": seen}}, asked)
    assert found == ("APL", "WBC_LISC") and not remarks.seen_by_backbone({"model": {}}, asked)
    run = score.Run("net", 0, "image", "shuffle", "", (), seen=found)
    assert run.label == "net (seen by backbone)" and "APL, WBC_LISC" in remarks.seen_note(found)[0]
    assert seen_by_backbone({"backbone": str(chain.runs["backbone"])}) == []


def test_without_torch_verify_says_what_to_install(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pbs_jax.weights.verify", "pbs_jax.weights.torch_answer", "pbs_jax.weights.torch_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["weights", "verify", "--export", "x", "--data", str(chain.root)]) == 1
    assert (
        capsys.readouterr().err
        == 'pbs: the package "torch" is missing: install it with `pip install "pbs-jax[torch]"`\n'
    )
