"""Phase 0a: the stand-in vision backbone of nano and small, a ViT trained on the cell labels (train split only).

Sizes 3b and 7b have no such phase: their backbone is DinoBloom, imported with `pbs weights import`.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    if config.size in base.FULL:
        raise ValueError(
            f'phase0_backbone has no size "{config.size}": import DinoBloom with `pbs weights import` instead'
        )
    config.phase = "backbone"
    config.batch_size = 48
    config.steps = 800
    config.optimizer.name = "muon"
    config.optimizer.lr = 1e-2  # from scratch
    config.optimizer.weight_decay = 0.05  # usual for a ViT from scratch
    config.label_smoothing = 0.1
    config.attribute_weight = 4.0  # of the mean loss over the eleven attributes, beside the cell type's
    # How far another laboratory's pictures may differ (pbs_jax/data/augment.py); 0 = trained on pictures as they are.
    config.acquisition = {"stain": 0.0, "blur": 0.0, "compression": 0.0}
    return base.finish(config)
