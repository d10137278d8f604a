"""Classification head on backbone tokens: the paper's feed-forward net and linear layer (section 9.2)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from pbs_jax.models.layers import LayerNorm, Linear, gelu


class ClassifierHead(nnx.Module):
    """Class token and mean patch token -> FFN -> one linear layer shared out to the named outputs.

    `outputs` maps an output's name to its number of classes: {"label": 5} alone, or label and attributes.
    """

    def __init__(self, dim: int, outputs: Mapping[str, int], *, rngs: nnx.Rngs, hidden: int | None = None) -> None:
        hidden = hidden or dim
        self.norm = LayerNorm(2 * dim, 1e-6)
        self.ffn = Linear(2 * dim, hidden, rngs=rngs)
        self.out = Linear(hidden, sum(outputs.values()), rngs=rngs)
        self.outputs = tuple(outputs.items())

    def __call__(self, features: jax.Array) -> dict[str, jax.Array]:
        """features [B, 1+N, D], class token first -> float32 logits {name: [B, n]}."""
        pooled = jnp.concatenate([features[:, 0], features[:, 1:].mean(axis=1)], axis=-1)
        logits = self.out(gelu(self.ffn(self.norm(pooled)))).astype(jnp.float32)
        named, start = {}, 0
        for name, classes in self.outputs:
            named[name] = logits[:, start : start + classes]
            start += classes
        return named
