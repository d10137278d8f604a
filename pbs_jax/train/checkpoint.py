"""The one module that touches Orbax (v1 API): save, resume, and load single trees of a finished phase.

A step holds three checkpointables: `params` (trainable trees), `optimizer` (optax state and step count) and `data`
(the Grain iterator), so that the next phase can read parameters without knowing the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from data_prep.schema import DataError
from pbs_jax.train.state import Params, TrainState, leaves_by_name
from pbs_jax.train.step import abstract

policies = ocp.training.preservation_policies
FINISHED = "commit_success.txt"  # Orbax writes it last


class Pinned:
    """Keeps the step that a function names at the time."""

    def __init__(self, step: Callable[[], int | None]) -> None:
        self._step = step

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        return [checkpoint.step == self._step() for checkpoint in checkpoints]


class Checkpoints:
    """Checkpoints of one run in workdir/checkpoints/<step>; the newest `keep` finished ones are kept, and the one that
    `pinned` names."""

    def __init__(self, workdir: Path, keep: int = 2, pinned: Callable[[], int | None] = lambda: None) -> None:
        self.directory = (workdir / "checkpoints").resolve()
        self._policy = policies.AnyPreservationPolicy([policies.LatestN(keep), Pinned(pinned)])
        self._pending: Any | None = None
        self._open()

    def _open(self) -> None:
        self._checkpointer = ocp.training.Checkpointer(
            self.directory,
            preservation_policy=self._policy,
            cleanup_tmp_directories=True,  # what a killed save left behind
        )

    def latest(self) -> int | None:
        """Newest finished step, or None. Unfinished ones are never listed by Orbax."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def holds(self, step: int) -> bool:
        return any(checkpoint.step == step for checkpoint in self._checkpointer.checkpoints)

    def save(self, state: TrainState, data: Any) -> None:
        """Starts an asynchronous save of `state.step`; an error of the previous one is raised here.

        Raises DataError for a step that is not above the newest: Orbax would drop it without a word.
        """
        self.wait()
        step, newest = int(state.step), self.latest()
        if newest is not None and step <= newest:
            raise DataError(f"{self.directory} holds step {newest}, so step {step} is not saved: use another --workdir")
        self._pending = self._checkpointer.save_checkpointables_async(
            step,
            {
                "params": state.trainable,
                "optimizer": {"state": _listed(state.opt_state), "step": state.step},
                "data": data,
            },
        )

    def restore(self, state: TrainState, data: Any) -> TrainState:
        """The newest checkpoint, laid out like `state` (also on another mesh); moves `data` to the same point."""
        step = self.latest()
        if step is None:
            raise DataError(f"{self.directory}: no finished checkpoint to resume from")
        self._check(step, state.trainable)
        target = {
            "params": abstract(state.trainable),
            "optimizer": abstract({"state": _listed(state.opt_state), "step": state.step}),
            "data": data,
        }
        loaded = self._checkpointer.load_checkpointables(step, target)
        leaves = jax.tree.leaves(loaded["optimizer"]["state"])
        opt_state = jax.tree.unflatten(jax.tree.structure(state.opt_state), leaves)
        return TrainState(loaded["optimizer"]["step"], loaded["params"], opt_state)

    def _check(self, step: int, expected: Params) -> None:
        metadata = ocp.metadata(self.directory / str(step), checkpointable_name="params").metadata
        if metadata is None:
            raise OSError("its metadata are damaged")
        compare_trees(f"{self.directory}/{step}", metadata, expected)

    def restore_newest(self, state: TrainState, data: Any) -> TrainState | None:
        """State of the newest step that can be read, None where there is none; unusable ones are set aside, with a message.

        A folder without Orbax's mark of a finished save, or whose files are damaged, goes to `checkpoints/unusable-<step>`:
        kept, but no longer in the way of later saves. Raises DataError when steps are there and none can be used, and at
        once when a readable step is of another model.
        """
        seen = 0
        while (step := self.latest()) is not None:
            seen += 1
            folder = self.directory / str(step)
            why = "it was not finished"
            if (folder / FINISHED).exists():
                try:
                    return self.restore(state, data)
                except DataError:
                    raise
                except (ValueError, OSError, RuntimeError, KeyError) as error:
                    why = f"it cannot be read ({str(error).splitlines()[0][:120]})"
            print(f"checkpoint {folder} is skipped: {why}; set aside as unusable-{step}")
            folder.rename(self.directory / f"unusable-{step}")
            self._open()
        if seen:
            raise DataError(f"{self.directory} has no usable checkpoint: start again with another --workdir")
        return None

    def wait(self) -> None:
        """Blocks until the save under way is finished; raises its error."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()


def load_params(directory: Path, expected: Params) -> Params:
    """Trees of one finished checkpoint step (workdir/checkpoints/<step>).

    expected: ShapeDtypeStructs with shardings, first level = tree names. Trees of the checkpoint that are not asked
    for are left out; a missing leaf or another shape is a DataError that names it.
    """
    metadata = ocp.metadata(directory.resolve(), checkpointable_name="params").metadata
    compare_trees(str(directory), {name: metadata[name] for name in expected if name in metadata}, expected)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load_checkpointables(directory.resolve(), {"params": expected})["params"]


def compare_trees(where: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises one DataError listing every missing, extra and differently shaped leaf."""
    have = {name: tuple(leaf.shape) for name, leaf in leaves_by_name(found).items()}
    want = {name: tuple(leaf.shape) for name, leaf in leaves_by_name(expected).items()}
    problems = [f"missing {name} {want[name]}" for name in sorted(want.keys() - have.keys())]
    problems += [f"extra {name} {have[name]}" for name in sorted(have.keys() - want.keys())]
    problems += [f"{n} is {have[n]}, not {want[n]}" for n in sorted(want.keys() & have.keys()) if have[n] != want[n]]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise DataError(
            f"{where} does not fit this model ({shown}): use the config that wrote it, or another checkpoint"
        )


def _listed(opt_state: Any) -> dict[str, Any]:
    """optax state as a flat dict: no class of ours or optax's is written into a checkpoint."""
    return {f"{index:04d}": leaf for index, leaf in enumerate(jax.tree.leaves(opt_state))}
