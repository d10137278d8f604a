"""Cross-entropy over a large vocabulary in slices: the logits of all answers at once never exist.

At 152,064 words the logits of 4,096 answer tokens take 2.5 GB in float32, and their gradient as much again. Here a few
positions at a time are scored, in the forward and, recomputed, in the backward pass. Same sums, same loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from pbs_jax.models.decoder import Decoder
from pbs_jax.sharding.mesh import BATCH, constrain

SLICE_BYTES = 512 * 2**20  # of float32 logits at a time, over all devices
SPLIT_VOCABULARY = P("data", None, ("fsdp", "tensor"))


def token_losses(model: Decoder, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy float32[B, A], right bool[B, A]: is the target the likeliest word) of hidden [B, A, D], targets int32[B, A].

    Over a mesh the vocabulary is split, not gathered: a row's few hidden states travel, the head's kernel stays.
    """
    batch, answers, _ = hidden.shape
    columns = max(SLICE_BYTES // (4 * batch * model.config.vocab), 1)

    def score(hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(constrain(hidden, P("data"))).astype(jnp.float32)
        logits = constrain(logits, SPLIT_VOCABULARY)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return constrain(losses, BATCH), constrain(logits.argmax(-1) == targets, BATCH)

    if columns >= answers:
        return score(hidden, targets)
    slices = -(-answers // columns)
    short = slices * columns - answers

    def cut(x: jax.Array) -> jax.Array:  # [B, A, ...] -> [slices, B, columns, ...]
        x = jnp.pad(x, ((0, 0), (0, short), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(batch, slices, columns, *x.shape[2:]).swapaxes(0, 1)

    step = jax.checkpoint(lambda _, inputs: (None, score(*inputs)))
    _, scored = jax.lax.scan(step, None, (cut(hidden), cut(targets)))
    losses, right = (x.swapaxes(0, 1).reshape(batch, -1)[:, :answers] for x in scored)
    return losses, right
