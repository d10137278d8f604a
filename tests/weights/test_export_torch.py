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
from safetensors.numpy import load_file

from data_prep.schema import DataError, shown_options
from pbs_jax.bench import run as bench
from pbs_jax.bench.records import load_questions
from pbs_jax.data.slide_examples import SlideBag
from pbs_jax.decode.slide_answer import load_slide_answerer
from pbs_jax.models.decoder import DecoderConfig
from pbs_jax.models.vit import ViTConfig
from pbs_jax.train import handover
from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.export import export
from pbs_jax.weights.importers import import_weights
from pbs_jax.weights.tables import decoder_table
from tests.models.golden import Golden, close
from tests.weights.conftest import SLIDE_DIM, Chain, finish, rewritten
from tests.weights.test_export import GOLDEN
from tests.weights.test_import import saved

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


@pytest.mark.slow
def test_the_language_model_stays_a_hugging_face_snapshot(chain: Chain, tmp_path: Path) -> None:
    """7b: our small module beside the snapshot's own files, which may be moved into the export; the answers are JAX's."""
    from pbs_jax.decode.answer import load_answerer
    from pbs_jax.weights.torch_answer import load_export

    shape, lm = chain.size.decoder, chain.params["language_model"]
    text = {
        "vocab_size": shape.vocab, "hidden_size": shape.dim, "num_hidden_layers": shape.layers, "hidden_act": "silu",
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn_dim,
        "rms_norm_eps": shape.rms_eps, "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta, "mrope_section": [2, 1, 1]},
    }  # fmt: skip
    told = {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "text_config": text}
    folder = saved(tmp_path / "snapshot", to_torch(lm, decoder_table(shape, "model.language_model.")), told)
    import_weights("qwen2_5_vl", folder, tmp_path / "lm", size="small")
    before = handover.read(chain.runs["cell_qa"])["facts"]
    facts = before | {"size": "7b", "language_model": str(tmp_path / "lm")}
    finish(tmp_path / "run", "cell_qa", {n: chain.params[n] for n in ("qformer", "projector")}, chain.root, facts)
    card = export(tmp_path / "run", tmp_path / "export", frozen=True)
    assert not any(name.startswith("language_model.") for name in load_file(tmp_path / "export" / "frozen.safetensors"))
    assert card["language_model"]["folder"] == str(folder)

    asked = load_questions(chain.root, "test").items[:12]
    options = [shown_options(qa) for qa in asked]
    picture = bench.load_pictures(chain.root, "image", asked)
    images = [picture(qa)[0] for qa in asked]
    ours, theirs = load_export(tmp_path / "export"), load_answerer(tmp_path / "run")
    with jax.default_matmul_precision("highest"):
        expected = theirs.answer(theirs.encode(images), asked, options)
    assert ours.answer(ours.encode(images), asked, options) == expected
    folder.rename(tmp_path / "export" / "language_model")
    assert load_export(tmp_path / "export").answer(ours.encode(images), asked, options) == expected
    (tmp_path / "export" / "language_model" / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model\.safetensors is not the snapshot's file"):
        load_export(tmp_path / "export")


def test_answering_in_torch_needs_no_jax(repo: Path) -> None:
    code = "import sys, pbs_jax.weights.torch_answer; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_a_slide_answers_the_same_in_pytorch(chain: Chain, tmp_path: Path) -> None:
    """Bags with padding through `pbs weights verify`'s comparison: slide Perceiver, projector, answers; and a planted fault."""
    import torch

    from pbs_jax.weights import verify
    from pbs_jax.weights.torch_answer import load_export

    export(chain.runs["slide_qa"], tmp_path)
    ours, theirs = load_export(tmp_path), load_slide_answerer(chain.runs["slide_qa"], verify.BATCH)
    assert set(ours.parts) == {"slide_perceiver", "projector", "language_model"}
    generator, counts = np.random.default_rng(3), (8, 5, 1)
    asked = load_questions(chain.root, "test").items[:40]
    images = {}
    for k, name in enumerate(dict.fromkeys(qa.image_id for qa in asked)):
        features = generator.standard_normal((8, SLIDE_DIM), np.float32).astype(ml_dtypes.bfloat16)
        images[name] = SlideBag(features, np.arange(8) < counts[k % 3], np.zeros((8, 2)), np.ones(8)).encode()
    with jax.default_matmul_precision("highest"):
        found = verify.compare(theirs, ours, asked, images)
        assert found["verdict"] == "equal" and found["identical_answers"] == 40
        assert 0 < found["visual_tokens_relative"] < 1e-5
        with torch.inference_mode():
            ours.parts["slide_perceiver"].get_parameter("blocks.1.ffn.3.weight").mul_(1.01)
        assert verify.compare(theirs, ours, asked, images)["verdict"] == "different"
