"""FLOPs are counted through scans, recomputation and gradients; tokens of the Qwen family are cut as Qwen cuts them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pbs_jax.perf.count import count_flops, flops_and_saved_bytes
from pbs_jax.perf.flops import report
from pbs_jax.perf.qwen import RankTokenizer

LAYERS, ROWS, WIDTH = 3, 4, 8
ONE_PASS = LAYERS * 2 * ROWS * WIDTH * WIDTH


def chain(weights: jax.Array, x: jax.Array, remat: bool) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)[0].sum()


@pytest.mark.parametrize(
    ("remat", "argument", "passes"),
    [(False, None, 1), (False, 1, 2), (False, 0, 3), (True, 1, 3), (True, 0, 4)],
    ids=["forward", "input gradient", "weight gradient", "input, recomputed", "weight, recomputed"],
)
def test_passes_over_a_scan(remat: bool, argument: int | None, passes: int):
    shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    function = lambda w, x: chain(w, x, remat)  # noqa: E731
    function = function if argument is None else jax.grad(function, argnums=argument)
    assert count_flops(function, *shapes) == passes * ONE_PASS


def test_what_a_scan_keeps_for_its_backward_pass():
    shapes = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    _, kept = flops_and_saved_bytes(jax.grad(lambda w, x: chain(w, x, True), argnums=1), *shapes)
    assert kept >= LAYERS * ROWS * WIDTH * 4  # each layer's input


def test_qwen_ids(shared: Path):
    """Ids that Qwen2.5's own tokenizer gives (reference/official_code.md 3.5 shows the frame)."""
    tokenizer = RankTokenizer(shared / "data" / "qwen_tokenizer" / "qwen.tiktoken")
    assert tokenizer.encode("Hello world") == [9707, 1879]
    assert tokenizer.encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n") == [
        151644, 8948, 198, 2610, 525, 264, 10950, 17847, 13, 151645, 198,
    ]  # fmt: skip


@pytest.mark.slow
def test_shared_prefixes_halve_the_work_of_the_released_questions(shared: Path):
    said = report(shared / "data", 3)
    cell, slide = (float(line.split(": ")[1].split()[0]) for line in said.splitlines()[1:])
    assert cell <= 0.52 and slide <= 0.54, said
