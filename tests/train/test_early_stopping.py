"""Early stopping (paper 9.2): the best evaluation is handed over, a resumed run stops where an undisturbed one does."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from data_prep.schema import DataError
from pbs_jax.train import handover, loop
from pbs_jax.train.check import problems
from tests.train import tiny_run
from tests.train.conftest import one_device
from tests.train.test_loop import Killed, assert_identical, logged, train_killed_once

LONG = {"steps": 30, "eval_every": 2, "save_every": 5, "keep": 1}
SHRINK = {
    "early_stopping.metric": "-norm",
    "early_stopping.patience": 2,
}  # the kernel only grows: the first is the best


def die(*args, **kwargs):
    raise Killed


def config(**changes):
    return tiny_run.tiny_config(**LONG | changes)


def steps(workdir: Path) -> tuple[int, int]:
    """The last step trained and the step handed over."""
    return max(line["step"] for line in logged(workdir)), handover.read(workdir)["step"]


def test_it_stops_after_patience_and_hands_the_best_step_over(tmp_path, tiny, capsys):
    assert loop.train(config(**SHRINK), tmp_path, one_device()) == 0
    assert steps(tmp_path) == (6, 2)
    assert "best at step 2" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "6"]  # keep=1, and the best
    handover.load(tmp_path, ["projector"])


def test_what_keeps_getting_better_is_not_stopped(tmp_path, tiny):
    loop.train(config(**SHRINK | {"early_stopping.metric": "norm"}, steps=7), tmp_path, one_device())
    assert steps(tmp_path) == (7, 7)


def test_equal_evaluations_count_as_no_better(tmp_path, tiny, monkeypatch):
    values = iter([0.5, 0.9, 0.9, 0.9])
    monkeypatch.setattr(loop, "log_evaluation", lambda *_: {"val/auc": next(values)})
    loop.train(config(**SHRINK | {"early_stopping.metric": "auc"}), tmp_path, one_device())
    assert steps(tmp_path) == (8, 4)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 6])
def test_a_killed_run_stops_at_the_same_step(at, tmp_path, tiny, monkeypatch):
    loop.train(config(**SHRINK), tmp_path / "whole", one_device())
    train_killed_once(config(**SHRINK), tmp_path / "killed", at, monkeypatch, last=6)
    assert steps(tmp_path / "killed") == steps(tmp_path / "whole") == (6, 2)
    assert_identical(tmp_path / "whole", tmp_path / "killed")


def test_a_run_killed_before_its_handover_is_not_trained_further(tmp_path, tiny, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(handover, "write", die)
        loop.train(config(**SHRINK), tmp_path, one_device())
    before = logged(tmp_path)
    assert loop.train(config(**SHRINK), tmp_path, one_device()) == 0
    assert steps(tmp_path) == (6, 2) and logged(tmp_path) == before


def test_the_evaluation_of_a_step_that_was_stopped_is_made_up_for(tmp_path, tiny, monkeypatch):
    """A preemption saves and leaves; the validation that was due at its step belongs to every run."""
    loop.train(tiny, tmp_path / "whole", one_device())
    with monkeypatch.context() as patch:
        patch.setattr(loop, "stop_signal", lambda: contextlib.nullcontext(lambda step: step == 3))
        assert loop.train(tiny, tmp_path / "stopped", one_device()) == loop.PREEMPTED
    loop.train(tiny, tmp_path / "stopped", one_device())
    found = [[line for line in logged(tmp_path / name) if "val/norm" in line] for name in ("whole", "stopped")]
    assert found[0] == found[1] and [line["step"] for line in found[0]] == [3, 6]


def test_a_metric_that_the_phase_lacks_is_named(tmp_path, tiny):
    with pytest.raises(DataError, match=r'early_stopping.metric "auc" is not measured here: use one of norm'):
        loop.train(config(**SHRINK | {"early_stopping.metric": "auc"}), tmp_path, one_device())


def test_stopping_early_needs_evaluations():
    found = " ".join(problems(config(**SHRINK | {"eval_every": 0})))
    assert "stopping early needs 1 or more of the first and evaluations" in found
