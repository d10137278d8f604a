"""Phase 0b: nano's language model learns to answer from the visual slot, where the caption stands in for an image.

Sizes small and 7b have no such phase: their language models are real ones, imported with `pbs weights import`.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    if config.size != "nano":
        raise ValueError(f'phase0_language_model is for size nano: size "{config.size}" imports a real language model')
    config.phase = "language_model"
    config.batch_size = 16  # bins of about nine questions each
    config.steps = 700
    config.optimizer.name = "muon"
    config.optimizer.lr = 1e-2  # from scratch
    config.weighting = "answer"  # letters and true/false are the hard part, and one token each
    config.caption_dropout = 0.1  # share of examples whose slot is emptied, so that a missing image is no surprise
    return base.finish(config)
