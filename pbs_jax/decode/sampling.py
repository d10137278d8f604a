"""How the next token is chosen from logits: repetition penalty, then greedy, or temperature, top-k and top-p as transformers does.

All numbers are traced, not compiled in: one program serves every setting; only greedy and sampling are two programs.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from data_prep.schema import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 are off; penalty 1.0 is off (the official code's is 1.05); seed: of the draws.

    Raises DataError for a value out of range.
    """

    penalty: float = 1.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("penalty", 0.01, 100.0),
            ("temperature", 0.0, 100.0),
            ("top_k", 0, 2**31 - 1),
            ("top_p", 1e-6, 1.0),
            ("seed", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise DataError(f"{name} is {value}: give a number from {low:g} to {high:g}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def plain(self) -> bool:
        """Greedy and without penalty: nothing to pass on."""
        return self.greedy and self.penalty == 1.0

    def numbers(self) -> dict[str, jax.Array]:
        """What `choose` reads: float32[] penalty, temperature, top_p, int32[] top_k."""
        floats = {name: jnp.float32(getattr(self, name)) for name in ("penalty", "temperature", "top_p")}
        return floats | {"top_k": jnp.int32(self.top_k)}


def penalised(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Hugging Face's repetition penalty: logits float32[B, V] of tokens bool[B, V] that occurred are made less likely."""
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def restricted(logits: jax.Array, numbers: dict[str, jax.Array]) -> jax.Array:
    """float32[B, V] logits over the temperature; -inf outside the top_k likeliest and, of these, outside the fewest that
    together have the probability top_p."""
    scaled = logits / numbers["temperature"]
    ranked = jnp.sort(scaled, axis=-1, descending=True)
    last, count = ranked.shape[-1] - 1, numbers["top_k"]
    lowest = jnp.take(ranked, jnp.where(count > 0, jnp.minimum(count - 1, last), last), axis=-1)[:, None]
    share = jax.nn.softmax(jnp.where(ranked >= lowest, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(share, axis=-1) - share
    needed = ((before < numbers["top_p"]) | (numbers["top_p"] >= 1)) & (ranked >= lowest)
    lowest = jnp.where(needed, ranked, jnp.inf).min(-1, keepdims=True)
    return jnp.where(scaled >= lowest, scaled, -jnp.inf)


def choose(
    logits: jax.Array,
    seen: jax.Array,
    numbers: dict[str, jax.Array] | None,
    keys: jax.Array | None,
    step: jax.Array | int,
) -> jax.Array:
    """int32[B] next tokens. keys: one random key a row, None = greedy. A row's draws depend on its key and `step` alone."""
    if numbers is not None:
        logits = penalised(logits, seen, numbers["penalty"])
    if numbers is None or keys is None:
        return logits.argmax(-1).astype(jnp.int32)
    draws = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
    return jax.vmap(jax.random.categorical)(draws, restricted(logits, numbers)).astype(jnp.int32)
