"""Frozen kernels as int8 with one scale an output channel: half the bytes of bfloat16, nothing else changes.

Why not qwix: it rewrites modules at call time, while here layers are stacked and scanned as plain trees; the whole of it
is one rounding. Off by default: `pbs perf int8` prints what it does to the logits of real prompts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding


def int8_kernels(language_model: Any) -> Any:
    """A decoder's tree with the kernels of its layers and head, [..., in, out], as int8 and a "scale" float32 [..., out].

    Embeddings, norms and biases stay as they are. The result fits `DecoderConfig(int8=True)`.
    """

    def convert(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        if "kernel" not in node:
            return {name: convert(child) for name, child in node.items()}
        kernel = node["kernel"].astype(jnp.float32)
        scale = jnp.maximum(jnp.abs(kernel).max(axis=-2), 1e-12) / 127.0
        return {**node, "kernel": jnp.round(kernel / scale[..., None, :]).astype(jnp.int8), "scale": scale}

    return {
        name: jax.jit(convert)(child) if name in ("layers", "lm_head") else child
        for name, child in language_model.items()
    }


def host_first(int8: bool, devices: int) -> SingleDeviceSharding | None:
    """Where a language model is read before its kernels become int8: on the host when one device is to hold it all, which
    need not have room for it in bfloat16. None: where it is to lie."""
    return SingleDeviceSharding(jax.local_devices(backend="cpu")[0]) if int8 and devices == 1 else None


def logit_kl(reference: jax.Array, other: jax.Array) -> jax.Array:
    """KL(reference || other) in nats of float logits [..., V] -> float32[...]."""
    p = jax.nn.log_softmax(reference.astype(jnp.float32), axis=-1)
    q = jax.nn.log_softmax(other.astype(jnp.float32), axis=-1)
    return (jnp.exp(p) * (p - q)).sum(-1)
