"""Phase 4: slide question answering. Slide Perceiver and projector train on frozen patch features (paper 3.4.3)."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    config.phase = "slide_qa"
    config.max_patches = 2048  # of a slide, sampled evenly over it
    config.patch_dropout = 0.0  # share of a slide's patches hidden in a training step
    if config.size not in base.FULL:
        config.batch_size = 16  # bins: one slide with several questions each
        config.steps = 800
        config.optimizer.name = "muon"
        config.optimizer.lr = 5e-3
        if config.recipe == "paper":
            config.patch_dropout = 0.25  # nano's slides are few
    else:
        config.images_per_row, config.batch_size, config.epochs = 3, 32, 50  # three images' questions a row
        config.eval_every = -1
    base.official(config, epochs=50, batch_size=2)
    return base.finish(config)
