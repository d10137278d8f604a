"""Loss on answer tokens of shared-prefix bins, used by every phase that trains through a language model.

A bin holds one image's prefix (segment 0) and several question branches (segments 1, 2, ...). A branch sees the prefix
and itself, never another branch. A row may hold several images' bins (`groups`, `pbs_jax.data.rows`). Logits are
computed only at the supervised positions, attention where `keys` lists something to see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data_prep.schema import DataError
from pbs_jax.data.rows import QUERY_BLOCK, sees
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.int8 import host_first, int8_kernels
from pbs_jax.models.layers import BlockMask
from pbs_jax.models.pbs_vl import insert_visual
from pbs_jax.models.sizes import Size
from pbs_jax.sharding.rules import DECODER_RULES
from pbs_jax.train import handover
from pbs_jax.train.chunked_loss import token_losses
from pbs_jax.train.phase import Example, batches
from pbs_jax.train.state import Params
from pbs_jax.train.step import LossFn, WeightFn


def branch_mask(
    segments: jax.Array, groups: jax.Array | None = None, keys: jax.Array | None = None
) -> jax.Array | BlockMask:
    """segments int32[B, L], groups int32[B, L] (the image of each token; None: one image a row) -> bool[B, L, L]:
    query i may see key j (`pbs_jax.data.rows.sees`). keys int32[B, N, S] of `pbs_jax.data.rows.KeyLists`: a BlockMask."""
    places = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    tokens = (places, segments, jnp.zeros_like(segments) if groups is None else groups)
    if keys is None:
        return sees([x[:, :, None] for x in tokens], [x[:, None, :] for x in tokens])
    batch, blocks, _ = keys.shape
    beyond = ((0, 0), (0, blocks * QUERY_BLOCK - segments.shape[1]))
    query = [jnp.pad(x, beyond, constant_values=-1).reshape(batch, blocks, QUERY_BLOCK, 1) for x in tokens]
    listed = jnp.maximum(keys, 0)
    key = [jnp.take_along_axis(x[:, None], listed, axis=2)[:, :, None] for x in tokens]
    return BlockMask(listed, sees(query, key) & (keys >= 0)[:, :, None])


def answer_loss(
    model: Decoder, batch: dict[str, jax.Array], visual: jax.Array, slot_id: int, weighting: str
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy over all answers of the batch, with the shares of tokens and of first tokens that are right.

    batch: a batch of `pbs_jax.data.examples.QuestionBins`, or of `pbs_jax.data.rows.pack_images` made of them;
    visual: [B, Q, D] embeddings for the slots of a row, Q counting those of all its images.
    weighting: "token", the mean over answer tokens as Hugging Face's ForCausalLM; "answer", every answer counts alike, so
    that one letter weighs as much as a described cell. Raises DataError for another one.
    """
    if weighting not in ("token", "answer"):
        raise DataError(f'config.weighting "{weighting}" is unknown: use token or answer')
    embeds = insert_visual(model.embed(batch["tokens"]), batch["tokens"], visual, slot_id)
    positions = batch["positions"].transpose(1, 0, 2)
    hidden, _ = model(embeds, positions, branch_mask(batch["segments"], batch.get("groups"), batch.get("keys")))
    where = jnp.maximum(batch["answers"], 0)
    real = batch["answers"] >= 0
    targets = jnp.where(real, jnp.take_along_axis(batch["targets"], where, axis=1), 0)
    losses, right = token_losses(model, jnp.take_along_axis(hidden, where[..., None], axis=1), targets)
    losses = jnp.where(real, losses, 0.0)
    weights = answer_weights(batch, weighting)
    # A batch without supervised tokens gives zero gradient, not NaN.
    loss = (losses * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
    firsts = real & batch["firsts"]
    return loss, {
        "token_accuracy": (right & real).sum() / jnp.maximum(real.sum(), 1),
        "first_token_accuracy": (right & firsts).sum() / jnp.maximum(firsts.sum(), 1),
    }


def answer_weights(batch: dict[str, jax.Array], weighting: str) -> jax.Array:
    """float32[B, A]: what each supervised position counts for in `answer_loss`; 0 for padding."""
    real = batch["answers"] >= 0
    return real.astype(jnp.float32) if weighting == "token" else jnp.where(real, batch["shares"], 0.0)


def answer_weight(weighting: str) -> WeightFn:
    """What a whole batch counts for: see `answer_weights`."""
    return lambda batch: answer_weights(batch, weighting).sum()


def evaluate_answers(
    loss: LossFn, examples: Sequence[Example], size: int
) -> Callable[[Params, Params], dict[str, float]]:
    """Validation: loss and token accuracy weighted by supervised tokens, every bin once."""
    step = jax.jit(lambda trainable, frozen, batch: loss(trainable, frozen, batch, None))

    def evaluate(trainable: Params, frozen: Params) -> dict[str, float]:
        totals: dict[str, float] = {}
        weight = 0.0
        for batch, real in batches(examples, size):
            batch["answers"] = np.where(real[:, None], batch["answers"], -1)
            tokens = float((batch["answers"] >= 0).sum())
            value, metrics = step(trainable, frozen, batch)
            for name, metric in {"loss": value, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + float(metric) * tokens
            weight += tokens
        return {name: total / weight for name, total in totals.items()}

    return evaluate


def frozen_language_model(config: Any, size: Size) -> Params:
    """The tree of config.init_from.language_model as a phase holds it: in the size's frozen dtype, int8 kernels if asked for."""
    mesh = jax.sharding.get_mesh()
    host = host_first(config.int8, 1 if mesh.empty else mesh.size)
    rules = {} if host else {"language_model": DECODER_RULES}
    tree = handover.load(config.init_from.language_model, ["language_model"], host, rules)["language_model"]
    tree = frozen_cast(tree, size.frozen_dtype)
    return int8_kernels(tree) if config.int8 else tree


def frozen_cast(tree: Any, dtype: str) -> Any:
    """A frozen tree in the size's frozen dtype (fp32 on CPU sizes, bf16 for 7b)."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def with_attention(size: Size, attention: str) -> Size:
    """`config.attention`: the decoder's in training. Raises DataError for cuDNN's without a GPU or in float32."""
    if attention == "cudnn" and (jax.default_backend() != "gpu" or size.decoder.dtype != "bfloat16"):
        raise DataError(
            f'config.attention="cudnn" is for bfloat16 on an NVIDIA GPU, here is {size.decoder.dtype} on '
            f'{jax.default_backend()}: leave it ""'
        )
    return dataclasses.replace(size, decoder=dataclasses.replace(size.decoder, attention=attention))
