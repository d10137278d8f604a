"""`pbs train --config=NAME[:key=value] --workdir=DIR`: runs or continues one training phase."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from pbs_jax.config import add_config_flags, from_args


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train one phase, or continue it",
        description="Trains one phase. Run again on the same --workdir it continues where it was stopped or killed, and "
        "on a finished one it does nothing. The next phase names the workdirs it starts from with --config.init_from.*.",
    )
    add_config_flags(parser)
    parser.add_argument(
        "--workdir", type=Path, required=True, metavar="DIR", help="checkpoints, metrics and handover.json"
    )
    parser.add_argument(
        "--inspect_batch",
        type=int,
        nargs="?",
        const=1,
        metavar="STEP",
        help="print the batch of a step (default: the first) as text and stop",
    )
    parser.add_argument(
        "--check_only",
        choices=("here", "gs", "mounted"),
        help="train nothing: check the config with the files here, or for a new machine, which reaches gs:// only, or "
        "mounted folders too",
    )
    hosts = parser.add_argument_group("several hosts", "on Cloud TPU and Slurm --processes=auto finds all of it")
    hosts.add_argument("--processes", default="1", metavar="N|auto", help="processes of the run; each host starts one")
    hosts.add_argument("--process", type=int, metavar="I", help="which of them this is, from 0")
    hosts.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    hosts.add_argument(
        "--wait", type=int, default=300, metavar="S", help="seconds to wait for the others (default 300)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pbs_jax.train.hosts import stopped_while_starting

    with stopped_while_starting(args.processes):
        return _train(args)


def _train(args: argparse.Namespace) -> int:
    config = from_args(args.config_args)
    if args.check_only:
        from pbs_jax.train.check import require_usable, require_usable_elsewhere

        if args.check_only == "here":
            require_usable(config)
            return 0
        name = args.config_args[0].removeprefix("--config=").partition(":")[0]
        require_usable_elsewhere(config, name, args.check_only == "mounted")
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from absl import logging

    logging.set_verbosity(logging.WARNING)
    from pbs_jax.compile_cache import use_compile_cache
    from pbs_jax.train.hosts import join_hosts
    from pbs_jax.train.loop import show_batch, train

    use_compile_cache()
    join_hosts(args.processes, args.process, args.coordinator, args.wait)
    if args.inspect_batch is not None:
        print(show_batch(config, args.inspect_batch))
        return 0
    return train(config, args.workdir)
