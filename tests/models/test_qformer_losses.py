"""The three losses by hand, and what repeated captions do to positives and negatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.qformer_losses import itc_loss, itm_loss, lm_loss, phase1_losses, sample_hard_negatives
from tests.models.golden import fresh, run


def test_repeated_captions_and_images_are_positives() -> None:
    """Captions A A A B B C D E, cells 6 and 7 from one image (ALBEF issue 126 and others)."""
    captions = np.array([0, 0, 0, 1, 1, 2, 3, 4])
    positives = (captions[:, None] == captions) | (np.add.outer(np.arange(8), np.arange(8)) == 13)
    similarity = 3.0 * jax.random.normal(jax.random.key(0), (8, 8))
    targets = 0.9 * positives / positives.sum(1, keepdims=True) + 0.1 / 8
    log_p = [np.asarray(jax.nn.log_softmax(logits, axis=1)) for logits in (similarity, similarity.T)]
    by_hand = -np.mean([(targets * rows).sum(1) for rows in log_p])
    np.testing.assert_allclose(itc_loss(similarity, 0.1, jnp.asarray(positives)), by_hand, rtol=1e-5)
    keys = jax.random.split(jax.random.key(0), 200)
    drawn, found = jax.vmap(lambda key: sample_hard_negatives(similarity, jnp.asarray(~positives), key))(keys)
    assert found.all()
    assert not positives[np.arange(8), np.asarray(drawn)].any()


def test_hard_negatives_follow_their_probabilities() -> None:
    similarity = jnp.log(jnp.array([[1.0, 2.0, 1.0], [5.0, 1.0, 3.0], [1.0, 1.0, 9.0]]))
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn, _ = jax.vmap(lambda key: sample_hard_negatives(similarity, ~jnp.eye(3, dtype=bool), key))(keys)
    share = (drawn[..., None] == jnp.arange(3)).mean(0)
    np.testing.assert_allclose(share, [[0, 2 / 3, 1 / 3], [5 / 8, 0, 3 / 8], [0.5, 0.5, 0]], atol=0.03)


def test_a_row_without_negatives_leaves_itm() -> None:
    """Two pairs with one caption have no negatives: ITM is the loss of the matching rows alone, nothing is drawn."""
    config = QFormerConfig.nano(
        dim=16, layers=2, heads=2, ffn_dim=16, encoder_width=8, queries=2, vocab=20, pad_id=0, cls_id=1, dec_id=3
    )
    graph, params = nnx.split(fresh(lambda: QFormer(config, rngs=nnx.Rngs(0))))
    visual = jax.random.normal(jax.random.key(1), (2, 3, 8))
    ids = jnp.array([[1, 5, 6, 2], [1, 5, 6, 2]])

    def both(params: nnx.State, visual: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        model = nnx.merge(graph, params)
        losses = phase1_losses(model, visual, ids, jax.random.key(0), positives=jnp.ones((2, 2), bool))
        return losses, itm_loss(model.itm_logits(visual, ids), jnp.ones(2, int), jnp.ones(2, bool))

    losses, matching = run(both, params, visual)
    np.testing.assert_allclose(losses["itm"], matching, rtol=1e-5)
    np.testing.assert_allclose(losses["loss"], losses["itc"] + losses["itm"] + losses["lm"], rtol=1e-6)
    _, found = sample_hard_negatives(jnp.zeros((1, 1)), jnp.zeros((1, 1), bool), jax.random.key(0))  # a batch of one
    assert not found.any()


def test_lm_loss_ignores_padding() -> None:
    logits = jax.random.normal(jax.random.key(0), (1, 5, 7))
    log_p = jax.nn.log_softmax(logits[0])
    by_hand = -np.mean([0.9 * log_p[0, 2] + 0.1 * log_p[0].mean(), 0.9 * log_p[1, 5] + 0.1 * log_p[1].mean()])
    np.testing.assert_allclose(lm_loss(logits, jnp.array([[3, 2, 5, 0, 0]]), 0, 0.1), by_hand, rtol=1e-6)
