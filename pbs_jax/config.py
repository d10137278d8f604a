"""Configurations from the command line: `--config=NAME[:key=value,...] [--config.field=value ...]`.

NAME is a file of the `configs` package or a path to a .py file with `get_config(arg)`. Overrides are parsed by
ml_collections' config_flags, type-strict; every mistake is one sentence (ConfigError), never a traceback.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import math
import pkgutil
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import flags
from ml_collections import ConfigDict
from ml_collections.config_flags import config_flags

from data_prep.schema import DataError

CONFIG_FLAG = re.compile(r"--(no)?config(\.[^=]*)?(=.*)?$", re.DOTALL)


FROM_ARGUMENT = ("phase", "size", "recipe", "debug")


class ConfigError(DataError):
    """A configuration that cannot be used: one sentence with the fix."""


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Documents `--config` in a command's help and asks `pbs` to hand its values over as `args.config_args`."""
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config", metavar="NAME[:key=value,...]", help="a file of configs/ or a path, with its arguments"
    )
    group.add_argument("--config.FIELD", metavar="VALUE", help="override a field, e.g. --config.optimizer.lr=1e-4")
    parser.set_defaults(takes_config=True)


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--config...` flags (always as `--flag=value`) from the other arguments, keeping both orders."""
    config_args: list[str] = []
    rest: list[str] = []
    items = iter(argv)
    for item in items:
        match = CONFIG_FLAG.match(item)
        if not match:
            rest.append(item)
        elif match[1] or match[3]:
            config_args.append(item)
        else:
            value = next(items, None)
            if value is None:
                raise ConfigError(f"{item} needs a value: write {item}=VALUE")
            config_args.append(f"{item}={value}")
    return config_args, rest


def from_args(config_args: Sequence[str]) -> ConfigDict:
    """`split_argv`'s first list -> locked config. Raises ConfigError, also for an override before --config."""
    specs = [k for k, item in enumerate(config_args) if item.startswith("--config=")]
    names = ", ".join(available())
    if not specs:
        raise ConfigError(f"--config is missing: name one of {names}, or the path of your own file")
    if len(specs) > 1:
        raise ConfigError("--config is given twice: keep one")
    if specs[0] != 0:
        raise ConfigError(f"{config_args[0]} stands before --config: put --config first, then what it overrides")
    return load(config_args[0].removeprefix("--config="), config_args[1:])


def load(spec: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """Reads `spec` ("phase3_cell_qa:size=nano,recipe=official") and applies `overrides` ("--config.optimizer.lr=1e-4").

    Returns a locked ConfigDict. Raises ConfigError: unknown name, key or field, missing file, value of the wrong type.
    """
    name, _, arg = spec.partition(":")
    module = _module(name)
    try:
        config = module.get_config(arg or None)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"--config={spec}: {error}") from error
    config.lock()
    return _override(config, overrides)


def total_steps(config: ConfigDict, examples: int) -> int:
    """Optimiser updates of a run: `steps`, or `epochs` passes over `examples` (the last batch may be short)."""
    return config.epochs * math.ceil(examples / config.batch_size) if config.epochs else config.steps


def available() -> list[str]:
    """Names of the shipped phase configurations."""
    import configs

    return sorted(m.name for m in pkgutil.iter_modules(configs.__path__) if m.name != "base" and not m.ispkg)


def describe(config: ConfigDict) -> dict[str, Any]:
    """Flat `a.b.c` -> value view, in field order: what run records store and error messages search."""
    return dict(_fields(config))


def _fields(config: ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in config:
        value = config[key]
        if isinstance(value, ConfigDict):
            yield from _fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _module(name: str) -> ModuleType:
    if re.fullmatch(r"\w+", name):
        if name not in available():
            raise ConfigError(f"--config={name} is not a configuration{_nearest(name, available())}")
        return importlib.import_module(f"configs.{name}")
    if not Path(name).is_file():
        raise ConfigError(f"--config={name}: no such file; shipped configurations are {', '.join(available())}")
    module = module_of_file(name)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={name} has no get_config(arg) function")
    return module


def module_of_file(name: str) -> ModuleType:
    """A user's own Python file, imported from its path."""
    spec = importlib.util.spec_from_file_location("pbs_user_config", name)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={name} is not a Python file: give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _override(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    known = describe(config)
    for item in overrides:
        field = re.sub(r"^--(no)?config\.", "", item.partition("=")[0])
        if field in FROM_ARGUMENT:
            raise ConfigError(
                f"{item}: {field} decides other fields, so it goes into the argument: --config=NAME:{field}=..."
            )
        if field not in known:
            raise ConfigError(f"--config.{field}: no such field{_nearest(field, list(known))}")
        values = flags.FlagValues()  # ours alone: nothing is registered globally, so that load() can be called again
        try:
            holder = config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=["pbs", item])
            values(["pbs", item])
        except (flags.Error, TypeError, ValueError) as error:
            kind = type(known[field]).__name__
            raise ConfigError(f"{item}: {field} takes one {kind}, for example {known[field]!r}") from error
        config = holder.value
    return config


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f'; did you mean "{near[0]}"?' if near else f"; known are {', '.join(known)}"
