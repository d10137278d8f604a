"""`pbs sweep --config=sweeps/NAME --launcher=local|tpu-vm|slurm`: trains all runs of a sweep and says which is best."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from pbs_jax.config import add_config_flags

LAUNCHERS = ("local", "tpu-vm", "slurm")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="train one configuration with several settings, here or on a cluster",
        description="Trains every run that a sweep file yields and writes a report. Run again with the same --out it goes "
        "on where it stopped; finished runs stay. --config.FIELD=VALUE holds for all runs.",
    )
    add_config_flags(parser)
    parser.add_argument("--launcher", choices=LAUNCHERS, default="local", help="where the runs train (default: local)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of runs and report (default: out/SWEEP)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--launch_args", default="", metavar="ARGS", help="more arguments of launch/tpu.sh or slurm.sh")
    parser.add_argument("--dry_run", action="store_true", help="print every run's command and start nothing")
    parser.add_argument("--report", action="store_true", help="only write the report of what is there")
    parser.add_argument("--yes", action="store_true", help="do not ask before machines that cost money are started")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from data_prep.schema import DataError
    from pbs_jax.sweep import pool, report, spec

    if args.jobs < 1:
        raise DataError(f"--jobs is {args.jobs}: give 1 or more")
    sweep = spec.read(args.config_args)
    out = (args.out or Path("out") / sweep.name).resolve()
    command = pool.command_of(args.launcher, sweep, out, shlex.split(args.launch_args))
    todo = [one for one in sweep.runs if not pool.is_finished(out, one)]
    if args.dry_run:
        return _dry_run(args.launcher, [command(one) for one in todo])
    if args.report:
        spec.keep(sweep, out)  # refuses the flags of another sweep
    else:
        if args.launcher == "local":
            from pbs_jax.train.check import require_usable

            for one in todo:
                require_usable(sweep.load(one))
        else:
            for one in todo:
                _rehearse(one.name, command(one))
        if args.launcher == "tpu-vm" and todo and not args.yes:
            _ask(f"{len(todo)} runs start {len(todo)} Cloud TPU VMs, {args.jobs} at a time, which cost money.")
        spec.keep(sweep, out)
        runner = pool.Pool(sweep, out, command, args.jobs)
        count = iter(range(1, len(sweep.runs) + 1))

        def say(one: spec.Run) -> None:
            item = report.result(sweep, out, one)
            value = f", {sweep.metric} {item.value:.4f}" if item.value is not None else ""
            log = f" ({pool.folder(out, one) / pool.LOG})" if item.state == "failed" else ""
            print(
                f"[{next(count)}/{len(sweep.runs)}] {one.name}: {item.state}{value} {item.why}{log}".rstrip(),
                flush=True,
            )

        runner.run(say)
        if runner.stopped:
            print("stopped by a signal: run the same command to continue")
            return pool.STOPPED
    results, winners = report.write(sweep, out)
    print(report.verdict(sweep, winners))
    print(f"written: {out}/report.html, report.md, report.json")
    bad = [item for item in results if item.state == "failed" or (item.state == "finished" and not item.ranked)]
    return 1 if bad else 0


def _dry_run(launcher: str, commands: list[list[str]]) -> int:
    """The launch scripts print what they would do themselves; a local run is its command."""
    for command in commands:
        if launcher == "local":
            print(shlex.join(command))
            continue
        print(f"# {shlex.join(command)}", flush=True)
        if code := subprocess.run(_dry(command)).returncode:
            return code
    return 0


def _dry(command: list[str]) -> list[str]:
    at = command.index("--")
    return [*command[:at], "--dry_run", *command[at:]]


def _rehearse(name: str, command: list[str]) -> None:
    """Raises DataError where the launch script would not start this run: before the first of them costs anything."""
    from data_prep.schema import DataError

    done = subprocess.run(_dry(command), capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"{name} would not start: {done.stderr.strip()}")


def _ask(text: str) -> None:
    from data_prep.schema import DataError

    if not sys.stdin.isatty():
        raise DataError(f"{text} Nobody can be asked here: add --yes")
    if input(f"{text} Go on? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DataError("nothing was started")
