"""Heads on the frozen backbone (paper 9.2): `config.target` is "subtype" (five classes) or "white_cell" (WBC or not)."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    config.phase = "classifier"
    config.target = "subtype"
    config.hidden = 256  # width of the feed-forward layer
    config.batch_size = 64
    config.steps = 600  # at most
    config.eval_every = 50
    config.early_stopping.metric = "auc"
    config.optimizer.lr = 1e-3  # Adam with cosine; the paper tells neither rate nor patience
    config.optimizer.weight_decay = 0.0
    return base.finish(config)
