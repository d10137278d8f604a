"""A small written dataset (drawn cells) and the phases trained on it for a few steps, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pbs_jax.config import load

SMALL = {"steps": 4, "batch_size": 8, "log_every": 1, "save_every": 2, "eval_every": 1000}


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cells, cell_qa, cell_qa_tokens and tokenizer of 60 drawn cells."""
    from data_prep.pipeline import CellJob, run

    out = tmp_path_factory.mktemp("drawn")
    run(CellJob(source="synthetic", out=out, n_per_class=12, bin_length=256), say=lambda text: None)
    return out


def small_config(name: str, root: Path, **changes: Any) -> Any:
    """A shipped config cut to a few steps on `root`; `init_from` names come as init_from__NAME."""
    values = {**SMALL, **changes}
    flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in values.items()]
    return load(name, [f"--config.data.root={root}", *flags])


@pytest.fixture(scope="session")
def phases(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished phases 0a, 0b and 1 (four steps each) with the cell features between them."""
    from pbs_jax.data.features import write_features
    from pbs_jax.train.loop import train

    root = tmp_path_factory.mktemp("phases")
    work = {name: root / name for name in ("backbone", "language_model", "qformer")}
    train(small_config("phase0_backbone", drawn), work["backbone"])
    write_features(drawn, work["backbone"], drawn)
    train(small_config("phase0_language_model", drawn), work["language_model"])
    train(small_config("phase1_cell_representation", drawn), work["qformer"])
    return work


def cell_qa_config(drawn: Path, phases: dict[str, Path], **changes: Any) -> Any:
    """Phase 3 on the finished phases."""
    starts = {f"init_from__{name}": path for name, path in phases.items()}
    return small_config("phase3_cell_qa", drawn, **starts, **changes)
