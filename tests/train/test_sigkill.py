"""SIGKILL at random steps, for every phase: the next start continues with the very examples that were next, and the final
weights are those of a quiet run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pbs_jax.train import handover
from tests.train.test_loop import assert_identical
from tests.train.test_phase2 import aligned, features, slides  # noqa: F401
from tests.train.test_phase4 import store  # noqa: F401

STEPS, SAVE_EVERY = 12, 3
KILLS = {
    "phase0_backbone": 4,
    "phase0_language_model": 4,
    "phase1_cell_representation": 3,
    "phase2_cell_patch_alignment": 3,
    "phase3_cell_qa": 3,
    "phase4_slide_qa": 3,
}
STARTS = {  # from which phases; the data are drawn cells but for these with slides
    "phase2_cell_patch_alignment": ("backbone", "qformer"),
    "phase3_cell_qa": ("backbone", "language_model", "qformer"),
    "phase4_slide_qa": ("language_model",),
}
SLIDES = {"phase2_cell_patch_alignment": "features", "phase4_slide_qa": "store"}


def command(name: str, root: Path, phases: dict[str, Path], workdir: Path) -> list[str]:
    flags = {"steps": STEPS, "batch_size": 2 if name == "phase4_slide_qa" else 8, "log_every": 1, "eval_every": 0}
    flags |= {"save_every": SAVE_EVERY, "data.root": root, "optimizer.name": "adamw"}
    flags |= {f"init_from.{key}": phases[key] for key in STARTS.get(name, ())}
    config = [f"--config={name}", *(f"--config.{key}={value}" for key, value in flags.items())]
    return [
        sys.executable,
        "-m",
        "tests.train.test_sigkill",
        f"{workdir}.told",
        "train",
        *config,
        f"--workdir={workdir}",
    ]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def starts(workdir: Path) -> list[tuple[int, list[list[int]]]]:
    """Of every start of a run: the step it went on from, and the examples of each batch that it then read."""
    found: list[tuple[int, list[list[int]]]] = []
    for line in Path(f"{workdir}.told").read_text().splitlines():
        said = json.loads(line)
        if isinstance(said, int):
            found.append((said, []))
        else:
            found[-1][1].append(said)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_a_phase_killed_at_random_steps_ends_with_the_same_weights(name, drawn, phases, tmp_path, request):
    root = request.getfixturevalue(SLIDES[name]) if name in SLIDES else drawn
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    subprocess.run(command(name, root, phases, quiet), check=True, env=environment)
    draw = random.Random(name)
    for _ in range(KILLS[name]):
        until = lines(killed / "metrics.jsonl") + draw.randint(1, 4)
        process = subprocess.Popen(command(name, root, phases, killed), env=environment)
        while lines(killed / "metrics.jsonl") < until and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(name, root, phases, killed), check=True, env=environment)
    assert (killed / handover.FILE).exists()
    assert_identical(quiet, killed)

    [(_, batches)] = starts(quiet)
    assert len(batches) == STEPS and any(batch != batches[0] for batch in batches)
    reached = 0
    for first, read in starts(killed):
        # A save of a step is finished at the latest when the next one begins.
        assert reached - 2 * SAVE_EVERY <= first <= reached and first % SAVE_EVERY == 0
        reached = first + len(read)
        assert read == batches[first:reached], f"examples repeated or skipped after step {first}"
    assert reached == STEPS


def main(told: str, *arguments: str) -> int:
    """`pbs`, which writes to the file `told` where it goes on from and the examples of every batch."""
    from pbs_jax import cli
    from pbs_jax.train import loop
    from pbs_jax.train.checkpoint import Checkpoints

    restore, put = Checkpoints.restore_newest, loop.put_batch

    def tell(what: Any) -> None:
        with open(told, "a") as file:
            file.write(f"{json.dumps(what)}\n")

    def restored(self: Checkpoints, state: Any, data: Any) -> Any:
        found = restore(self, state, data)
        tell(int(found.step) if found else 0)
        return found

    def placed(batch: Any, mesh: Any) -> Any:
        tell(batch["index"].ravel().tolist())
        return put(batch, mesh)

    Checkpoints.restore_newest, loop.put_batch = restored, placed  # type: ignore[method-assign]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
