"""The training loop shared by all phases: build, resume, step, log, save, evaluate, hand over."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from grain.experimental import ElasticIterator
from grain.sharding import ShardOptions

from data_prep.io import atomic_write
from data_prep.progress import progress
from data_prep.schema import DataError
from pbs_jax.config import total_steps
from pbs_jax.sharding.mesh import make_mesh, place, put_batch
from pbs_jax.sharding.rules import specs
from pbs_jax.train import handover
from pbs_jax.train.checkpoint import Checkpoints
from pbs_jax.train.metrics import MetricsWriter
from pbs_jax.train.optimizer import make_optimizer
from pbs_jax.train.phase import Phase
from pbs_jax.train.phases import build_phase
from pbs_jax.train.state import Params, TrainState
from pbs_jax.train.step import init_state, make_step

PREEMPTED = 75  # EX_TEMPFAIL: run the same command again
# Keys that may differ when a run is continued: they change what is seen, not what is computed.
FREE_KEYS = ("log_every", "save_every", "eval_every", "keep", "mesh")


def train(config: Any, workdir: Path, mesh: jax.sharding.Mesh | None = None) -> int:
    """Runs or continues one phase on `mesh` (default: config.mesh over all devices).

    Returns the exit code: 0 finished, PREEMPTED after a SIGTERM save. Raises DataError for what cannot be used.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if (workdir / handover.FILE).exists():
        check_config(config, workdir)
        print(f"{workdir}: phase {config.phase} is finished; nothing to do")
        return 0
    check_config(config, workdir)
    mesh = mesh or make_mesh(**config.mesh)
    check_batch(config, mesh)
    with jax.set_mesh(mesh):
        phase = build_phase(config)
        return _run(phase, config, workdir, mesh)


def _run(phase: Phase, config: Any, workdir: Path, mesh: jax.sharding.Mesh) -> int:
    layout = {name: specs(tree, phase.rules[name]) for name, tree in {**phase.trainable, **phase.frozen}.items()}
    trainable = {name: place(tree, layout[name], mesh) for name, tree in phase.trainable.items()}
    frozen = {name: place(tree, layout[name], mesh) for name, tree in phase.frozen.items()}
    steps = total_steps(config, len(phase.examples))
    print(f"phase {phase.name}: {len(phase.examples):,} examples, {steps:,} steps of {config.batch_size}")
    print(handover.report(trainable, frozen, phase.loaded))

    tx = make_optimizer(config.optimizer, steps)
    state = init_state(trainable, tx, mesh)
    step_fn = make_step(phase.loss, tx, config.seed, state)
    data = iterate(phase, config)
    checkpoints = Checkpoints(workdir, config.keep)
    if checkpoints.latest() is not None:
        state = checkpoints.restore(state, data)
        print(f"resumed at step {int(state.step)}")
    writer = MetricsWriter(workdir, int(state.step))
    with stop_signal() as stopped, contextlib.closing(writer), contextlib.closing(checkpoints):
        first = int(state.step)
        waited, tick = 0.0, time.perf_counter()
        for done in progress(range(first + 1, steps + 1), steps - first, phase.name):
            asked = time.perf_counter()
            batch = put_batch(next(data), mesh)
            waited += time.perf_counter() - asked
            state, metrics = step_fn(state, frozen, batch)
            # Asked once a step: a signal that comes later in it is seen at the next one, before its save.
            last, stop = done == steps, stopped()
            if done % config.log_every == 0 or last or stop:
                values = {f"train/{name}": float(value) for name, value in metrics.items()}
                require_finite(values, done, batch, workdir)
                now = time.perf_counter()
                values |= {"time/step_s": (now - tick) / min(config.log_every, done - first or 1)}
                values |= {"time/input_wait_share": waited / (now - tick)}
                waited, tick = 0.0, now
                writer.write(done, values)
            if done % config.save_every == 0 or last or stop:
                require_finite({k: float(v) for k, v in metrics.items()}, done, batch, workdir)
                checkpoints.save(state, data)
            if stop and not last:
                checkpoints.wait()
                print(f"stopped by a signal; saved step {done}: run the same command to continue")
                return PREEMPTED
            if config.eval_every and done % config.eval_every == 0 and not last:
                log_evaluation(phase, state, frozen, writer)
                tick = time.perf_counter()
        log_evaluation(phase, state, frozen, writer)
        checkpoints.wait()
        if checkpoints.latest() != steps:
            raise DataError(f"{workdir}: no finished checkpoint of step {steps}; run the same command again")
    handover.write(
        workdir,
        step=int(state.step),
        trees=state.trainable,
        config=json.loads(config.to_json()),
        facts=phase.facts,
        phase=phase.name,
    )
    return 0


def log_evaluation(phase: Phase, state: TrainState, frozen: Params, writer: MetricsWriter) -> None:
    """Validation metrics of the present state, into metrics.jsonl and onto the screen."""
    values = {f"val/{name}": value for name, value in phase.evaluate(state.trainable, frozen).items()}
    writer.write(int(state.step), values)
    print("  ".join([f"step {int(state.step)}", *(f"{name} {value:.4f}" for name, value in values.items())]))


def iterate(phase: Phase, config: Any) -> Iterator[dict[str, np.ndarray]]:
    """Seeded endless stream of this process's share of the global batch; its order does not depend on host count."""
    if len(phase.examples) < config.batch_size:
        raise DataError(
            f"phase {phase.name} has {len(phase.examples)} examples, fewer than batch_size={config.batch_size}"
        )
    stream = grain.MapDataset.source(phase.examples).seed(config.data_seed).shuffle().repeat()
    shard = ShardOptions(jax.process_index(), jax.process_count())
    options = grain.ReadOptions(num_threads=config.data.threads, prefetch_buffer_size=config.data.prefetch)
    return iter(ElasticIterator(stream, config.batch_size, shard, read_options=options))


def check_config(config: Any, workdir: Path) -> None:
    """A workdir belongs to one config: written at the start, compared on every continuation. Raises DataError."""
    path = workdir / "config.json"
    mine = json.loads(config.to_json())
    if not path.exists():
        atomic_write(path, json.dumps(mine, indent=1, sort_keys=True) + "\n")
        return
    theirs = json.loads(path.read_text())
    keys = sorted(
        key for key in mine.keys() | theirs.keys() if key not in FREE_KEYS and mine.get(key) != theirs.get(key)
    )
    if keys:
        differences = ", ".join(f"{key}: {theirs.get(key)} there, {mine.get(key)} now" for key in keys)
        raise DataError(f"{path} is of another config ({differences}): use another --workdir or the same config")


def check_batch(config: Any, mesh: jax.sharding.Mesh) -> None:
    """Raises DataError for a batch that the data and fsdp axes, or the hosts, cannot share evenly."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % parts or config.batch_size % jax.process_count():
        raise DataError(
            f"config.batch_size={config.batch_size} is not divisible by the mesh's data x fsdp = {parts} "
            f"and {jax.process_count()} hosts: use a multiple of both"
        )


def require_finite(values: dict[str, float], step: int, batch: dict[str, Any], workdir: Path) -> None:
    """Stops before a bad state is saved, naming the loss term and the example indices of the batch."""
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if bad:
        ids = np.asarray(batch["index"]).tolist() if "index" in batch else []
        raise DataError(
            f"{workdir}: {', '.join(bad)} not finite at step {step} (example indices {ids}); the last good checkpoint is kept: "
            "lower config.optimizer.lr or look at those examples"
        )


@contextlib.contextmanager
def stop_signal() -> Iterator[Any]:
    """Yields a function that says whether SIGTERM came (a preemption notice); restores the handler afterwards."""
    flag: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))
    try:
        yield lambda: bool(flag)
    finally:
        signal.signal(signal.SIGTERM, previous)
