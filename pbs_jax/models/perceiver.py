"""Perceiver resampler (arXiv 2103.03206) as in PBS-VL: learned latents that read patch tokens or a slide's patches.

Latents attend to the input only (no latent self-attention, latents are not among the keys), as in the official release.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pbs_jax.models.layers import LayerNorm, Linear, attention, gelu, merge_heads, scan_layers, split_heads, stack
from pbs_jax.sharding.mesh import BATCH, constrain


@dataclasses.dataclass(frozen=True)
class PerceiverConfig:
    """Shape of the resampler; `input_dim` is the width of what it reads."""

    input_dim: int
    dim: int = 768
    latents: int = 32
    depth: int = 2
    heads: int = 8
    eps: float = 1e-5
    latent_std: float = 0.02  # of the drawn latents, as in the released code
    dtype: str = "float32"

    @classmethod
    def patch(cls, **changes: Any) -> PerceiverConfig:
        """The paper's patch level, on ViT-L tokens."""
        return cls(**{"input_dim": 1024, **changes})

    @classmethod
    def slide(cls, **changes: Any) -> PerceiverConfig:
        """The paper's slide level, on the patch level's tokens."""
        return cls(**{"input_dim": 768, **changes})

    @classmethod
    def nano(cls, **changes: Any) -> PerceiverConfig:
        return cls(**{"input_dim": 192, "dim": 192, "heads": 6, **changes})


class Block(nnx.Module):
    """latents += attention(query_norm(latents), input_norm(x)); latents += ffn(latents)."""

    def __init__(self, config: PerceiverConfig, *, rngs: nnx.Rngs) -> None:
        dim = config.dim
        self.query_norm = LayerNorm(dim, config.eps)
        self.input_norm = LayerNorm(dim, config.eps)
        self.in_proj = Linear(dim, 3 * dim, rngs=rngs)  # q, k, v side by side, as torch's MultiheadAttention packs them
        self.out_proj = Linear(dim, dim, rngs=rngs)
        self.ffn_norm = LayerNorm(dim, config.eps)
        self.up = Linear(dim, 4 * dim, rngs=rngs)
        self.down = Linear(4 * dim, dim, rngs=rngs)
        self.heads = config.heads

    def __call__(self, latents: jax.Array, inputs: jax.Array, mask: jax.Array | None) -> jax.Array:
        source, target = self.input_norm(inputs), self.query_norm(latents)
        dim = latents.shape[-1]
        q, k, v = (
            split_heads(self.in_proj(x, slice(i * dim, (i + 1) * dim)), self.heads)
            for i, x in enumerate((target, source, source))
        )
        latents = latents + self.out_proj(merge_heads(attention(q, k, v, mask)))
        return constrain(latents + self.down(gelu(self.up(self.ffn_norm(latents)))), BATCH)


class PerceiverResampler(nnx.Module):
    """x [B, P, D] (or [B, P, T, D], averaged over T), mask bool[B, P] (True = read) -> latents [B, L, dim].

    A row whose mask is all False reads nothing: its output depends on the weights alone.
    """

    def __init__(self, config: PerceiverConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.latents = nnx.Param(config.latent_std * jax.random.normal(rngs.params(), (config.latents, config.dim)))
        self.input_projection = Linear(config.input_dim, config.dim, rngs=rngs)
        self.blocks = stack(lambda rngs: Block(config, rngs=rngs), config.depth, rngs)
        self.output_norm = LayerNorm(config.dim, config.eps)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x.astype(self.config.dtype)
        inputs = constrain(self.input_projection(x.mean(axis=2) if x.ndim == 4 else x), BATCH)
        latents = jnp.broadcast_to(self.latents[...], (x.shape[0], *self.latents.shape)).astype(x.dtype)
        seen = None if mask is None else mask.astype(bool)[:, None, :]
        latents, _ = scan_layers(self.blocks, lambda block, z, _: (block(z, inputs, seen), None), latents)
        return self.output_norm(latents)


def encode_slide(resampler: PerceiverResampler, features: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """A slide's patches [B, P, D] or [B, P, T, D] -> [B, L, dim].

    Without a mask, a patch all of whose values are exactly zero is padding (the official rule, which looks before
    averaging over T: tokens that merely cancel are still read).
    """
    if mask is None:
        mask = jnp.any(features != 0, axis=tuple(range(2, features.ndim)))
    return resampler(features, mask)
