"""AdamW with linear warm-up and cosine decay to zero, as the paper (section 4.2) and the official trainer use it."""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from pbs_jax.train.state import path_name

# The official trainer decays everything but biases and norm parameters; queries, latents, temp and embeddings are decayed.
NO_DECAY = re.compile(r"(^|/)(bias|scale|[a-z_]*norm[a-z_0-9]*(/.*)?|ln_[a-z]+(/.*)?)$", re.IGNORECASE)


def decay_mask(params: Any) -> Any:
    """True where weight decay applies."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not NO_DECAY.search(path_name(path)), params)


def schedule(lr: float, steps: int, warmup_fraction: float) -> optax.Schedule:
    """0 -> lr over the first `warmup_fraction` of `steps`, then half a cosine to 0."""
    warmup = max(int(steps * warmup_fraction), 1)
    return optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, warmup + 1))


def make_optimizer(config: Any, steps: int) -> optax.GradientTransformation:
    """config: optimizer.{lr, weight_decay, warmup_fraction, clip, b1, b2, eps}."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config.lr, steps, config.warmup_fraction),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )
