"""Cell-patch alignment (paper section 3.4.2): two projections, the global and the local loss, and what the losses hide.

Both losses have a content-free optimum: projections that give every cell and every patch the same slot vectors. So
retrieval, effective rank and the share of the tokens that depends on the input are measured beside them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from data_prep.schema import DataError
from pbs_jax.models.layers import Linear

LOSSES = ("paper", "official")


class Alignment(nnx.Module):
    """Maps cell tokens [B, N, cell_dim] and patch tokens [B, M, patch_dim] into one space of `dim`; for the loss only."""

    def __init__(self, cell_dim: int, patch_dim: int, dim: int, *, rngs: nnx.Rngs) -> None:
        # torch's default spread, as in the released code: the paper's losses depend on the scale of the projections.
        self.cell_projection = Linear(cell_dim, dim, rngs=rngs, std=(3 * cell_dim) ** -0.5)
        self.patch_projection = Linear(patch_dim, dim, rngs=rngs, std=(3 * patch_dim) ** -0.5)

    def __call__(self, cells: jax.Array, patches: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Projected (cells, patches). The cell tokens are the target: no gradient flows into them."""
        return self.cell_projection(jax.lax.stop_gradient(cells)), self.patch_projection(patches)


def alignment_losses(cells: jax.Array, patches: jax.Array, kind: str = "paper") -> tuple[jax.Array, jax.Array]:
    """(global, local) of projected cells [B, N, K] and the patches [B, M, K] they lie in, each a mean over the batch.

    "paper": L2 norm of the difference of the token means; softmax of dot products over cell tokens, patch token as the
    anchor. "official" (the released code): one minus cosine of the token means; softmax of cosines over patch tokens,
    cell token as the anchor, no temperature. Token i belongs to token i; where N and M differ, the local loss reads the
    first min(N, M). Raises DataError for another kind.
    """
    cells, patches = cells.astype(jnp.float32), patches.astype(jnp.float32)
    length = min(cells.shape[1], patches.shape[1])
    match kind:
        case "paper":
            apart = safe_norm(patches.mean(1) - cells.mean(1)).mean()
            logits = jnp.einsum("bik,bjk->bij", patches[:, :length], cells[:, :length])
        case "official":
            apart = 1.0 - (_unit(cells.mean(1), 1e-8) * _unit(patches.mean(1), 1e-8)).sum(-1).mean()
            logits = jnp.einsum("bik,bjk->bij", _unit(cells[:, :length]), _unit(patches[:, :length]))
        case _:
            raise DataError(f'config.alignment "{kind}" is unknown: use {" or ".join(LOSSES)}')
    return apart, optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(length)[None]).mean()


def safe_norm(x: jax.Array) -> jax.Array:
    """L2 norm over the last axis, whose gradient at zero is zero, not NaN."""
    square = jnp.square(x).sum(-1)
    zero = square == 0
    return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, square)))


def _unit(x: jax.Array, eps: float = 1e-12) -> jax.Array:
    return x / jnp.maximum(safe_norm(x), eps)[..., None]


def diagnose(cells: np.ndarray, patches: np.ndarray, patch: np.ndarray, slide: np.ndarray) -> dict[str, float]:
    """What the losses hide, of n projected pairs.

    cells, patches: float32[n, N, K] and [n, M, K], row by row a pair; patch, slide: int[n] which patch and slide it is of.
    r1: share of cells whose own patch is the nearest of all patches (cosine of centred token means); slide_r1: nearest
    of its slide's patches, over slides with two or more. Each with its chance. rank, rank_cells: effective rank of the token means
    (1 = one direction). content: of the patch tokens, see below.
    """
    means, targets = patches.mean(1), cells.mean(1)
    own, first = np.unique(patch, return_index=True)
    queries, keys = _directions(targets, targets.mean(0)), _directions(means[first], means[first].mean(0))
    scores = queries @ keys.T
    right = own[None] == patch[:, None]
    near = slide[first][None] == slide[:, None]
    several = near.sum(1) > 1
    within = np.where(near, scores, -np.inf)
    return {
        "pairs": float(len(patch)),
        "r1": float(right[np.arange(len(patch)), scores.argmax(1)].mean()),
        "r1_chance": 1.0 / len(own),
        "slide_r1": _mean(right[np.arange(len(patch)), within.argmax(1)][several]),
        "slide_r1_chance": _mean(1.0 / near.sum(1)[several]),
        "rank": effective_rank(means[first]),
        "rank_cells": effective_rank(targets),
        "content": content(patches),
    }


def content(tokens: np.ndarray) -> float:
    """Share of the energy of tokens [n, N, K] that depends on the input: 0 when every input gives the same slot vectors."""
    return float(np.square(tokens - tokens.mean(0)).sum() / max(np.square(tokens).sum(), 1e-30))


def effective_rank(rows: np.ndarray) -> float:
    """exp of the entropy of the variance along the principal axes of rows [n, K]; 0 where they are all equal."""
    variance = np.square(np.linalg.svd(rows - rows.mean(0), compute_uv=False))
    if variance.sum() <= 1e-12 * max(np.square(rows).sum(), 1e-30):
        return 0.0
    share = variance / variance.sum()
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))


def _directions(rows: np.ndarray, centre: np.ndarray) -> np.ndarray:
    centred = rows - centre
    return centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)


def _mean(values: np.ndarray) -> float:
    """0 over nothing: a metric must be a number."""
    return float(values.mean()) if values.size else 0.0
