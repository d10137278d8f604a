"""DenseNet121 that tells a good tile from a poor one: the QC network of Haemorasis (official_code.md 2.4), for inference.

Global max pooling, a hidden layer whose width the checkpoint tells, one logit. Batch normalisation uses its running
statistics and Keras's epsilon, 1.001e-5; torchvision's DenseNet is the same network at 1e-5.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pbs_jax.models.layers import Linear


@dataclasses.dataclass(frozen=True)
class DenseNetConfig:
    """`blocks`: dense layers of each block; `growth`: channels that one adds; `hidden`: width of the head."""

    hidden: int
    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    stem: int = 64
    bottleneck: int = 4
    eps: float = 1.001e-5

    def widths(self) -> list[int]:
        """Channels that each block starts from, and those of the last norm."""
        found = [self.stem]
        for layers in self.blocks:
            found.append((found[-1] + layers * self.growth) // 2)
        return [*found[:-1], found[-2] + self.blocks[-1] * self.growth]


class BatchNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) * scale + bias with stored statistics, then ReLU: everywhere here one follows the other."""

    def __init__(self, channels: int, eps: float) -> None:
        self.scale, self.bias = nnx.Param(jnp.ones((channels,))), nnx.Param(jnp.zeros((channels,)))
        self.mean, self.var = nnx.Param(jnp.zeros((channels,))), nnx.Param(jnp.ones((channels,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...] * jax.lax.rsqrt(self.var[...] + self.eps)
        return jax.nn.relu(x * scale + (self.bias[...] - self.mean[...] * scale))


class Conv(nnx.Module):
    """Convolution without bias, kernel [side, side, in, out], `pad` zeros on every side: [B, H, W, C] -> [B, H', W', D]."""

    def __init__(self, cin: int, cout: int, side: int, *, stride: int = 1, pad: int = 0, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.nn.initializers.he_normal()(rngs.params(), (side, side, cin, cout)))
        self.stride, self.pad = stride, pad

    def __call__(self, x: jax.Array) -> jax.Array:
        pad = ((self.pad, self.pad),) * 2
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, self.kernel[...], (self.stride,) * 2, pad, dimension_numbers=layout)


class DenseLayer(nnx.Module):
    """Adds `growth` channels: [B, H, W, C] -> [B, H, W, C + growth]."""

    def __init__(self, channels: int, config: DenseNetConfig, *, rngs: nnx.Rngs) -> None:
        middle = config.bottleneck * config.growth
        self.norm1, self.conv1 = BatchNorm(channels, config.eps), Conv(channels, middle, 1, rngs=rngs)
        self.norm2, self.conv2 = BatchNorm(middle, config.eps), Conv(middle, config.growth, 3, pad=1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, self.conv2(self.norm2(self.conv1(self.norm1(x))))], axis=-1)


class Transition(nnx.Module):
    """Halves channels and sides."""

    def __init__(self, channels: int, config: DenseNetConfig, *, rngs: nnx.Rngs) -> None:
        self.norm, self.conv = BatchNorm(channels, config.eps), Conv(channels, channels // 2, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.conv(self.norm(x))
        return _pool(x, 2, 2, 0, jax.lax.add, 0.0) / 4


class DenseNet(nnx.Module):
    """images float32[B, H, W, 3] in 0..1 (RGB / 255, nothing else) -> logits float32[B]; sigmoid gives P(good)."""

    def __init__(self, config: DenseNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.conv0, self.norm0 = Conv(3, config.stem, 7, stride=2, pad=3, rngs=rngs), BatchNorm(config.stem, config.eps)
        widths = config.widths()
        self.blocks = nnx.Dict(
            {
                f"block{b}": nnx.Dict(
                    {f"layer{i}": DenseLayer(widths[b] + i * config.growth, config, rngs=rngs) for i in range(layers)}
                )
                for b, layers in enumerate(config.blocks)
            }
        )
        self.transitions = nnx.Dict(
            {f"block{b}": Transition(2 * widths[b + 1], config, rngs=rngs) for b in range(len(config.blocks) - 1)}
        )
        self.norm_last = BatchNorm(widths[-1], config.eps)
        self.hidden = Linear(widths[-1], config.hidden, rngs=rngs)
        self.out = Linear(config.hidden, 1, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.out(jax.nn.relu(self.hidden(self.features(images))))[:, 0]

    def features(self, images: jax.Array) -> jax.Array:
        """[B, C] after global max pooling."""
        x = _pool(self.norm0(self.conv0(images)), 3, 2, 1, jax.lax.max, -jnp.inf)
        for b, layers in enumerate(self.config.blocks):
            for i in range(layers):
                x = self.blocks[f"block{b}"][f"layer{i}"](x)
            if b < len(self.config.blocks) - 1:
                x = self.transitions[f"block{b}"](x)
        return self.norm_last(x).max(axis=(1, 2))


def _pool(x: jax.Array, side: int, stride: int, pad: int, how: Any, start: float) -> jax.Array:
    window, strides = (1, side, side, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, start, how, window, strides, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
