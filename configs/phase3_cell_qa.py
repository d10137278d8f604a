"""Phase 3: cell question answering. Q-Former and projector train, backbone and language model are frozen."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    config.phase = "cell_qa"
    if config.size not in base.FULL:
        config.batch_size = 16  # bins: one image with several questions each
        config.steps = 600
        config.optimizer.name = "muon"
        config.optimizer.lr = 5e-3
    else:
        config.images_per_row, config.batch_size, config.epochs = 3, 32, 20  # three images' questions a row
        config.eval_every = -1
    base.official(config, epochs=20, batch_size=2)
    return base.finish(config)
