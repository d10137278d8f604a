"""Augmentation on the device, keyed by the step: the same run draws the same pictures.

A blood cell has no up or down and stains differ between laboratories, so: flips, quarter turns, small shifts, and
colour changes of the order seen between stains. Sizes are never changed: cell size is a label.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# ImageNet statistics, as DINOv2 and the official transform use them.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


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
