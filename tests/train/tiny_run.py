"""A run of the real loop on a phase of one matrix: `python -m tests.train.tiny_run WORKDIR [PROCESSES PROCESS COORDINATOR WAIT STEPS]`.

Everything of the engine takes part (hosts, data order, mesh, checkpoints, handover); only the model is small.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.schema import DataError
from pbs_jax.config import load
from pbs_jax.train.hosts import join_hosts

STEPS, BATCH = 6, 8


def build(config: Any) -> Any:
    """Fits y = x w on 64 drawn rows."""
    import jax
    import jax.numpy as jnp

    from pbs_jax.sharding.rules import PROJECTOR_RULES
    from pbs_jax.train.phase import Phase

    draw = np.random.default_rng(0)
    rows = draw.standard_normal((64, 4), np.float32)
    examples = [
        {"index": np.asarray(i, np.int32), "x": row, "y": row @ np.ones((4, 8), np.float32)}
        for i, row in enumerate(rows)
    ]

    def loss(trainable: Any, frozen: Any, batch: Any, key: Any) -> Any:
        kernel = trainable["projector"]["linear"]["kernel"]
        noise = 0.0 if key is None else 0.01 * jax.random.normal(key, batch["y"].shape)
        value = jnp.square(batch["x"] @ kernel + noise - batch["y"]).mean()
        return value, {"indices": batch["index"].sum()}

    tree = {"linear": {"kernel": np.zeros((4, 8), np.float32), "bias": np.zeros(8, np.float32)}}
    tree = jax.device_put(tree, jax.local_devices()[0])  # as trees of earlier phases are loaded
    return Phase(
        name="tiny",
        trainable={"projector": tree},
        frozen={},
        rules={"projector": PROJECTOR_RULES},
        loss=loss,
        examples=examples,
        evaluate=lambda trainable, frozen: {"norm": float(jnp.abs(trainable["projector"]["linear"]["kernel"]).sum())},
        facts={},
    )


def tiny_config(**changes: Any) -> Any:
    """The shipped config whose loop settings the run takes; the phase itself is `build`'s."""
    cut = {"steps": STEPS, "batch_size": BATCH, "log_every": 1, "save_every": 2, "eval_every": 3}
    flags = cut | {"optimizer.lr": 1e-1, "optimizer.name": "adamw"} | changes
    return load("phase3_cell_qa", [f"--config.{name}={value}" for name, value in flags.items()])


def main(
    workdir: str,
    processes: str = "1",
    process: str = "0",
    coordinator: str = "",
    wait: str = "60",
    steps: str = f"{STEPS}",
) -> int:
    join_hosts(processes, int(process), coordinator, int(wait))
    from pbs_jax.train import loop

    loop.build_phase, loop.require_usable = build, lambda config: None  # type: ignore[assignment]
    return loop.train(tiny_config(steps=steps), Path(workdir))


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except DataError as error:
        sys.exit(str(error))
