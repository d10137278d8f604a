"""The PyTorch module: the official networks by their own numbers, strict loading, and an export that answers alone."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from data_prep.schema import DataError, shown_options
from pbs_jax.bench import run as bench
from pbs_jax.bench.records import load_questions
from pbs_jax.data.slide_examples import SlideBag
from pbs_jax.decode.slide_answer import load_slide_answerer
from pbs_jax.models.decoder import DecoderConfig
from pbs_jax.models.vit import ViTConfig
from pbs_jax.weights.export import export
from tests.models.golden import Golden, close
from tests.weights.conftest import SLIDE_DIM, Chain, rewritten
from tests.weights.test_export import GOLDEN

pytestmark = pytest.mark.torch
MLP = ViTConfig(image_size=112, patch_size=14, dim=48, depth=3, heads=3, mlp_dim=192)
SWIGLU = dataclasses.replace(MLP, ffn="swiglu", mlp_dim=128)
TINY_QWEN = DecoderConfig(
    vocab=600, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn_dim=64, rope_theta=1e6, mrope_section=(2, 1, 1)
)


def loaded(module: Any, shape: Any, weights: dict[str, np.ndarray]) -> Any:
    """A module of ours with the official weights, every one of them."""
    import torch

    from pbs_jax.weights.torch_answer import fill

    net = module(SimpleNamespace(**dataclasses.asdict(shape)))
    fill(net, {name: torch.from_numpy(value) for name, value in weights.items()}, "golden")
    return net


def part(weights: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("file", "shape", "variant", "image"),
    [
        ("dinov2_mlp", MLP, "off0.1_noaa", "img112"),
        ("dinov2_mlp", MLP, "off0.1_noaa", "img140x98"),
        ("dinov2_mlp", MLP, "off0.0_aa", "img140x98"),
        ("dinov2_swiglu", SWIGLU, "off0.1_noaa", "img112"),
    ],
)
def test_backbone_is_dinov2(shared: Path, file: str, shape: ViTConfig, variant: str, image: str) -> None:
    import torch

    from pbs_jax.weights.torch_model import ViT

    offset, antialias = variant.removeprefix("off").split("_")
    shape = dataclasses.replace(shape, interpolate_offset=float(offset), antialias=antialias == "aa")
    golden, images = Golden(shared, file), Golden(shared, "dinov2_mlp").inp[image]
    tokens = loaded(ViT, shape, golden.w)(torch.from_numpy(images))
    close(tokens, golden.out[f"{variant}.{image}.x_prenorm"])


def test_image_pass_is_the_official_one(shared: Path) -> None:
    import torch

    from pbs_jax.weights.torch_model import QFormer

    golden = Golden(shared, "qformer")
    weights = {name: value for name, value in part(golden.w, "qformer.").items() if not name.endswith("position_ids")}
    queries = loaded(QFormer, GOLDEN, weights)(torch.from_numpy(golden.inp["images"]))
    close(queries, golden.out["image_pass.last_hidden_state"])


@pytest.mark.parametrize("count", [8, 32])
def test_decoder_gives_the_official_greedy_tokens(shared: Path, count: int) -> None:
    """A tiny Qwen2.5-VL with a visual strip of 8 or 32 tokens, prompts padded on the left."""
    import torch

    from pbs_jax.weights.torch_model import Decoder

    golden = Golden(shared, f"qwen_tiny_n{count}")
    weights = {f"model.{name}": value for name, value in part(golden.w, "model.language_model.").items()}
    decoder = loaded(Decoder, TINY_QWEN, weights | {"lm_head.weight": golden.w["lm_head.weight"]})
    ids, real = golden.inp["gen.input_ids"], golden.inp["gen.attention_mask"].astype(bool)
    prompts = [row[seen].tolist() for row, seen in zip(ids, real, strict=True)]
    visual = torch.from_numpy(golden.out["adapter_output"]).unflatten(0, (-1, count))
    expected = golden.out["gen.rp1.00.tokens"]
    found, first = decoder.generate(prompts, visual, pad_id=596, slot_id=590, stop_id=-1, max_new=expected.shape[1])
    close(first, golden.out["gen.prompt_logits_last"])
    assert found == expected.tolist()


def test_loading_is_strict(exported: Path, chain: Chain, tmp_path: Path) -> None:
    from pbs_jax.weights.torch_answer import load_export

    name = "model.visual.encoder.qformer.temp"
    changes = {
        "missing temp": lambda tensors: tensors.pop(name),
        "extra tempo": lambda tensors: tensors.update({f"{name}o": tensors[name]}),
        r"temp is \(1,\), not \(\)": lambda tensors: tensors.update({name: tensors[name][None]}),
        "1 tensors of no part, first other": lambda tensors: tensors.update({"other": tensors[name]}),
    }
    for number, (message, change) in enumerate(changes.items()):
        with pytest.raises(DataError, match=message):
            load_export(rewritten(exported, tmp_path / str(number), "model.safetensors", change))
    export(chain.runs["cell_qa"], tmp_path / "bare", frozen=False)
    with pytest.raises(DataError, match=r"has no frozen\.safetensors"):
        load_export(tmp_path / "bare")


def test_an_answer_does_not_depend_on_its_batch(exported: Path, chain: Chain) -> None:
    from pbs_jax.weights.torch_answer import load_export

    model = load_export(exported)
    asked = load_questions(chain.root, "test").items[:12]
    options = [shown_options(qa) for qa in asked]
    picture = bench.load_pictures(chain.root, "image", asked)
    visual = model.encode([picture(qa)[0] for qa in asked])
    together = model.answer(visual, asked, options)
    alone = [model.answer(visual[i : i + 1], [qa], [options[i]])[0] for i, qa in enumerate(asked)]
    assert together == alone and len(set(together)) > 6
    assert model.answer(visual[::-1].copy(), asked, options) != together  # the picture counts
    closed = [i for i, qa in enumerate(asked) if qa.question_type in bench.CLOSED]
    picked = model.answer(visual, asked, options, "letter_likelihood")
    assert {picked[i] for i in closed} <= {"true", "false", "A", "B", "C", "D"}


def test_answering_in_torch_needs_no_jax(repo: Path) -> None:
    code = "import sys, pbs_jax.weights.torch_answer; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_a_slide_answers_the_same_in_pytorch(chain: Chain, tmp_path: Path) -> None:
    """A bag with padding: slide Perceiver, projector and answers, in both frameworks."""
    export(chain.runs["slide_qa"], tmp_path)
    from pbs_jax.weights.torch_answer import load_export

    ours, theirs = load_export(tmp_path), load_slide_answerer(chain.runs["slide_qa"], 8)
    generator = np.random.default_rng(3)
    features = generator.standard_normal((3, 8, SLIDE_DIM), np.float32).astype(ml_dtypes.bfloat16)
    mask = np.arange(8) < np.array([[8], [5], [1]])
    bags = [
        SlideBag(f, m, np.zeros((8, 2), np.int32), np.ones(8, np.float32)) for f, m in zip(features, mask, strict=True)
    ]
    with jax.default_matmul_precision("highest"):
        encoded = [bag.encode() for bag in bags]
        expected, visual = theirs.encode(encoded), ours.encode(encoded)
        np.testing.assert_allclose(visual, expected, atol=2e-5 * np.abs(expected).max())
        asked = load_questions(chain.root, "test").items[:3]
        options = [shown_options(qa) for qa in asked]
        assert ours.answer(visual, asked, options) == theirs.answer(expected, asked, options)
    assert set(ours.parts) == {"slide_perceiver", "projector", "language_model"}
