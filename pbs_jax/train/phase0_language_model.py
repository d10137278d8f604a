"""Phase 0b, `language_model` (nano only): a small Qwen2.5-architecture decoder learns to read the visual slot.

In place of pretraining: the caption's tokens stand in the 32 visual positions (dropped for a tenth of the bins, so that
the model also knows what an empty slot means), the questions follow as shared-prefix branches; loss on the answers.
Reads training captions and questions only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data_prep.prompts import IMAGE_PAD
from data_prep.tokens import load_tokenizer
from pbs_jax.data.examples import Preloaded, QuestionBins
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.sizes import get_size
from pbs_jax.sharding.rules import DECODER_RULES
from pbs_jax.train.answers import answer_loss, evaluate_answers
from pbs_jax.train.phase import Phase, parameters
from pbs_jax.train.state import Params


def build(config: Any) -> Phase:
    """config: size, seed, data.root, batch_size, caption_dropout, weighting."""
    root = Path(config.data.root)
    tokenizer = load_tokenizer(root / "tokenizer")
    shape = get_size(config.size, tokenizer).decoder
    graph, decoder = parameters(lambda rngs: Decoder(shape, rngs=rngs), config.seed)
    slot_id = tokenizer.id(IMAGE_PAD)

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        model = nnx.merge(graph, trainable["language_model"])
        visual = batch["visual"]
        if key is not None:
            dropped = jax.random.bernoulli(key, config.caption_dropout, (visual.shape[0], 1))
            visual = jnp.where(dropped, slot_id, visual)
        return answer_loss(model, batch, model.embed(visual), slot_id, config.weighting)

    train = Preloaded(QuestionBins(root, "train", captions=tokenizer))
    val = Preloaded(QuestionBins(root, "val", captions=tokenizer))
    return Phase(
        name="language_model",
        trainable={"language_model": decoder},
        frozen={},
        rules={"language_model": DECODER_RULES},
        loss=loss,
        examples=train,
        evaluate=evaluate_answers(loss, val, config.batch_size),
        facts={
            "size": config.size,
            "tokenizer_sha256": tokenizer.sha256,
            "datasets": {"cell_qa_tokens": QuestionBins(root, "train").content_id},
            "trained_on": "train split",
        },
    )
