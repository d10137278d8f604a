"""A sweep file read and checked: `sweeps/NAME[:arg]` or a path -> the runs with their overrides.

The file has CONFIG (a configuration's name), METRIC and GOAL ("min" or "max") and `sweep(arg)`, which yields one dict of
{field: value} a run. The argument goes to both: `sweeps/nano_lr:debug` sweeps `phase0_backbone:debug`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep.io import atomic_write
from pbs_jax import config

FILE = "sweep.json"
GOALS = ("min", "max")
LONGEST_NAME = 80


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: its folder's name, and what it overrides."""

    name: str
    overrides: Mapping[str, Any]

    @property
    def flags(self) -> list[str]:
        return [f"--config.{field}={value}" for field, value in self.overrides.items()]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """`config` is a `--config` value, `common` the overrides of the command line, which all runs get first."""

    name: str
    config: str
    common: tuple[str, ...]
    metric: str
    goal: str
    runs: tuple[Run, ...]

    def train_flags(self, run: Run) -> list[str]:
        """What `pbs train` is given for a run, without its workdir."""
        return [f"--config={self.config}", *self.common, *run.flags]

    def load(self, run: Run) -> Any:
        """The run's configuration. Raises ConfigError naming the field that does not fit."""
        return config.load(self.config, [*self.common, *run.flags])


def read(config_args: Sequence[str]) -> Sweep:
    """`pbs sweep`'s --config flags -> the sweep, with every run's configuration loaded once, so that none fails late."""
    if not config_args or not config_args[0].startswith("--config="):
        raise config.ConfigError(f"--config=sweeps/NAME comes first: name one of {', '.join(available())}, or a file")
    spec, _, arg = config_args[0].removeprefix("--config=").partition(":")
    module = _module(spec)
    if module.GOAL not in GOALS:
        raise config.ConfigError(f'{spec}: GOAL is "{module.GOAL}": write "min" or "max"')
    runs = [Run(_name(overrides), overrides) for overrides in module.sweep(arg or None)]
    names = [run.name for run in runs]
    if not runs or len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise config.ConfigError(f"{spec}: sweep() yields {f'{twice[0]} twice' if twice else 'nothing'}")
    base = f"{module.CONFIG}:{arg}" if arg else module.CONFIG
    found = Sweep(Path(spec).stem, base, tuple(config_args[1:]), module.METRIC, module.GOAL, tuple(runs))
    for run in runs:
        found.load(run)
    return found


def keep(sweep: Sweep, out: Path) -> None:
    """A folder belongs to one sweep: written at the start, compared when it goes on; runs may be added or taken away."""
    path = out / FILE
    mine = {"config": sweep.config, "common": list(sweep.common), "metric": sweep.metric, "goal": sweep.goal}
    if path.is_file():
        theirs = json.loads(path.read_text())
        changed = [
            f"{key}: {theirs.get(key)} there, {value} now" for key, value in mine.items() if theirs[key] != value
        ]
        if changed:
            raise config.ConfigError(f"{path} is of another sweep ({'; '.join(changed)}): use another --out")
    content = mine | {"runs": {run.name: dict(run.overrides) for run in sweep.runs}}
    atomic_write(path, json.dumps(content, indent=1) + "\n")


def available() -> list[str]:
    """`sweeps/NAME` of the shipped sweeps."""
    import configs.sweeps

    return sorted(f"sweeps/{module.name}" for module in pkgutil.iter_modules(configs.sweeps.__path__))


def _module(spec: str) -> ModuleType:
    if spec in available():
        return importlib.import_module(f"configs.{spec.replace('/', '.')}")
    if not Path(spec).is_file():
        raise config.ConfigError(f"--config={spec} is no sweep: shipped are {', '.join(available())}, or give a file")
    module = config.module_of_file(spec)
    if lacking := [name for name in ("CONFIG", "METRIC", "GOAL", "sweep") if not hasattr(module, name)]:
        raise config.ConfigError(f"--config={spec} has no {', '.join(lacking)}: see configs/sweeps/nano_lr.py")
    return module


def _name(overrides: Mapping[str, Any]) -> str:
    """Folder name that says what the run changes; a hash stands for what is too long."""
    text = ",".join(f"{field}={value}" for field, value in overrides.items()) or "as_is"
    name = re.sub(r"[^\w.,=+-]", "_", text)
    if name == text and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
