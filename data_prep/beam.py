"""Apache Beam as an executor: `Create | Reshuffle | ParDo` over the same units, for Dataflow, Flink, Spark or one machine.

Only units travel, no pixels: each leaves its files where the job's --out is, a folder that all workers share (a mounted
disk; ArrayRecord cannot write to gs://). The caller then reads them as after any earlier run, so manifests are byte-equal
to those of the other executors. Needs the extra `beam`; on a cluster, a worker image with this package in it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from data_prep.schema import DataError

LOCAL = "local"  # Beam's own in-process runner; its present default fetches a program from the network
_LOCAL_RUNNER = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"


def run_on_beam(function: Callable[[Any], Any], units: Sequence[Any], options: str) -> None:
    """Does all units on a Beam runner and waits for it.

    Args:
        function: importable by name; must be idempotent and leave its result in files.
        options: "local", or flags as Beam takes them, e.g. "--runner=DataflowRunner --project=P --region=R".

    Raises:
        DataError: Beam is not installed, does not know an option, or its job failed.
    """
    try:
        import apache_beam
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise DataError(f"--beam needs Apache Beam ({error}): pip install 'pbs-jax[beam]'") from error
    flags = [] if options == LOCAL else shlex.split(options)
    if options != LOCAL and not any(flag.startswith("--runner") for flag in flags):
        raise DataError(f'--beam "{options}" names no runner: give "{LOCAL}" or "--runner=NAME ..."')
    known = PipelineOptions(flags)
    try:
        pipeline = apache_beam.Pipeline(runner=_LOCAL_RUNNER if options == LOCAL else None, options=known)
        (pipeline | apache_beam.Create(list(units)) | apache_beam.Reshuffle() | apache_beam.Map(_do, function))
        state = pipeline.run().wait_until_finish()
    except DataError:
        raise
    except Exception as error:  # runners raise what they like
        raise DataError(f"the Beam job failed ({error}): its finished units stay, the same command goes on") from error
    if str(state) != "DONE":
        raise DataError(f"the Beam job ended as {state}: its finished units stay, the same command goes on")


def _do(unit: Any, function: Callable[[Any], Any]) -> None:
    """The result stays in the unit's files."""
    function(unit)
