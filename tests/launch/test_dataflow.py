"""launch/dataflow.sh against a fake pbs: what Beam is given, what is asked, what cannot work and is refused."""

from __future__ import annotations

import shlex

import pytest

from tests.launch.conftest import Fake

WHERE = ("--project=p", "--region=r", "--bucket=gs://b/beam/", "--image=gcr.io/p/i:1")
JOB = ("--", "--source", "slides", "--root", "/share/my slides", "--out", "/share/S")


@pytest.fixture(autouse=True)
def recorded(fake: Fake) -> None:
    fake.command("pbs", 'printf "%s\\n" "$@" >"$FAKE_CLOUD/words"')


def test_beam_is_given_dataflow_and_the_units_folders(fake: Fake) -> None:
    done = fake.run("dataflow.sh", *WHERE, "--workers=3", "--subnetwork=regions/r/subnetworks/s", "--yes", *JOB)
    assert done.returncode == 0, done.stderr
    *job, name, beam = (fake.folder / "words").read_text().splitlines()
    assert job == ["data", "run", *JOB[1:]] and name == "--beam"
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in shlex.split(beam))
    assert flags == {
        "runner": "DataflowRunner",
        "project": "p",
        "region": "r",
        "job_name": "pbs-data",
        "temp_location": "gs://b/beam/temp",
        "staging_location": "gs://b/beam/staging",
        "sdk_container_image": "gcr.io/p/i:1",
        "sdk_location": "container",
        "worker_machine_type": "n1-standard-4",
        "max_num_workers": "3",
        "subnetwork": "regions/r/subnetworks/s",
    }


def test_the_command_printed_is_the_command_run(fake: Fake) -> None:
    printed = fake.run("dataflow.sh", *WHERE, "--dry_run", *JOB).stdout
    assert fake.calls() == []
    fake.run("dataflow.sh", *WHERE, "--yes", *JOB)
    assert shlex.split(printed)[1:] == (fake.folder / "words").read_text().splitlines()


def test_nothing_that_costs_starts_unasked(fake: Fake) -> None:
    done = fake.run("dataflow.sh", *WHERE, *JOB)
    assert done.returncode == 2 and "8 n1-standard-4 workers" in done.stderr and "--yes" in done.stderr
    assert fake.calls() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (JOB, "--project=VALUE is needed"),
        ((*WHERE[:3], *JOB), "--image=VALUE is needed"),
        ((*WHERE, "--bucket=b", *JOB), "gs://BUCKET"),
        (WHERE, "nothing to prepare"),
        ((*WHERE, "--wrkers=3", *JOB), "--wrkers=3 is unknown"),
        ((*WHERE, "--yes", "--", "--source=slides", "--root=/share/s", "--out=gs://b/S"), "units are files"),
    ],
)
def test_what_cannot_work_is_a_sentence(arguments: tuple[str, ...], said: str, fake: Fake) -> None:
    done = fake.run("dataflow.sh", *arguments)
    assert done.returncode == 2 and said in done.stderr
    assert fake.calls() == []
