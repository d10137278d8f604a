"""The three losses of BLIP-2 stage 1: contrastive (ITC), matching with hard negatives (ITM), captioning (LM).

Arithmetic of the official `Blip2Qformer.forward`, weights 1/1/1; batches are global, so all rows serve as negatives.
`positives` bool[B, B] marks pairs (image i, caption j) that share an image or a caption: templated captions repeat, and
a repeated caption is not a negative. None means the official diagonal.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pbs_jax.models.qformer import QFormer

LEAST_TEMPERATURE = 1e-3  # the learnt scalar may not turn the contrast round or divide by zero


def smoothed_cross_entropy(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    """Per-row cross-entropy [...] of float logits [..., V] against target probabilities [..., V], in float32.

    The targets are mixed with the uniform distribution as torch's `label_smoothing` does.
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -(1.0 - smoothing) * jnp.sum(targets * log_p, axis=-1) - smoothing * log_p.mean(axis=-1)


def normalised(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis in float32, with torch's floor of 1e-12 on the norm and a finite gradient at zero."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


def itc_similarity(images: jax.Array, texts: jax.Array, temperature: jax.Array) -> jax.Array:
    """Similarity [I, T] of image i and caption j: the best query's cosine over the temperature.

    images [I, Q, P] and texts [T, P] are projected features, not yet normalised.
    """
    scores = jnp.einsum("iqp,tp->iqt", normalised(images), normalised(texts))
    return scores.max(axis=1) / jnp.maximum(temperature, LEAST_TEMPERATURE)


def itc_loss(similarity: jax.Array, smoothing: float, positives: jax.Array | None = None) -> jax.Array:
    """Mean of image-to-text and text-to-image cross-entropy over [B, B]; several positives share the target mass."""
    matches = jnp.eye(similarity.shape[0], dtype=bool) if positives is None else _with_diagonal(positives)

    def one_way(logits: jax.Array, matches: jax.Array) -> jax.Array:
        targets = matches / matches.sum(axis=-1, keepdims=True)
        return smoothed_cross_entropy(logits, targets, smoothing).mean()

    return (one_way(similarity, matches) + one_way(similarity.T, matches.T)) / 2


def sample_hard_negatives(similarity: jax.Array, valid: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One column per row, drawn with probability softmax(similarity) over the row's valid entries.

    similarity float[B, B], valid bool[B, B]. Returns index int32[B] and found bool[B]; where a row has no valid entry
    `found` is False and the index means nothing: drop the row.
    """
    logits = jnp.where(valid, similarity.astype(jnp.float32), -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1), valid.any(axis=-1)


def itm_loss(logits: jax.Array, labels: jax.Array, keep: jax.Array) -> jax.Array:
    """Mean cross-entropy of match logits [N, 2] against labels int[N] over the rows kept bool[N]."""
    losses = smoothed_cross_entropy(logits, jax.nn.one_hot(labels, 2), 0.0)
    return jnp.sum(losses * keep) / jnp.maximum(keep.sum(), 1)


def lm_loss(logits: jax.Array, ids: jax.Array, pad_id: int, smoothing: float) -> jax.Array:
    """Next-token loss of logits [B, T, V] on ids int32[B, T]: mean over tokens that are not padding."""
    targets = ids[:, 1:]
    log_p = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    losses = -(1.0 - smoothing) * picked - smoothing * log_p.mean(axis=-1)
    keep = targets != pad_id
    return jnp.sum(losses * keep) / jnp.maximum(keep.sum(), 1)


def phase1_losses(
    qformer: QFormer,
    visual: jax.Array,
    ids: jax.Array,
    key: jax.Array,
    *,
    negatives: tuple[jax.Array, jax.Array] | None = None,
    positives: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Scalars itc, itm, lm and loss (their sum) of a batch of image-caption pairs.

    visual [B, N, W], ids int32[B, T]. `key` draws the hard negatives, unless `negatives` = (image for each text, text
    for each image), int32[B] both, gives them. Rows without any valid negative leave the ITM loss.
    """
    config, batch = qformer.config, ids.shape[0]
    drop = (None,) * 4 if dropout_key is None else jax.random.split(dropout_key, 4)
    queries, kv, images = qformer.image_pass(visual, key=drop[0])
    text = qformer.text_pass(ids, key=drop[1])
    similarity = itc_similarity(
        qformer.vision_proj(queries), qformer.text_proj(text[:, 0]), qformer.temperature[...].astype(jnp.float32)
    )
    itc = itc_loss(similarity, config.label_smoothing, positives)

    matches = jnp.eye(batch, dtype=bool) if positives is None else _with_diagonal(positives)
    if negatives is None:
        image_key, text_key = jax.random.split(key)
        fixed = jax.lax.stop_gradient(similarity)
        image_for_text, has_image = sample_hard_negatives(fixed.T, ~matches.T, image_key)
        text_for_image, has_text = sample_hard_negatives(fixed, ~matches, text_key)
    else:
        image_for_text, text_for_image = negatives
        has_image = has_text = jnp.ones((batch,), bool)

    own = jnp.arange(batch)
    logits = qformer.itm_logits(
        visual,
        jnp.concatenate([ids, ids, ids[text_for_image]]),
        index=jnp.concatenate([own, image_for_text, own]),
        key=drop[2],
        images=images,
    )
    labels = jnp.concatenate([jnp.ones(batch, int), jnp.zeros(2 * batch, int)])
    itm = itm_loss(logits, labels, jnp.concatenate([jnp.ones(batch, bool), has_image, has_text]))
    lm = lm_loss(qformer.lm_logits(ids, kv, key=drop[3]), ids, config.pad_id, config.label_smoothing)
    return {"itc": itc, "itm": itm, "lm": lm, "loss": itc + itm + lm}


def _with_diagonal(positives: jax.Array) -> jax.Array:
    return positives | jnp.eye(positives.shape[0], dtype=bool)
