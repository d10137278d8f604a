"""Optimisers under linear warm-up and cosine decay: the paper's AdamW (section 4.2), and Muon for what starts from nothing."""

from __future__ import annotations

import re
from typing import Any

import jax
import optax
import optax.contrib

from data_prep.schema import DataError
from pbs_jax.train.state import path_name

# The official trainer decays everything but biases and norm parameters; queries, latents, temp and embeddings are decayed.
NO_DECAY = re.compile(r"(^|/)(bias|scale|[a-z_]*norm[a-z_0-9]*(/.*)?|ln_[a-z]+(/.*)?)$", re.IGNORECASE)

MUON_RMS = 0.2


def decay_mask(params: Any) -> Any:
    """True where weight decay applies."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not NO_DECAY.search(path_name(path)), params)


def schedule(lr: float, steps: int, warmup_fraction: float) -> optax.Schedule:
    """0 -> lr over the first `warmup_fraction` of `steps`, then half a cosine to 0."""
    warmup = max(int(steps * warmup_fraction), 1)
    return optax.warmup_cosine_decay_schedule(0.0, lr, warmup, max(steps, warmup + 1))


def make_optimizer(config: Any, steps: int) -> optax.GradientTransformation:
    """config: optimizer.{name, lr, weight_decay, warmup_fraction, clip, b1, b2, eps}. Raises DataError for another name."""
    rate = schedule(config.lr, steps, config.warmup_fraction)
    clip = optax.clip_by_global_norm(config.clip)
    match config.name:
        case "adamw":
            decay = {"weight_decay": config.weight_decay, "mask": decay_mask}
            return optax.chain(clip, optax.adamw(rate, b1=config.b1, b2=config.b2, eps=config.eps, **decay))
        case "muon":
            # From scratch on few examples, orthogonalised steps need several times fewer of them (Jordan et al. 2024).
            # An element moves by 0.2 x lr a step (Moonlight, 2502.16982), in matrices and, through Adam, elsewhere.
            matrices = optax.contrib.muon(
                rate,
                adam_learning_rate=lambda step: MUON_RMS * rate(step),
                weight_decay=config.weight_decay,
                adam_b2=config.b2,
                consistent_rms=MUON_RMS,
                muon_weight_dimension_numbers=matrix_dimensions,
            )
            return optax.chain(clip, matrices)
    raise DataError(f'config.optimizer.name "{config.name}" is unknown: use adamw or muon')


def matrix_dimensions(params: Any) -> Any:
    """Muon's view of the kernels ([in, out], or [layers, in, out] layer by layer); everything else goes to Adam."""

    def dimensions(path: tuple[Any, ...], leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
        is_kernel = path_name(path).endswith("kernel")
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if is_kernel else None

    return jax.tree_util.tree_map_with_path(dimensions, params)
