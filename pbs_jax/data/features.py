"""Frozen backbone features, computed once: `pbs data features` writes bfloat16 tokens of every cell (`cell_features`).

Keyed by the backbone's hash: features of another backbone or of other cells are another dataset.
"""

from __future__ import annotations

from pathlib import Path

from data_prep.io import read_manifest
from pbs_jax.data.slide_features import PatchEncoder, token_records, write_in_units

CELLS_PER_UNIT = 1024  # what a killed run loses at most; a batch of eight devices divides it


def write_features(root: Path, backbone: Path, out: Path) -> str:
    """out/cell_features: features of all cells of root/cells by the backbone of a finished phase 0a; returns the content id.

    Tokens before the last norm (official_code 3.1), bfloat16[1+N, D]. A finished dataset of the same inputs is kept, and
    a killed run goes on.
    """
    encoder = PatchEncoder(backbone, windows=1)
    config = {name: encoder.config[name] for name in ("backbone_sha256", "image_size")}
    inputs = {"cells": read_manifest(root / "cells")["content_id"]}
    features, records = token_records(encoder, "cell_id")
    return write_in_units(
        root / "cells", out, "cell_features", features, records, config, inputs, per_unit=CELLS_PER_UNIT
    )
