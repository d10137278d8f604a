"""Phase 0b, first lesson: nano's language model learns from drawn facts to compare a question's words with the slot's.

Text only: no cell is read. `phase0_language_model` goes on from here with `init_from.language_model`.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base, phase0_language_model


def get_config(arg: str | None = None) -> ConfigDict:
    config = phase0_language_model.get_config(arg)
    config.lesson = "drill"
    config.batch_size = 24
    config.steps = 300
    config.caption_dropout = 0.05
    config.optimizer.lr = 3e-3  # from scratch
    config.optimizer.warmup_fraction = 0.03
    return base.finish(config)
