"""Phase 0b, `language_model` (nano only): a small Qwen2.5-architecture decoder learns to read the visual slot.

In place of pretraining: the caption's tokens stand in the 32 visual positions (dropped for a tenth of the bins, so that
the model also knows what an empty slot means), the questions follow as shared-prefix branches; loss on the answers.
Two lessons, each a run of its own: "drill" (a few drawn facts in the slot, any number of questions about them), then "all",
which goes on with whole captions. Reads training captions and questions only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data_prep.prompts import IMAGE_PAD
from data_prep.schema import DataError
from data_prep.tokens import Tokenizer, load_tokenizer
from pbs_jax.data.examples import Drill, Preloaded, QuestionBins
from pbs_jax.data.slide_examples import CaptionedSlides, Joined
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.matching import add_matching_heads
from pbs_jax.models.sizes import get_size
from pbs_jax.sharding.rules import DECODER_RULES
from pbs_jax.train import handover
from pbs_jax.train.answers import answer_loss, answer_weight, evaluate_answers
from pbs_jax.train.phase import Phase, parameters
from pbs_jax.train.state import Params


def build(config: Any) -> Phase:
    """config: size, seed, data.{root, slides}, batch_size, caption_dropout, slot_mark, weighting, lesson, drill, eval_bins and
    init_from.language_model (the drill's workdir; empty = from scratch)."""
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
        # As a projector's bias can: the slot's tokens say that they are of the slot.
        visual = model.embed(visual) + config.slot_mark * model.embed(jnp.full_like(visual, slot_id))
        return answer_loss(model, batch, visual, slot_id, config.weighting)

    before = config.init_from.language_model
    if before:
        facts = handover.read(before, ("language_model",))["facts"]
        handover.same_tokenizer(before, facts, tokenizer, root / "tokenizer")
        decoder = handover.load(before, ["language_model"])["language_model"]
    else:
        decoder = add_matching_heads(decoder, shape, slot_id, config.seed)
    train, val = (_lesson(config, root, split, tokenizer) for split in ("train", "val"))
    return Phase(
        name="language_model",
        trainable={"language_model": decoder},
        frozen={},
        rules={"language_model": DECODER_RULES},
        loss=loss,
        weight=answer_weight(config.weighting),
        examples=Preloaded(train),
        evaluate=evaluate_answers(loss, Preloaded(val, config.eval_bins), config.batch_size),
        facts={
            "size": config.size,
            "tokenizer_sha256": tokenizer.sha256,
            "datasets": {"cell_qa_tokens": train.content_id} if config.lesson == "all" else {},
            "trained_on": "train split",
            "lesson": config.lesson,
        },
        example_id=train.image_id,
        loaded=("language_model",) if before else (),
    )


def _lesson(config: Any, root: Path, split: str, tokenizer: Tokenizer) -> QuestionBins | Joined:
    match config.lesson:
        case "drill":
            train = split == "train"
            count = config.steps * config.batch_size if train else config.eval_bins
            return Drill(tokenizer, config.drill, count, seed=2 * config.seed + train)
        case "all":
            cells = QuestionBins(root, split, captions=tokenizer)
            slides = config.data.slides
            return Joined(cells, CaptionedSlides(Path(slides), split, tokenizer)) if slides else cells
    raise DataError(f'config.lesson "{config.lesson}" is unknown: use drill or all')
