"""Vision Transformer of DINOv2 / DinoBloom (arXiv 2304.07193), inference-exact, plus the small from-scratch variant.

Pre-norm blocks with LayerScale, MLP or SwiGLU; PBS-VL reads `x_prenorm`, the tokens before the last norm.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.models.layers import (
    LayerNorm,
    Linear,
    attention,
    gelu,
    merge_heads,
    scan_layers,
    split_heads,
    stack,
    trunc_normal,
)


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Shape of the backbone.

    `position_grid` is the grid (rows, columns) of the stored position table, by default the image's; other image sizes
    are served by interpolation. `stem="conv"` replaces the patch projection by convolutions (patch_size 16).
    """

    image_size: int
    patch_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    ffn: Literal["mlp", "swiglu"] = "mlp"
    position_grid: tuple[int, int] | None = None
    interpolate_offset: float = 0.1
    antialias: bool = False
    stem: Literal["patch", "conv"] = "patch"
    eps: float = 1e-6
    layer_scale: float = 1.0
    dtype: str = "float32"
    remat: str = ""

    @property
    def grid(self) -> tuple[int, int]:
        side = self.image_size // self.patch_size
        return self.position_grid or (side, side)

    @classmethod
    def dinov2_s(cls, **changes: Any) -> ViTConfig:
        sizes = {"image_size": 224, "patch_size": 14, "dim": 384, "depth": 12, "heads": 6, "mlp_dim": 1536}
        return cls(**{**sizes, **changes})

    @classmethod
    def dinov2_b(cls, **changes: Any) -> ViTConfig:
        return cls.dinov2_s(**{"dim": 768, "heads": 12, "mlp_dim": 3072, **changes})

    @classmethod
    def dinov2_l(cls, **changes: Any) -> ViTConfig:
        return cls.dinov2_s(**{"dim": 1024, "depth": 24, "heads": 16, "mlp_dim": 4096, **changes})

    @classmethod
    def dinov2_g(cls, **changes: Any) -> ViTConfig:
        sizes = {"dim": 1536, "depth": 40, "heads": 24, "mlp_dim": 4096, "ffn": "swiglu"}
        return cls.dinov2_s(**{**sizes, **changes})

    @classmethod
    def nano(cls, **changes: Any) -> ViTConfig:
        sizes = {"image_size": 96, "patch_size": 16, "dim": 192, "depth": 2, "heads": 6, "mlp_dim": 512, "stem": "conv"}
        return cls(**{**sizes, "layer_scale": 1.0, **changes})


class Mlp(nnx.Module):
    """[..., D] -> [..., D] through `hidden` exact-GELU units."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.fc1 = Linear(dim, hidden, rngs=rngs)
        self.fc2 = Linear(hidden, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(gelu(self.fc1(x)))


class SwiGlu(nnx.Module):
    """[..., D] -> [..., D]: w3(silu(a) * b) with (a, b) = w12(x), as DINOv2's SwiGLUFFNFused."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.w12 = Linear(dim, 2 * hidden, rngs=rngs)
        self.w3 = Linear(hidden, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, value = jnp.split(self.w12(x), 2, axis=-1)
        return self.w3(jax.nn.silu(gate) * value)


class Block(nnx.Module):
    """x += ls1 * attention(norm1(x)); x += ls2 * ffn(norm2(x)), on [B, T, D]."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        dim = config.dim
        self.norm1 = LayerNorm(dim, config.eps)
        self.qkv = Linear(dim, 3 * dim, rngs=rngs)
        self.proj = Linear(dim, dim, rngs=rngs)
        self.ls1 = nnx.Param(jnp.full((dim,), config.layer_scale, jnp.float32))
        self.norm2 = LayerNorm(dim, config.eps)
        self.ffn = (Mlp if config.ffn == "mlp" else SwiGlu)(dim, config.mlp_dim, rngs=rngs)
        self.ls2 = nnx.Param(jnp.full((dim,), config.layer_scale, jnp.float32))
        self.heads = config.heads

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (split_heads(part, self.heads) for part in jnp.split(self.qkv(self.norm1(x)), 3, axis=-1))
        x = x + self.ls1[...].astype(x.dtype) * self.proj(merge_heads(attention(q, k, v)))
        return x + self.ls2[...].astype(x.dtype) * self.ffn(self.norm2(x))


class PatchStem(nnx.Module):
    """Non-overlapping patches through one linear map: [B, H, W, 3] -> [B, H/p, W/p, D]."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.patch = config.patch_size
        self.proj = Linear(3 * self.patch**2, config.dim, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        batch, height, width, channels = images.shape
        p = self.patch
        cut = images.reshape(batch, height // p, p, width // p, p, channels).transpose(0, 1, 3, 2, 4, 5)
        return self.proj(cut.reshape(batch, height // p, width // p, p * p * channels))


class Conv(nnx.Module):
    """3x3 convolution with one pixel of zero padding: [B, H, W, C] -> [B, H/stride, W/stride, D].

    Nine shifted views and one matrix product: XLA's own convolution gradient is several times slower on a CPU.
    """

    def __init__(self, cin: int, cout: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.proj = Linear(9 * cin, cout, rngs=rngs, std=(2 / (9 * cin)) ** 0.5)
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        height, width = x.shape[1:3]
        step = self.stride
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        views = [padded[:, i : i + height : step, j : j + width : step] for i in range(3) for j in range(3)]
        return self.proj(jnp.concatenate(views, axis=-1))


class MapNorm(nnx.Module):
    """Group normalisation with one group: over rows, columns and channels of [B, H, W, C], in float32.

    A norm over channels alone would erase how dark a pixel is, which is half of what a stain says.
    """

    def __init__(self, dim: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((dim,)))
        self.bias = nnx.Param(jnp.zeros((dim,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.float32)
        h = h - h.mean((1, 2, 3), keepdims=True)
        h = h * jax.lax.rsqrt(jnp.square(h).mean((1, 2, 3), keepdims=True) + self.eps)
        return (h * self.scale[...] + self.bias[...]).astype(x.dtype)


class ConvStage(nnx.Module):
    """x + conv(gelu(norm(x))) twice, then a stride-2 convolution: [B, H, W, C] -> [B, H/2, W/2, D]."""

    def __init__(self, cin: int, cout: int, eps: float, *, rngs: nnx.Rngs) -> None:
        self.norm1 = MapNorm(cin, eps)
        self.conv1 = Conv(cin, cin, 1, rngs=rngs)
        self.norm2 = MapNorm(cin, eps)
        self.conv2 = Conv(cin, cin, 1, rngs=rngs)
        self.norm3 = MapNorm(cin, eps)
        self.conv3 = Conv(cin, cout, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.conv1(gelu(self.norm1(x)))
        x = x + self.conv2(gelu(self.norm2(x)))
        return self.conv3(gelu(self.norm3(x)))


class ConvStem(nnx.Module):
    """4x4 patches to D/4 channels, then two convolution stages to D: [B, H, W, 3] -> [B, H/16, W/16, D].

    A transformer trained from scratch on a few thousand cells needs early convolutions (Xiao et al., arXiv 2106.14881).
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        dim = config.dim
        self.patch = PatchStem(dataclasses.replace(config, patch_size=4, dim=dim // 4), rngs=rngs)
        self.stage1 = ConvStage(dim // 4, dim // 2, config.eps, rngs=rngs)
        self.stage2 = ConvStage(dim // 2, dim, config.eps, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.stage2(self.stage1(self.patch(images)))


class ViT(nnx.Module):
    """The backbone; see `ViTConfig` for its shape."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        if config.stem == "conv" and config.patch_size != 16:
            raise ValueError(f"stem='conv' has a total stride of 16; set patch_size=16 instead of {config.patch_size}.")
        self.config = config
        rows, columns = config.grid
        self.stem = (PatchStem if config.stem == "patch" else ConvStem)(config, rngs=rngs)
        self.cls_token = nnx.Param(trunc_normal(0.02)(rngs.params(), (config.dim,)))
        self.positions = nnx.Param(trunc_normal(0.02)(rngs.params(), (1 + rows * columns, config.dim)))
        self.blocks = stack(lambda rngs: Block(config, rngs=rngs), config.depth, rngs)
        self.norm = LayerNorm(config.dim, config.eps)

    def __call__(self, images: jax.Array) -> dict[str, jax.Array]:
        """Tokens of images float32[B, H, W, 3], ImageNet-normalised, sides multiples of the patch.

        Returns, in the compute dtype: x_prenorm [B, 1+N, D] (class token first, patches row-major), x_norm_clstoken
        [B, D], x_norm_patchtokens [B, N, D].
        """
        config = self.config
        if any(side % config.patch_size for side in images.shape[1:3]):
            raise ValueError(f"image sides {images.shape[1:3]} must be multiples of patch_size={config.patch_size}.")
        grid = self.stem(images.astype(config.dtype))
        batch, rows, columns, dim = grid.shape
        table = position_table(self.positions[...], config, (rows, columns))
        cls = jnp.broadcast_to(self.cls_token[...], (batch, 1, dim))
        x = jnp.concatenate([cls, grid.reshape(batch, rows * columns, dim)], axis=1, dtype=config.dtype)
        x = x + table.astype(config.dtype)
        x, _ = scan_layers(self.blocks, lambda block, x, _: (block(x), None), x, remat=config.remat)
        normed = self.norm(x)
        return {"x_prenorm": x, "x_norm_clstoken": normed[:, 0], "x_norm_patchtokens": normed[:, 1:]}


def position_table(table: jax.Array, config: ViTConfig, grid: tuple[int, int]) -> jax.Array:
    """Position table [1+gh*gw, D] resampled to `grid`: [1+rows*columns, D], class row unchanged.

    torch's bicubic rules as DINOv2 calls them: with a non-zero offset the sampling step is stored / (wanted + offset).
    """
    if grid == config.grid:
        return table
    weights = [
        bicubic_weights(old, new, old / (new + config.interpolate_offset), config.antialias)
        for old, new in zip(config.grid, grid, strict=True)
    ]
    patches = table[1:].reshape(*config.grid, -1).astype(jnp.float32)
    patches = jnp.einsum("ij,kl,jld->ikd", weights[0], weights[1], patches)
    return jnp.concatenate([table[:1], patches.reshape(-1, table.shape[-1])])


def bicubic_weights(old: int, new: int, step: float, antialias: bool) -> np.ndarray:
    """float32[new, old] matrix that resamples one axis as torch's bicubic `interpolate(align_corners=False)` does.

    Plain: Keys' kernel with a = -0.75, border samples repeated. Antialiased: a = -0.5, the kernel stretched by the step
    when shrinking and renormalised inside the image (Pillow's rule).
    """
    a, stretch = (-0.5, max(step, 1.0)) if antialias else (-0.75, 1.0)
    centres = (np.arange(new) + 0.5) * step - 0.5
    near_taps = np.floor(centres)[:, None].astype(int) + np.arange(-1, 3)
    taps = np.broadcast_to(np.arange(old), (new, old)) if antialias else near_taps
    x = np.abs(taps - centres[:, None]) / stretch
    near = ((a + 2) * x - (a + 3)) * x**2 + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    values = np.where(x <= 1, near, np.where(x < 2, far, 0.0))
    if antialias:
        values = values / values.sum(1, keepdims=True)
    matrix = np.zeros((new, old))
    np.add.at(matrix, (np.arange(new)[:, None], np.clip(taps, 0, old - 1)), values)
    return matrix.astype(np.float32)
