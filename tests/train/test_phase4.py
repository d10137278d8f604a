"""Phase 4 on a small slide dataset: the mask, the chain to an answer, and features that are not the model's."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_prep.schema import DataError
from data_prep.tokens import load_tokenizer
from pbs_jax.bench import run as bench
from pbs_jax.bench.records import load_predictions
from pbs_jax.config import load, total_steps
from pbs_jax.data.examples import QuestionBins
from pbs_jax.data.slide_examples import CaptionedSlides, Joined
from pbs_jax.data.slide_features import SlideEncoder, write_slide_features
from pbs_jax.decode.slide_answer import load_slide_answerer
from pbs_jax.models.sizes import get_size
from pbs_jax.train import handover, loop, phase4_slide_qa
from pbs_jax.train.check import problems
from pbs_jax.train.phase import parameters
from pbs_jax.train.phase4_slide_qa import drop_patches
from tests.train.conftest import one_device, save_finished, small_config
from tests.train.test_phase2 import aligned, features, slides  # noqa: F401


def test_dropped_patches_are_real_ones_and_never_all():
    mask = jnp.arange(8)[None] < jnp.array([[8], [1], [0]])
    kept = np.stack([drop_patches(mask, 0.6, jax.random.key(k)) for k in range(50)])
    assert not (kept & ~np.asarray(mask)).any()
    assert kept[:, 0].any(1).all() and kept[:, 1, 0].all() and not kept[:, 2].any()
    assert 0.25 < kept[:, 0].mean() < 0.55
    np.testing.assert_array_equal(drop_patches(mask, 0.0, jax.random.key(0)), mask)


def test_official_runs_have_the_released_codes_length_and_loss():
    alignment = load("phase2_cell_patch_alignment:size=7b,recipe=official")
    slide_qa = load("phase4_slide_qa:size=7b,recipe=official")
    assert total_steps(alignment, 28_970) == 90_600 and total_steps(slide_qa, 1_142) == 28_550
    assert (alignment.alignment, alignment.global_weight, alignment.local_weight) == ("official", 1.0, 0.5)
    assert (slide_qa.max_patches, slide_qa.patch_dropout, slide_qa.images_per_row) == (2048, 0.0, 0)
    assert load("phase2_cell_patch_alignment").alignment == "paper"
    nano = load("phase4_slide_qa:recipe=official")
    assert (nano.weighting, nano.patch_dropout) == ("token", 0.0)


def test_phase_0b_reads_slides_beside_cells(drawn: Path, slides: Path):  # noqa: F811
    tokenizer = load_tokenizer(drawn / "tokenizer")
    cells = QuestionBins(drawn, "train", captions=tokenizer)
    captioned = CaptionedSlides(slides, "train", tokenizer)
    both = Joined(cells, captioned)
    assert len(both) == len(cells) + len(captioned)
    assert {len(both[k]["answers"]) for k in (0, len(both) - 1)} == {len(cells[0]["answers"])}
    last = both[len(both) - 1]
    np.testing.assert_array_equal(last["visual"], captioned[len(captioned) - 1]["visual"])
    assert "mostly" in tokenizer.decode(last["visual"]) and int(last["index"]) == len(both) - 1
    mine = captioned[len(captioned) - 1]["answers"]
    np.testing.assert_array_equal(last["answers"][last["answers"] >= 0], mine[mine >= 0])


@pytest.fixture(scope="module")
def store(aligned: Path, features: Path, phases: dict[str, Path]) -> Path:  # noqa: F811
    write_slide_features(features, SlideEncoder(phases["backbone"], aligned), features)
    return features


@pytest.fixture(scope="module")
def workdir(store: Path, phases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slide_qa")
    config = small_config("phase4_slide_qa", store, batch_size=2, init_from__language_model=phases["language_model"])
    loop.train(config, path, one_device())
    return path


@pytest.mark.slow
def test_the_slide_perceiver_trains_and_answers(workdir: Path, store: Path, tmp_path: Path):
    content = handover.read(workdir, ("slide_qa",))
    assert set(content["trees"]) == {"slide_perceiver", "projector"}
    assert content["facts"]["features"]["kind"] == "phase2"
    for modality in ("image", "blind", "mismatched"):
        out = tmp_path / modality
        assert bench.run(f"pbs:{workdir}", store, out, modality=modality, mode="letter_likelihood") == 0
        assert len(load_predictions(out / "predictions.jsonl")) == 8
    for patches in (1, 2):  # the paper's Table 5
        assert bench.run(f"pbs:{workdir}", store, tmp_path / str(patches), patches=patches) == 0
        assert json.loads((tmp_path / str(patches) / "run.json").read_text())["patches"] == patches
    bag = load_slide_answerer(workdir).open_bags(store, "test", 1)["S:test0"]
    assert bag.mask.tolist() == [True] and len(bag.features) == 1


@pytest.mark.slow
def test_the_projector_can_start_from_phase_3(store: Path, phases: dict[str, Path], tmp_path: Path):
    tokenizer = load_tokenizer(store / "tokenizer")
    _, tree = parameters(phase4_slide_qa.networks(get_size("nano", tokenizer), 192)["projector"], 7)
    facts = {"size": "nano", "tokenizer_sha256": tokenizer.sha256}
    save_finished(tmp_path, {"projector": tree}, facts, "cell_qa")
    starts = {"language_model": phases["language_model"], "projector": tmp_path}
    config = small_config("phase4_slide_qa", store, batch_size=2, **{f"init_from__{k}": v for k, v in starts.items()})
    phase = phase4_slide_qa.build(config)
    assert phase.loaded == ("projector",)
    jax.tree.map(np.testing.assert_array_equal, phase.trainable["projector"], tree)
    assert not list(problems(config))
    config.init_from.projector = str(phases["qformer"])
    assert any("is of phase cell_representation, expected cell_qa" in problem for problem in problems(config))


@pytest.mark.slow
def test_padding_does_not_change_what_is_seen(workdir: Path, store: Path):
    answerer = load_slide_answerer(workdir)
    bag = answerer.open_bags(store, "test")["S:test0"]
    longer = type(bag)(np.pad(bag.features, ((0, 5), (0, 0))), np.pad(bag.mask, (0, 5)), bag.coords, bag.qc)
    np.testing.assert_allclose(answerer.encode([longer.encode()]), answerer.encode([bag.encode()]), atol=1e-5)


@pytest.mark.slow
def test_features_of_other_weights_are_refused(workdir: Path, store: Path, phases: dict[str, Path], tmp_path: Path):
    write_slide_features(store, SlideEncoder(phases["backbone"]), tmp_path)
    with pytest.raises(DataError, match="has kind backbone, the model learnt from phase2"):
        bench.run(f"pbs:{workdir}", store, tmp_path / "out", features=tmp_path)
