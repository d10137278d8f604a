"""Phase 1: cell representation. Q-Former on cell features and captions: ITC + ITM + LM (paper 3.5)."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    config.phase = "cell_representation"
    config.text_length = 40 if config.size == "small" else 32  # with [CLS] and [SEP]; SmolLM2 cuts captions finer
    if config.size not in base.FULL:
        config.steps = 100
        config.optimizer.name = "muon"
        config.optimizer.lr = 5e-3  # small and from scratch; AdamW at 5e-5 is for BERT's weights
        if config.size == "small":  # Muon would orthogonalise a caption head of 49,152 columns each step
            config.optimizer.name, config.optimizer.lr = "adamw", 5e-4
    else:
        config.epochs, config.eval_every = 100, -1
    base.official(config, epochs=100, batch_size=32)
    return base.finish(config)
