"""Frozen weights stream from their files: memory is bounded by the result and one file, and shardings are as asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pbs_jax.models.decoder import Decoder
from pbs_jax.sharding.mesh import make_mesh
from pbs_jax.sharding.rules import DECODER_RULES
from pbs_jax.train import handover
from pbs_jax.train.state import leaves_by_name
from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.importers import import_weights
from pbs_jax.weights.tables import decoder_table
from tests.weights.conftest import random_tree
from tests.weights.test_import import LM, saved, told


def test_leaves_arrive_in_the_layout_of_the_mesh(tmp_path: Path) -> None:
    tree = random_tree(lambda rngs: Decoder(LM, rngs=rngs), 2)
    folder = saved(tmp_path / "snapshot", to_torch(tree, decoder_table(LM)), told())
    import_weights("qwen2_5_vl", folder, tmp_path / "run", size="small")
    with jax.set_mesh(make_mesh(2, 2, 2)):
        loaded = handover.load(tmp_path / "run", ["language_model"], rules={"language_model": DECODER_RULES})
    leaves = leaves_by_name(loaded["language_model"])
    for name, value in leaves_by_name(tree).items():
        assert np.array_equal(leaves[name], value), name
    kernel = leaves["layers/gate/kernel"]
    assert tuple(kernel.sharding.spec) == (None, "fsdp", "tensor")
    assert kernel.addressable_shards[0].data.shape == (2, 8, 12)


@pytest.mark.slow
def test_anonymous_memory_stays_below_the_result_and_one_file(tmp_path: Path, repo: Path) -> None:
    """The same for any size: `python -m tests.weights.sharded FOLDER 2100` is the one of over 2 GiB."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "tests.weights.sharded", str(tmp_path / "snapshot"), "400"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repo, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    print(found)
    assert found["checkpoint_mib"] > 300
    assert found["peak_anonymous_over_start_mib"] <= found["limit_mib"]
