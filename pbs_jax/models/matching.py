"""Heads that find equal words from the first step on, for language models too small to discover them in a short training.

Mimetic initialisation (Trockman & Kolter, arXiv 2305.09828) in one place: in the first layer, the query heads of the first
key head start with queries equal to keys, on rotary frequencies so low that distance does not matter; their value is how
much the attended token carries the mark of the visual slot. So "is this word in the slot?" starts as one linear feature,
which true/false questions need. Everything is trained from there.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pbs_jax.models.decoder import DecoderConfig

STILL = 0.005  # rad per position: rotary frequencies below it do not turn noticeably over a prompt
SHARPNESS = 4.0  # of the match: equal tokens score about 3 x SHARPNESS above others, softmax's exponent
MARK = 3.0  # scale of the value, for an input of unit norm
OUTPUT = 0.3  # what the feature adds to the residual stream, as a norm


def add_matching_heads(params: dict[str, Any], config: DecoderConfig, slot_id: int, seed: int) -> dict[str, Any]:
    """`params` of a freshly drawn `Decoder`, with the first layer's heads set as the module says; the rest is kept.

    slot_id: the token whose embedding marks the slot. Deterministic in `seed`.
    """
    rng = np.random.default_rng(seed)
    dim, hd, half = config.dim, config.head_dim, config.head_dim // 2
    slow = np.flatnonzero(config.rope_theta ** -(np.arange(half) / half) < STILL)
    match = np.concatenate([slow, slow + half])
    projection = rng.normal(size=(dim, len(match))) * np.sqrt(SHARPNESS / dim)
    direction = rng.normal(size=dim)
    mark = np.asarray(params["embedding"][slot_id])
    kernels = {name: np.array(params["layers"][name]["kernel"]) for name in "qkvo"}
    q, k, v, o = kernels.values()
    k[0, :, :hd] = 0
    k[0][:, match] = projection
    v[0, :, 0] = mark / np.linalg.norm(mark) * MARK / np.sqrt(dim)
    for start in range(0, config.heads // config.kv_heads * hd, hd):
        q[0, :, start : start + hd] = 0
        q[0][:, start + match] = projection
        o[0, start] = direction / np.linalg.norm(direction) * OUTPUT
    layers = dict(params["layers"])
    for name, kernel in kernels.items():
        layers[name] = {**layers[name], "kernel": jnp.asarray(kernel, jnp.float32)}
    return {**params, "layers": layers}
