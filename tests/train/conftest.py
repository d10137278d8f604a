"""A small written dataset (drawn cells) and the phases trained on it for a few steps, shared by the tests of this folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from filelock import FileLock
from orbax.checkpoint import v1 as ocp

from data_prep.tokens import load_tokenizer
from pbs_jax.config import load
from pbs_jax.data import slide_features
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import get_size, with_queries
from pbs_jax.sharding.mesh import make_mesh
from pbs_jax.train import handover, loop
from pbs_jax.train.phase import parameters
from tests.train import tiny_run

# AdamW: Muon's iterations take long to compile, and have a test of their own.
SMALL = {"steps": 4, "batch_size": 8, "log_every": 1, "save_every": 2, "eval_every": 1000, "optimizer__name": "adamw"}


def one_device() -> jax.sharding.Mesh:
    """Compiles several times faster than the eight fake devices, which the tests of meshes use."""
    return make_mesh(devices=jax.devices()[:1])


def made_once(name: str, make: Callable[[Path], None], factory: pytest.TempPathFactory) -> Path:
    """A folder that the first of pytest-xdist's workers fills; the others wait for it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.unfinished")
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cells, cell_qa, cell_qa_tokens and tokenizer of 60 drawn cells."""
    from data_prep.pipeline import CellJob, run

    def make(out: Path) -> None:
        run(CellJob(source="synthetic", out=out, n_per_class=12, bin_length=256), say=lambda text: None)

    return made_once("drawn", make, tmp_path_factory)


def small_config(name: str, root: Path, **changes: Any) -> Any:
    """A shipped config cut to a few steps on `root`; `init_from` names come as init_from__NAME."""
    values = {**SMALL, **changes}
    flags = [f"--config.{key.replace('__', '.')}={value}" for key, value in values.items()]
    return load(name, [f"--config.data.root={root}", *flags])


@pytest.fixture(scope="session")
def phases(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Phases 0a and 0b (four steps each), the cell features between them, and an untrained phase 1."""
    from pbs_jax.data.features import write_features
    from pbs_jax.train.loop import train

    def make(root: Path) -> None:
        mesh = one_device()
        train(small_config("phase0_backbone", drawn), root / "backbone", mesh)
        write_features(drawn, root / "backbone", drawn)
        train(small_config("phase0_language_model", drawn), root / "language_model", mesh)
        untrained_qformer(drawn, root / "qformer")

    root = made_once("phases", make, tmp_path_factory)
    return {name: root / name for name in ("backbone", "language_model", "qformer")}


def untrained_qformer(drawn: Path, workdir: Path, queries: int = 0) -> None:
    """What phase 1 leaves, without its long compilation (test_sigkill.py trains it)."""
    tokenizer = load_tokenizer(drawn / "tokenizer")
    shape = with_queries(get_size("nano", tokenizer), queries).qformer
    trees = {"qformer": parameters(lambda rngs: QFormer(shape, rngs=rngs), 0)[1]}
    facts = {"size": "nano", "tokenizer_sha256": tokenizer.sha256}
    facts |= {"qformer": dataclasses.asdict(shape)} if queries else {}
    save_finished(workdir, trees, facts, "cell_representation")


@contextlib.contextmanager
def killed_at_the_third_unit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The writing of features, within, ends at its third unit; gives those written before."""
    real, written = slide_features.write_unit, []

    def third_fails(path: Path, *more: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        return real(path, *more)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(slide_features, "write_unit", third_fails)
        yield written


def save_finished(workdir: Path, trees: dict[str, Any], facts: dict[str, Any], phase: str) -> None:
    """A finished phase's checkpoint and handover."""
    ocp.save_checkpointables(workdir / "checkpoints" / "0", {"params": trees})
    handover.write(workdir, step=0, trees=trees, config={}, facts=facts, phase=phase)


def cell_qa_config(drawn: Path, phases: dict[str, Path], **changes: Any) -> Any:
    """Phase 3 on the finished phases."""
    starts = {f"init_from__{name}": path for name, path in phases.items()}
    return small_config("phase3_cell_qa", drawn, **starts, **changes)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch):
    """The config of a phase of one matrix, which the loop then trains."""
    monkeypatch.setattr(loop, "build_phase", tiny_run.build)
    monkeypatch.setattr(loop, "require_usable", lambda config: None)
    return tiny_run.tiny_config()
