"""The layout of every parameter of the large models, as text to be read: a changed rule shows which leaves it moves.

Meant changes: `python -m tests.sharding.test_golden` writes the files anew; look at their diff before it is committed.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from pbs_jax.sharding import rules
from pbs_jax.train.state import path_name
from tests.sharding.test_rules import MODELS

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("vit l", "qformer 7b", "decoder 7b", "perceiver patch", "alignment 7b", "projector 7b")


def golden(name: str) -> Path:
    return GOLDEN / f"{name.replace(' ', '_')}.json"


def layout(name: str) -> dict[str, str]:
    """PartitionSpec of each leaf, by its path."""
    make, table, _ = MODELS[name]
    tree = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0)))))
    leaves = jax.tree.leaves_with_path(rules.specs(tree, table), is_leaf=lambda leaf: isinstance(leaf, P))
    return {path_name(path): str(spec) for path, spec in leaves}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_lie_where_the_golden_file_says(name: str) -> None:
    stored = json.loads(golden(name).read_text())
    assert layout(name) == stored, f"if it is meant: python -m tests.sharding.test_golden renews {golden(name).name}"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in NAMES:
        golden(name).write_text(json.dumps(layout(name), indent=1, sort_keys=True) + "\n")
