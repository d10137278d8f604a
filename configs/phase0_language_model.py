"""Phase 0b: nano's language model learns to answer from the visual slot, where the caption stands in for an image.

Sizes small, 3b and 7b have no such phase: their language models are real ones, imported with `pbs weights import`.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    if config.size != "nano":
        raise ValueError(f'phase0_language_model is for size nano: size "{config.size}" imports a real language model')
    config.phase = "language_model"
    config.lesson = "all"  # or "drill", the one before (phase0_language_model_drill)
    config.batch_size = 12  # bins of about nine questions each
    config.steps = 250
    config.eval_bins = 256  # of val, evenly spread
    config.optimizer.name = "muon"
    config.optimizer.lr = 2e-3
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.0
    config.weighting = "answer"  # letters and true/false are the hard part, and one token each
    config.caption_dropout = 0.1  # share of examples whose slot is emptied, so that a missing image is no surprise
    config.slot_mark = 0.3  # share of the image token's embedding that is added to the slot's
    config.drill = {
        "bin_length": 128,
        "slot_facts": (1, 2, 3),  # facts that a slot names
        "kinds": {"true_false": 0.5, "multiple_choice": 0.25, "fill_blank": 0.25},  # how often each is asked
    }
    return base.finish(config)
