"""Which file builds which phase: one match, no registry."""

from __future__ import annotations

from typing import Any

from data_prep.schema import DataError
from pbs_jax.train.phase import Phase

NAMES = (
    "backbone",
    "language_model",
    "cell_representation",
    "cell_patch_alignment",
    "cell_qa",
    "slide_qa",
    "classifier",
)


def build_phase(config: Any) -> Phase:
    """The phase that `config.phase` names. Raises DataError for an unknown name."""
    match config.phase:
        case "backbone":
            from pbs_jax.train.phase0_backbone import build
        case "language_model":
            from pbs_jax.train.phase0_language_model import build
        case "cell_representation":
            from pbs_jax.train.phase1_cell_representation import build
        case "cell_patch_alignment":
            from pbs_jax.train.phase2_cell_patch_alignment import build
        case "cell_qa":
            from pbs_jax.train.phase3_cell_qa import build
        case "slide_qa":
            from pbs_jax.train.phase4_slide_qa import build
        case "classifier":
            from pbs_jax.train.classifier import build
        case _:
            raise DataError(f'config.phase "{config.phase}" is unknown: use one of {", ".join(NAMES)}')
    return build(config)
