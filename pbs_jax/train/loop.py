"""The training loop shared by all phases: build, resume, step, log, save, evaluate, hand over."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from grain.experimental import ElasticIterator
from grain.sharding import ShardOptions
from jax.experimental import multihost_utils

from configs import base
from data_prep.io import atomic_write
from data_prep.progress import progress
from data_prep.schema import DataError
from pbs_jax.config import total_steps
from pbs_jax.data.order import HostOrder, reading_threads
from pbs_jax.data.staging import is_remote, stage
from pbs_jax.sharding.mesh import make_mesh, place, put_batch
from pbs_jax.sharding.rules import specs
from pbs_jax.train import handover
from pbs_jax.train.check import require_usable
from pbs_jax.train.checkpoint import Checkpoints
from pbs_jax.train.clock import Clock, model_flops_per_token, rates
from pbs_jax.train.early_stopping import EarlyStopping
from pbs_jax.train.hosts import PREEMPTED, leave_if_others_are_gone
from pbs_jax.train.inspect import describe_batch
from pbs_jax.train.metrics import MetricsWriter, evaluations, shortened
from pbs_jax.train.optimizer import make_optimizer, schedule
from pbs_jax.train.phase import Phase
from pbs_jax.train.phases import build_phase
from pbs_jax.train.report import write_report
from pbs_jax.train.state import Params, TrainState
from pbs_jax.train.step import init_state, make_step

PROFILED = 3  # steps of one profile
DATASETS = "datasets.json"  # content ids of the data that a run was begun on
WAIT_SHARE = 0.05  # of a step's time: above it, three logs in a row, the run says what to turn
# Keys that may differ when a run is continued: they change what is seen, not what is computed; data are known by content.
FREE_KEYS = ("log_every", "save_every", "eval_every", "keep", "mesh", "remat", "attention", "profile_at")
FREE_DATA = ("data.threads", "data.prefetch", "data.root", "data.features", "data.slides")


def train(config: Any, workdir: Path, mesh: jax.sharding.Mesh | None = None) -> int:
    """Runs or continues one phase on `mesh` (default: config.mesh over all devices).

    Returns the exit code: 0 finished, PREEMPTED after a SIGTERM save. Raises DataError for what cannot be used, with all
    that is wrong with the config, before a device is touched.
    """
    clock = Clock()
    check_config(config, workdir)
    if (workdir / handover.FILE).exists():
        print(f"{workdir}: phase {config.phase} is finished; nothing to do")
        return 0
    with clock.spend("init"):
        local = staged(config)
        require_usable(local)
        mesh = mesh or make_mesh(**local.mesh)
        check_batch(local, mesh)
    with jax.set_mesh(mesh):
        with clock.spend("init"):
            phase = build_phase(local)
            data = iterate(phase, local)
            begin(config, phase, workdir)  # last: what was refused leaves the workdir to the corrected config
        try:
            return _run(phase, data, local, workdir, mesh, clock)
        except jax.errors.JaxRuntimeError as error:
            leave_if_others_are_gone(error)
            raise
        finally:
            if jax.process_index() == 0:
                write_report(workdir)


def staged(config: Any) -> Any:
    """The config with data on gs:// (or any fsspec address) replaced by this host's checked copy."""
    remote = {name: config.data[name] for name in ("root", "features", "slides") if is_remote(config.data[name])}
    if not remote:
        return config
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pbs_jax_data"
    config = config.copy_and_resolve_references()
    for name, address in remote.items():
        config.data[name] = str(stage(address, cache))
    return config


def _run(phase: Phase, data: Any, config: Any, workdir: Path, mesh: jax.sharding.Mesh, clock: Clock) -> int:
    layout = {name: specs(tree, phase.rules[name]) for name, tree in {**phase.trainable, **phase.frozen}.items()}
    trainable = {name: place(tree, layout[name], mesh) for name, tree in phase.trainable.items()}
    frozen = {name: place(tree, layout[name], mesh) for name, tree in phase.frozen.items()}
    steps = total_steps(config, len(phase.examples))
    print(f"phase {phase.name}: {len(phase.examples):,} examples, {steps:,} steps of {config.batch_size}")
    print(handover.report(trainable, frozen, phase.loaded))

    tx = make_optimizer(config.optimizer, steps)
    state = init_state(trainable, tx, mesh)
    step_fn = make_step(phase.loss, tx, config.seed, state, parts=config.accumulate, weight=phase.weight)
    rate = schedule(config.optimizer.lr, steps, config.optimizer.warmup_fraction)
    early = EarlyStopping(config.early_stopping)
    checkpoints = Checkpoints(workdir, config.keep, lambda: early.best)
    with clock.spend("restore"):
        restored = checkpoints.restore_newest(state, data)
    if restored is not None:
        state = restored
        print(f"resumed at step {int(state.step)}")
    first = int(state.step)
    evaluated = evaluations(workdir, first)
    for step, values in evaluated.items():
        early.add(step, values)
    writer = MetricsWriter(workdir, first, jax.process_index() == 0)
    per_token = model_flops_per_token(trainable, frozen)
    recent: list[tuple[int, Any, dict[str, jax.Array]]] = []  # steps since the last check: number, examples, metrics
    eval_every = math.ceil(len(phase.examples) / config.batch_size) if config.eval_every < 0 else config.eval_every
    profile_at = config.profile_at if config.profile_at > first else 0
    slow = 0

    def evaluate(step: int) -> None:
        with clock.spend("eval"):
            values = log_evaluation(phase, state, frozen, writer)
        early.check(values)
        early.add(step, values)
        evaluated[step] = values

    with stop_signal() as stopped, contextlib.closing(writer), contextlib.closing(checkpoints):
        if first and eval_every and first % eval_every == 0 and first not in evaluated:
            evaluate(first)  # the run was stopped between that step's save and its evaluation
        waited, tick, logged = 0.0, time.perf_counter(), first
        for done in progress(range(first + 1, first if early.over else steps + 1), steps - first, phase.name):
            asked = time.perf_counter()
            with clock.spend("data"):
                batch = put_batch(next(data), mesh)
            waited += time.perf_counter() - asked
            if done == profile_at:
                jax.profiler.start_trace(str(workdir / "profile"))
            with clock.spend("step"):
                state, metrics = step_fn(state, frozen, batch)
            if profile_at and done == min(profile_at + PROFILED - 1, steps):
                jax.block_until_ready(metrics)
                jax.profiler.stop_trace()
            recent.append((done, batch.get("index"), metrics))
            # Asked once a step: a signal that comes later in it is seen at the next one, before its save.
            last, stop = done == steps, stopped(done)
            due = bool(eval_every) and done % eval_every == 0
            log, save = (done % every == 0 or last or stop for every in (config.log_every, config.save_every))
            save |= due and bool(early)  # any evaluated step may be the best
            if log or save:
                with clock.spend("step"):  # waits for the device
                    values = require_finite(recent, workdir, phase.example_id)
                recent.clear()
            if log:
                now = time.perf_counter()
                step_s = (now - tick) / (done - logged)
                values |= {"time/step_s": step_s, "time/input_wait_share": waited / (now - tick)}
                values |= rates(batch, step_s, per_token)
                values["lr"] = float(rate(done - 1))  # optax counts updates from 0
                slow = slow + 1 if waited / (now - tick) > WAIT_SHARE and logged > first else 0
                if slow == 3:
                    print(input_advice(waited / (now - tick), config))
                waited, tick, logged = 0.0, now, done
                writer.write(done, values)
            if save:
                with clock.spend("save"):
                    checkpoints.save(state, data)
                if jax.process_index() == 0:
                    clock.write(workdir, done - first)  # a kill leaves what was known at the last save
            if stop and not last:
                with clock.spend("save"):
                    checkpoints.wait()
                print(f"stopped by a signal; saved step {done}: run the same command to continue")
                return PREEMPTED
            if due and not last:
                evaluate(done)
                if early.over:
                    print(f"stopped at step {done}: {early.patience} evaluations brought nothing better")
                    break
                tick, logged, waited = time.perf_counter(), done, 0.0
        reached = int(state.step)
        if reached not in evaluated:
            evaluate(reached)
        with clock.spend("save"):
            checkpoints.wait()
        chosen = reached if early.best is None else early.best
        if not checkpoints.holds(chosen):
            raise DataError(f"{workdir}: no finished checkpoint of step {chosen}; run the same command again")
    if early:
        print(early.tell())
    if jax.process_index() == 0:
        clock.write(workdir, reached - first)
        handover.write(
            workdir,
            step=chosen,
            trees=state.trainable,
            config=json.loads(config.to_json()),
            facts=phase.facts,
            phase=phase.name,
        )
    return 0


def input_advice(share: float, config: Any) -> str:
    """What to turn when the step waits for its input."""
    threads = reading_threads(config.data.threads)
    return (
        f"warning: {share:.0%} of the time goes to waiting for input: raise --config.data.threads (now {threads}) "
        f"or --config.data.prefetch (now {config.data.prefetch}), or put the data on a local disk"
    )


def log_evaluation(phase: Phase, state: TrainState, frozen: Params, writer: MetricsWriter) -> dict[str, float]:
    """Validation metrics of the present state, into metrics.jsonl and onto the screen, and as they are written there."""
    values = {f"val/{name}": shortened(value) for name, value in phase.evaluate(state.trainable, frozen).items()}
    writer.write(int(state.step), values)
    print("  ".join([f"step {int(state.step)}", *(f"{name} {value:.4f}" for name, value in values.items())]))
    return values


def show_batch(config: Any, step: int = 1) -> str:
    """The batch that `train` sees at a step, as text."""
    if step < 1:
        raise DataError(f"--inspect_batch={step}: steps are counted from 1")
    config = staged(config)
    require_usable(config)
    phase = build_phase(config)
    words = Path(config.data.root) / "tokenizer"
    if phase.name == "cell_representation":
        from pbs_jax.train.phase1_cell_representation import words_folder

        words = words_folder(config)
    return describe_batch(phase, next(iterate(phase, config, step)), words, step)


def iterate(phase: Phase, config: Any, step: int = 1) -> Iterator[dict[str, np.ndarray]]:
    """Seeded endless stream of this process's share of the global batches from a step's on; its order does not depend on
    host count."""
    if len(phase.examples) < config.batch_size:
        raise DataError(
            f"phase {phase.name} has {len(phase.examples)} examples, fewer than batch_size={config.batch_size}"
        )
    stream = grain.MapDataset.source(phase.examples).seed(config.data_seed).shuffle().repeat()
    shard = ShardOptions(jax.process_index(), jax.process_count())
    if shard.shard_count > 1:
        stream = HostOrder(stream, config.batch_size, shard.shard_count)
    threads = reading_threads(config.data.threads)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=config.data.prefetch)
    data = iter(ElasticIterator(stream, config.batch_size, shard, read_options=options))
    data.set_state(dict.fromkeys(data.get_state(), (step - 1) * config.batch_size))  # its one number: examples passed
    return data


def check_config(config: Any, workdir: Path) -> None:
    """A workdir belongs to one config: `begin` writes it, every continuation is compared. Raises DataError."""
    path = workdir / "config.json"
    if not path.exists():
        return
    mine = json.loads(config.to_json())
    # Field by field: one added since that run began, at any depth, stands for what was done then, its default.
    default, theirs = json.loads(base.get_config().to_json()), json.loads(path.read_text())
    mine, default, theirs = (flatten_dict(tree, sep=".") for tree in (mine, default, theirs))
    theirs = default | theirs
    keys = sorted(
        key
        for key in mine.keys() | theirs.keys()
        if mine.get(key) != theirs.get(key)
        and not any(f"{key}.".startswith(f"{free}.") for free in (*FREE_KEYS, *FREE_DATA))
    )
    if keys:
        differences = ", ".join(f"{key}: {theirs.get(key)} there, {mine.get(key)} now" for key in keys)
        raise DataError(f"{path} is of another config ({differences}): use another --workdir or the same config")


def begin(config: Any, phase: Phase, workdir: Path) -> None:
    """Writes config.json and the content ids of the phase's datasets, once. Raises DataError for a run that was begun on
    other data."""
    now = phase.facts.get("datasets", {})
    path = workdir / DATASETS
    before = json.loads(path.read_text()) if path.exists() else {}
    for name in now.keys() & before.keys():
        if now[name] != before[name]:
            ids = ["+".join(part[:12] for part in id.split("+")) for id in (before[name], now[name])]
            raise DataError(
                f"{path}: this run was begun on {name} {ids[0]}, config.data now holds {ids[1]}: use another --workdir or "
                "the data it was begun on"
            )
    for file, content in ((workdir / "config.json", json.loads(config.to_json())), (path, now)):
        if not file.exists():
            atomic_write(file, json.dumps(content, indent=1, sort_keys=True) + "\n")


def check_batch(config: Any, mesh: jax.sharding.Mesh) -> None:
    """Raises DataError for a batch that the data and fsdp axes, or the hosts, cannot share evenly."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % (parts * config.accumulate) or config.batch_size % jax.process_count():
        raise DataError(
            f"config.batch_size={config.batch_size} is not divisible by the mesh's data x fsdp = {parts}, times "
            f"config.accumulate={config.accumulate}, and {jax.process_count()} hosts: use a multiple"
        )


def require_finite(
    recent: Sequence[tuple[int, Any, dict[str, jax.Array]]], workdir: Path, example_id: Callable[[int], str]
) -> dict[str, float]:
    """Stops before a bad state is saved, naming the loss term, the step it first went wrong at and that batch's examples.

    recent: (step, indices of its examples, metrics) since the last call. Returns the last step's metrics under the names
    that are logged.
    """
    values: dict[str, float] = {}
    for step, index, metrics in recent:
        values = {metric_name(name): float(value) for name, value in metrics.items()}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            shards = [np.ravel(shard.data) for shard in index.addressable_shards] if index is not None else []
            rows = sorted({int(row) for shard in shards for row in shard})
            ids = ", ".join(example_id(row) for row in rows)
            raise DataError(
                f"{workdir}: {', '.join(bad)} not finite at step {step} (example indices {rows}: {ids}); what was saved "
                "before is kept: lower config.optimizer.lr or look at those examples (pbs train "
                f"--inspect_batch={step})"
            )
    return values


def metric_name(name: str) -> str:
    return f"norm/{name}" if name in ("param_norm", "update_norm") else f"train/{name}"


@contextlib.contextmanager
def stop_signal() -> Iterator[Any]:
    """Yields a function of the step that says whether SIGTERM came (a preemption notice); restores the handler afterwards.

    With several processes they agree on the step: one that stops alone would leave the others waiting for ever.
    """
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    flag: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))
    try:
        yield lambda step: bool(flag)
    finally:
        signal.signal(signal.SIGTERM, previous)
