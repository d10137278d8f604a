"""The alignment losses against the official PyTorch numbers, their corners, and what the diagnostics tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_prep.schema import DataError
from pbs_jax.models.alignment import LOSSES, Alignment, alignment_losses, diagnose, effective_rank, safe_norm
from pbs_jax.weights.convert import to_flax, to_torch
from pbs_jax.weights.tables import Table, linear
from tests.models.golden import Golden, abstract, cases, close, grads_close, run

TABLE = Table((*linear("cell_projection", "cell_projection"), *linear("patch_projection", "patch_projection")))
# 1.0 global + 0.5 local, the released code's weights; then each alone.
PARTS = {"loss": (1.0, 0.5), "loss_global": (1.0, 0.0), "loss_local": (0.0, 1.0)}


@pytest.mark.parametrize("kind", ["official", "paper"])
def test_losses_and_gradients(shared: Path, kind: str) -> None:
    golden = Golden(shared, "alignment")
    graph, state = abstract(lambda: Alignment(48, 44, 24, rngs=nnx.Rngs(0)))
    params = to_flax(golden.w, TABLE, state)

    def losses(params: Any, patches: jax.Array) -> jax.Array:
        cells, projected = nnx.merge(graph, params)(golden.inp["cell_tokens"], patches)
        return jnp.stack(alignment_losses(cells, projected, kind))

    patches = jnp.asarray(golden.inp["patch_tokens"])
    # One Jacobian serves all three: a weighted loss's gradient is the weighted sum of the two.
    jacobian, values = run(lambda p, x: (jax.jacrev(losses, argnums=(0, 1))(p, x), losses(p, x)), params, patches)
    for name, weights in PARTS.items():
        key = f"{kind}.{name}"
        if key not in golden.out:
            continue
        assert np.dot(values, weights) == pytest.approx(float(golden.out[key]), rel=1e-5)
        grads, x = jax.tree.map(lambda leaf, w=weights: np.tensordot(np.asarray(w, np.float32), leaf, 1), jacobian)
        expected = {k.removeprefix(f"{key}."): v for k, v in golden.grad.items() if k.startswith(f"{key}.")}
        grads_close(to_torch(grads, TABLE) | {"patch_tokens": x}, expected)


def test_unequal_token_counts_and_the_paper_loss_against_float64(shared: Path) -> None:
    """Local losses use the first tokens of both, global ones all; the paper's loss was also checked by a plain loop."""
    golden = Golden(shared, "alignment")
    expected = cases(shared)["alignment"]["paper_numpy_f64"]
    short = golden.inp["patch_tokens_short"] @ golden.w["patch_projection.weight"].T + golden.w["patch_projection.bias"]

    def values(cells: jax.Array, patches: jax.Array, short: jax.Array) -> list[jax.Array]:
        apart = safe_norm(patches.mean(1) - cells.mean(1))
        return [*alignment_losses(cells, short, "official"), *alignment_losses(cells, patches), apart]

    *losses, apart = run(values, golden.out["cell_proj"], golden.out["patch_proj"], short)
    wanted = [float(golden.out[f"official_short.loss_{name}"]) for name in ("global", "local")]
    assert [float(loss) for loss in losses] == pytest.approx(
        [*wanted, expected["global_mean"], expected["local_mean"]], rel=1e-5
    )
    close(apart, np.asarray(expected["global_per_sample"], np.float32))


def test_equal_means_give_a_zero_gradient_not_nan() -> None:
    tokens = jnp.ones((2, 4, 3))
    apart, total = run(
        lambda x: (
            jax.grad(lambda x: alignment_losses(tokens, x)[0])(x),
            [jax.grad(lambda x, kind=kind: sum(alignment_losses(tokens, x, kind)))(x) for kind in LOSSES],
        ),
        tokens,
    )
    assert not np.asarray(apart).any() and np.isfinite(total).all()


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(DataError, match='"clip" is unknown'):
        alignment_losses(jnp.ones((1, 2, 3)), jnp.ones((1, 2, 3)), "clip")


def test_diagnostics_tell_content_from_its_absence() -> None:
    """120 pairs of 60 patches on 12 slides: tokens that carry their patch, and the content-free optimum."""
    rng = np.random.default_rng(0)
    patch, slide = np.arange(120) // 2, np.arange(120) // 10
    carried = rng.standard_normal((60, 1, 16))[patch]
    slots = 3 * rng.standard_normal((8, 16))
    noise = 0.01 * rng.standard_normal((2, 120, 8, 16))
    good = diagnose(slots + carried + noise[0], slots + carried + noise[1], patch, slide)
    empty = diagnose(slots + noise[0], slots + noise[1], patch, slide)
    assert good["r1"] == good["slide_r1"] == 1.0
    assert (good["r1_chance"], good["slide_r1_chance"]) == pytest.approx((1 / 60, 1 / 5))
    assert good["rank"] > 8 and good["content"] > 0.05
    assert empty["r1"] < 0.1 and empty["slide_r1"] < 0.45 and empty["content"] < 1e-3


def test_effective_rank() -> None:
    basis = np.concatenate([np.eye(5), -np.eye(5)])
    assert effective_rank(basis) == pytest.approx(5.0)
    assert effective_rank(np.outer(np.arange(6), np.ones(4))) == pytest.approx(1.0)
    assert effective_rank(np.ones((6, 4))) == 0.0
