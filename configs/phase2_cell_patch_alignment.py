"""Phase 2: cell-patch alignment. Patch Perceiver and two projections; backbone and Q-Former are frozen (paper 3.4.2)."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str | None = None) -> ConfigDict:
    config = base.get_config(arg)
    config.phase = "cell_patch_alignment"
    config.alignment = (
        "official" if config.recipe == "official" else "paper"
    )  # which of the two losses, see models/alignment
    # The cells' projection: "trained" as in the released code, where losses fall without content, or "fixed".
    config.target = "trained" if config.recipe == "official" else "fixed"
    config.global_weight = 1.0  # the paper gives no weights; these are the released code's
    config.local_weight = 0.5
    if config.size not in base.FULL:
        config.steps = 200
        config.optimizer.name = "muon"
        config.optimizer.lr = 5e-3
    else:
        config.epochs, config.eval_every = 100, -1
    base.official(config, epochs=100, batch_size=32)
    return base.finish(config)
