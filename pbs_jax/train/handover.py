"""handover.json: what a finished phase tells the next one, and the strict loading of its trees.

Nothing is loaded by hope: every leaf is compared by name and shape, and the reader prints loaded / fresh / frozen / dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from data_prep.io import atomic_write
from data_prep.schema import DataError
from data_prep.tokens import Tokenizer
from pbs_jax.sharding.mesh import fit
from pbs_jax.sharding.rules import Rules, specs
from pbs_jax.train.checkpoint import load_params
from pbs_jax.train.state import Params, leaves_by_name, tree_sha256

FILE = "handover.json"


def write(
    workdir: Path, *, step: int, trees: Params, config: dict[str, Any], facts: dict[str, Any], phase: str
) -> None:
    """Written last, atomically: a workdir with this file holds a finished phase."""
    content = {
        "phase": phase,
        "step": step,
        "trees": {
            name: {leaf: [list(value.shape), str(value.dtype)] for leaf, value in leaves_by_name(tree).items()}
            for name, tree in trees.items()
        },
        "config": config,
        "facts": facts,
    }
    atomic_write(workdir / FILE, json.dumps(content, indent=1, sort_keys=True) + "\n")


def read(workdir: str | Path, phases: Iterable[str] = ()) -> dict[str, Any]:
    """The handover of a finished phase. Raises DataError when it is missing or of another phase than allowed."""
    path = Path(workdir) / FILE
    if not path.exists():
        raise DataError(f"{path} is missing: that phase is not finished; run `pbs train` there first")
    content = json.loads(path.read_text())
    allowed = tuple(phases)
    if allowed and content["phase"] not in allowed:
        raise DataError(f"{path} is of phase {content['phase']}, expected {' or '.join(allowed)}")
    return content


def load(
    workdir: str | Path,
    names: Iterable[str],
    sharding: jax.sharding.Sharding | None = None,
    rules: Mapping[str, Rules] | None = None,
) -> Params:
    """The named trees of a finished phase as nested dicts of arrays, put on `sharding` (default: first device).

    With `rules` (by tree), each leaf is laid out by them on the mesh that `jax.set_mesh` set, as it is read. Imported
    language models stream from their own files.
    """
    content = read(workdir)
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    expected: Params = {}
    mesh = jax.sharding.get_mesh()
    for name in names:
        if name not in content["trees"]:
            raise DataError(f"{workdir} holds the trees {', '.join(content['trees'])}, not {name}")
        expected[name] = _nested(content["trees"][name], sharding)
        if rules and name in rules and not mesh.empty:
            expected[name] = jax.tree.map(
                lambda leaf, spec: leaf.update(sharding=NamedSharding(mesh, fit(leaf.shape, spec, mesh))),
                expected[name],
                specs(expected[name], rules[name]),
            )
    if "linked" in content["facts"]:
        from pbs_jax.weights.importers import load_linked  # lazily: it imports this module

        return load_linked(Path(workdir), content, expected)
    return load_params(Path(workdir) / "checkpoints" / str(content["step"]), expected)


def same_tokenizer(workdir: str | Path, facts: Mapping[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """Raises DataError unless the phase with these facts was trained with the tokenizer, which lies in `folder`."""
    if facts["tokenizer_sha256"] != tokenizer.sha256:
        raise DataError(f"{workdir} was trained with another tokenizer than {folder}")


def load_recorded(
    workdir: str | Path,
    facts: Mapping[str, Any],
    name: str,
    sharding: jax.sharding.Sharding | None = None,
    rules: Mapping[str, Rules] | None = None,
) -> Params:
    """{name: tree} from the workdir that a phase's facts name for it, laid out as `load` does. Raises DataError when its
    hash is not the recorded one."""
    tree = load(facts[name], [name], sharding, rules)
    if tree_sha256(tree[name]) != facts[f"{name}_sha256"]:
        raise DataError(f"{facts[name]} no longer holds the {name} that {workdir} was trained with")
    return tree


def report(trainable: Params, frozen: Params, loaded: Iterable[str], dropped: Iterable[str] = ()) -> str:
    """Table of what starts this phase: tree, state, tensors, parameters."""
    loaded = set(loaded)
    rows = [(name, "loaded" if name in loaded else "fresh", tree) for name, tree in trainable.items()]
    rows += [(name, "frozen", tree) for name, tree in frozen.items()]
    lines = [f"  {'tree':<16}{'state':<10}{'tensors':>9}{'parameters':>14}"]
    for name, state, tree in rows:
        leaves = jax.tree.leaves(tree)
        lines.append(f"  {name:<16}{state:<10}{len(leaves):>9,}{sum(leaf.size for leaf in leaves):>14,}")
    lines += [f"  {name:<16}dropped" for name in dropped]
    return "\n".join(lines)


def _nested(leaves: dict[str, Any], sharding: jax.sharding.Sharding) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for name, (shape, dtype) in leaves.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
    return root
