"""The command line: help at every level, exit codes, sentences instead of tracebacks, and typed configurations."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pbs_jax
from data_prep.schema import DataError
from pbs_jax import cli, config


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command path that a parser knows, the groups included."""
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*path, name))


def test_help_at_every_level(capsys: pytest.CaptureFixture[str]) -> None:
    paths = list(commands(cli.build_parser()))
    assert {("demo",), ("data",), ("train",), ("bench",), ("weights",)} <= set(paths)
    for path in paths:
        with pytest.raises(SystemExit) as stop:
            cli.main([*path, "--help"])
        assert stop.value.code == 0, path
        assert " ".join(("usage: pbs", *path)) in " ".join(capsys.readouterr().out.split()), path


def test_help_is_light() -> None:
    code = "import sys; from pbs_jax import cli; cli.build_parser(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "torch", "tensorflow_datasets", "sklearn", "transformers"} & set(loaded)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"pbs {pbs_jax.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["data"], ["data", "nonsense"], ["demo", "--nonsense"]])
def test_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: pbs" in capsys.readouterr().err


def test_config_where_none_is_taken_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--config=phase3_cell_qa"])
    assert stop.value.code == 2
    assert "takes no --config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("cells/a.jpg is empty: copy it again"), "cells/a.jpg is empty: copy it again"),
        (FileNotFoundError(2, "No such file or directory", "x.csv"), "x.csv: No such file or directory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 'pip install "pbs-jax[torch]"'),
        (ModuleNotFoundError("No module", name="apache_beam.io"), 'pip install "pbs-jax[beam]"'),
        (TypeError("bad"), "unexpected TypeError: bad"),
    ],
)
def test_failures_are_sentences(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(error, monkeypatch) == 1
    err = capsys.readouterr().err
    assert said in err and err.startswith("pbs: ") and "Traceback" not in err
    monkeypatch.setenv("PBS_TRACEBACK", "1")
    assert run_raising(error, monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.parametrize(("command", "kept"), [("train", True), ("data", False)])
def test_a_computing_command_keeps_its_memory(command: str, kept: bool, repo: Path) -> None:
    code = "import os; from pbs_jax import cli; cli.keep_memory(); print(os.environ.get('GLIBC_TUNABLES'))"
    clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", code, command], env=clean, cwd=repo, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (cli.MALLOC if kept else "None")


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_raising(KeyboardInterrupt(), monkeypatch) == 130


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(args: argparse.Namespace) -> int:
        raise error

    def build() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser("pbs")
        parser.set_defaults(run=run)
        return parser

    monkeypatch.setattr(cli, "build_parser", build)
    return cli.main([])


def test_config_values_and_overrides() -> None:
    official = config.load("phase3_cell_qa:size=7b,recipe=official")
    assert (official.epochs, official.batch_size, official.optimizer.lr, official.seed) == (20, 2, 5e-5, 42)
    phase1 = config.load("phase1_cell_representation:recipe=official,size=7b")
    assert (phase1.epochs, phase1.batch_size, phase1.optimizer.clip) == (100, 32, 1.0)
    changed = config.load("phase3_cell_qa", ["--config.optimizer.lr=1", "--config.data.root=out", "--config.steps=7"])
    assert (changed.optimizer.lr, changed.data.root, changed.steps) == (1.0, "out", 7)
    assert isinstance(changed.optimizer.lr, float) and changed.is_locked
    assert config.load("phase0_backbone:debug").steps < 10
    assert config.load("phase0_backbone").steps > 10, "loading leaves nothing behind"


def test_epochs_give_the_official_run_lengths() -> None:
    phase1, phase3 = (
        config.load(f"{name}:size=7b,recipe=official") for name in ("phase1_cell_representation", "phase3_cell_qa")
    )
    assert config.total_steps(phase1, 28_970) == 100 * 906  # the counts that the official trainer prints
    assert config.total_steps(phase3, 20_985) == 20 * 10_493
    assert config.total_steps(config.load("phase3_cell_qa", ["--config.steps=7"]), 20_985) == 7


def test_every_shipped_config_loads() -> None:
    for name in config.available():
        fields = config.describe(config.load(name))
        assert fields["phase"] and fields["size"] == "nano" and fields["steps"] > 0, name


def test_config_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import phase3_cell_qa\n\ndef get_config(arg=None):\n"
        "    config = phase3_cell_qa.get_config(arg)\n    config.steps = 3\n    return config\n"
    )
    assert config.load(f"{path}:size=small").steps == 3
    assert config.load(f"{path}:size=small").size == "small"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--config is missing: name one of classifier, phase0_backbone"),
        (["--config=phase3_cell"], 'did you mean "phase3_cell_qa"?'),
        (["--config=no/such.py"], "no/such.py: no such file"),
        (["--config=phase3_cell_qa:sise=nano"], 'argument "sise" is unknown'),
        (["--config=phase3_cell_qa:size=huge"], "is not one of nano, small, 3b, 7b"),
        (["--config=phase0_backbone:size=7b"], "pbs weights import"),
        (["--config=phase3_cell_qa", "--config.optimiser.lr=1"], 'did you mean "optimizer.lr"?'),
        (["--config=phase3_cell_qa", "--config.steps=1.5"], "steps takes one int"),
        (["--config=phase3_cell_qa", "--config.optimizer.lr=x"], "optimizer.lr takes one float"),
        (["--config=phase3_cell_qa", "--config.size=7b"], "goes into the argument"),
        (["--config.steps=5", "--config=phase3_cell_qa"], "stands before --config"),
        (["--config=phase3_cell_qa", "--config=phase3_cell_qa"], "given twice"),
    ],
)
def test_config_mistakes_are_sentences(argv: list[str], said: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        config.from_args(argv)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_split_argv_keeps_both_orders() -> None:
    argv = ["train", "--config", "phase3_cell_qa", "--workdir", "w", "--config.steps", "5", "--noconfig.debug"]
    assert config.split_argv(argv) == (
        ["--config=phase3_cell_qa", "--config.steps=5", "--noconfig.debug"],
        ["train", "--workdir", "w"],
    )
    with pytest.raises(config.ConfigError, match="needs a value"):
        config.split_argv(["--config"])
