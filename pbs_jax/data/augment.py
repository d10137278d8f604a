"""Augmentation on the device, keyed by the step: the same run draws the same pictures.

A blood cell has no up or down and stains differ between laboratories, so: flips, quarter turns, small shifts, and
colour changes of the order seen between stains. `Acquisition` adds what other laboratories do to a picture: stain, focus
and file compression. Sizes are never changed: cell size is a label.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# ImageNet statistics, as DINOv2 and the official transform use them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
BLUR_TAPS = 4  # pixels each side of a Gaussian's centre
JPEG_BLOCK = 8
# Quantisation of the discrete cosine coefficients at JPEG quality 50, luminance (ITU-T T.81, table K.1).
JPEG_STEPS = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ],
    np.float32,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Acquisition:
    """How far pictures may differ from those trained on; 0 leaves that part out.

    stain: half-width of the entries added to the unit matrix that mixes the channels' optical densities.
    blur: largest standard deviation of a Gaussian, in pixels.
    compression: largest multiple of the quantisation steps of JPEG quality 50, on every channel alike.
    """

    stain: float = 0.0
    blur: float = 0.0
    compression: float = 0.0


def normalise(images: jax.Array) -> jax.Array:
    """uint8 or float [0, 255] [B, H, W, 3] -> float32, ImageNet-normalised."""
    return (images.astype(jnp.float32) / 255.0 - jnp.asarray(MEAN)) / jnp.asarray(STD)


def augment(images: jax.Array, key: jax.Array, *, shift: int = 6, colour: float = 0.12) -> jax.Array:
    """uint8[B, H, H, 3] -> float32[B, H, H, 3] in [0, 255].

    shift: most pixels moved in each direction (edge pixels repeat); colour: half-width of the gain per channel.
    """
    turn_key, flip_key, shift_key, gain_key, bright_key, mix_key = jax.random.split(key, 6)
    batch, side = images.shape[:2]
    x = images.astype(jnp.float32)
    transpose = jax.random.bernoulli(turn_key, 0.5, (batch, 1, 1, 1))
    x = jnp.where(transpose, x.swapaxes(1, 2), x)
    flips = jax.random.bernoulli(flip_key, 0.5, (2, batch, 1, 1, 1))
    x = jnp.where(flips[0], x[:, ::-1], x)
    x = jnp.where(flips[1], x[:, :, ::-1], x)
    padded = jnp.pad(x, ((0, 0), (shift, shift), (shift, shift), (0, 0)), mode="edge")
    offsets = jax.random.randint(shift_key, (batch, 2), 0, 2 * shift + 1)
    cut = jax.vmap(lambda image, offset: jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), (side, side, 3)))
    x = cut(padded, offsets)
    gain = 1.0 + colour * jax.random.uniform(gain_key, (batch, 1, 1, 3), minval=-1.0, maxval=1.0)
    brightness = 20.0 * jax.random.uniform(bright_key, (batch, 1, 1, 1), minval=-1.0, maxval=1.0)
    grey = x.mean(-1, keepdims=True)
    saturation = 1.0 + 0.3 * jax.random.uniform(mix_key, (batch, 1, 1, 1), minval=-1.0, maxval=1.0)
    return jnp.clip((grey + saturation * (x - grey)) * gain + brightness, 0.0, 255.0)


def acquire(images: jax.Array, key: jax.Array, limits: Acquisition) -> jax.Array:
    """float32[B, H, H, 3] in [0, 255] as another microscope might have taken them; each picture draws its own strength.

    Raises ValueError for compression of a side that is no multiple of 8.
    """
    stain_key, blur_key, compression_key = jax.random.split(key, 3)
    if limits.stain:
        images = _stained(images, stain_key, limits.stain)
    if limits.blur:
        images = _blurred(images, limits.blur * jax.random.uniform(blur_key, (len(images), 1, 1, 1)))
    if limits.compression:
        images = _compressed(images, limits.compression * jax.random.uniform(compression_key, (len(images),)))
    return images


def _stained(images: jax.Array, key: jax.Array, width: float) -> jax.Array:
    density = -jnp.log((images + 1.0) / 256.0)
    mix = jnp.eye(3) + width * jax.random.uniform(key, (len(images), 3, 3), minval=-1.0, maxval=1.0)
    return jnp.clip(256.0 * jnp.exp(-jnp.einsum("bhwc,bcd->bhwd", density, mix)) - 1.0, 0.0, 255.0)


def _blurred(images: jax.Array, sigma: jax.Array) -> jax.Array:
    taps = jnp.arange(-BLUR_TAPS, BLUR_TAPS + 1)
    weights = jax.nn.softmax(-(taps**2) / (2 * jnp.maximum(sigma, 1e-2) ** 2), axis=-1)  # [B, 1, 1, taps]
    for axis in (1, 2):
        widths = [(0, 0)] * 4
        widths[axis] = (BLUR_TAPS, BLUR_TAPS)
        padded = jnp.pad(images, widths, mode="edge")
        side = images.shape[axis]
        shifted = (jax.lax.slice_in_dim(padded, k, k + side, axis=axis) for k in range(len(taps)))
        images = sum(weights[..., k, None] * part for k, part in enumerate(shifted))
    return images


def _compressed(images: jax.Array, strength: jax.Array) -> jax.Array:
    batch, side = images.shape[:2]
    if side % JPEG_BLOCK:
        raise ValueError(f"compression works on blocks of {JPEG_BLOCK} px: a side of {side} px is no multiple")
    order = np.arange(JPEG_BLOCK)
    cosine = np.cos(np.pi * (2 * order + 1) * order[:, None] / (2 * JPEG_BLOCK)) * np.sqrt(2 / JPEG_BLOCK)
    cosine[0] /= np.sqrt(2)
    blocks = images.reshape(batch, side // JPEG_BLOCK, JPEG_BLOCK, side // JPEG_BLOCK, JPEG_BLOCK, 3) - 128.0
    steps = jnp.maximum(JPEG_STEPS[:, None, :, None] * strength.reshape(-1, 1, 1, 1, 1, 1), 1e-3)
    coefficients = jnp.einsum("ui,vj,bxiyjc->bxuyvc", cosine, cosine, blocks)
    rounded = jnp.round(coefficients / steps) * steps
    restored = jnp.einsum("ui,vj,bxuyvc->bxiyjc", cosine, cosine, rounded) + 128.0
    return jnp.clip(restored.reshape(images.shape), 0.0, 255.0)
