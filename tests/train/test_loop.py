"""The loop keeps its promises: exact resume, another mesh, refused configs, strict handover."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from data_prep.schema import DataError
from pbs_jax.sharding.mesh import make_mesh
from pbs_jax.train import handover, loop
from pbs_jax.train.metrics import MetricsWriter
from pbs_jax.train.optimizer import schedule
from pbs_jax.train.state import leaves_by_name
from tests.train import tiny_run
from tests.train.conftest import cell_qa_config, one_device


def trained(workdir: Path) -> dict[str, np.ndarray]:
    names = handover.read(workdir)["trees"]
    return {name: np.asarray(leaf) for name, leaf in leaves_by_name(handover.load(workdir, names)).items()}


def assert_identical(left: Path, right: Path) -> None:
    one, two = trained(left), trained(right)
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)


class Killed(Exception):
    """Stands for a kill between two steps."""


@pytest.fixture(scope="module")
def whole(drawn, phases, tmp_path_factory) -> Path:
    """An undisturbed run."""
    workdir = tmp_path_factory.mktemp("whole")
    loop.train(cell_qa_config(drawn, phases), workdir, one_device())
    return workdir


def train_killed_once(
    config, workdir: Path, at: int, monkeypatch: pytest.MonkeyPatch, last: int | None = None, then=None
) -> None:
    """Trains, dies after step `at`, and goes on to the `last` (default: the config's), of the config `then` if given."""
    write = MetricsWriter.write

    def die(self, step, metrics):
        write(self, step, metrics)
        if step == at:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MetricsWriter, "write", die)
        loop.train(config, workdir, one_device())
    assert not (workdir / handover.FILE).exists()
    assert loop.train(then or config, workdir, one_device()) == 0
    steps = [line["step"] for line in logged(workdir) if "train/loss" in line]
    assert steps == [*range(1, (last or config.steps) + 1)], "a step is missing or logged twice"


def logged(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3])
def test_a_killed_run_continues_to_the_same_weights(at, drawn, phases, whole, tmp_path, monkeypatch):
    train_killed_once(cell_qa_config(drawn, phases), tmp_path, at, monkeypatch)
    assert_identical(whole, tmp_path)


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_killed_small_run_continues_to_the_same_weights(at, tmp_path, monkeypatch, tiny):
    loop.train(tiny, tmp_path / "whole", one_device())
    train_killed_once(tiny, tmp_path / "killed", at, monkeypatch)
    assert_identical(tmp_path / "whole", tmp_path / "killed")
    # Noise, data order and evaluations too are those of the undisturbed run.
    values = [[line for line in logged(tmp_path / name) if "train/loss" in line] for name in ("whole", "killed")]
    assert [line["train/loss"] for line in values[0]] == [line["train/loss"] for line in values[1]]
    assert [line["train/indices"] for line in values[0]] == [line["train/indices"] for line in values[1]]


def test_other_threads_read_the_same_examples_on(tmp_path, monkeypatch, tiny):
    """C30: a run of two threads goes on with one that reads less ahead."""
    loop.train(tiny, tmp_path / "whole", one_device())
    first = tiny_run.tiny_config(**{"data.threads": 2})
    then = tiny_run.tiny_config(**{"data.threads": 1, "data.prefetch": 4})
    train_killed_once(first, tmp_path / "killed", 3, monkeypatch, then=then)
    assert_identical(tmp_path / "whole", tmp_path / "killed")


def test_a_finished_run_does_nothing_and_another_config_is_refused(drawn, phases, whole):
    before = (whole / "metrics.jsonl").read_bytes()
    assert loop.train(cell_qa_config(drawn, phases), whole, one_device()) == 0
    assert (whole / "metrics.jsonl").read_bytes() == before
    with pytest.raises(DataError, match=r"another config .*seed: 42 there, 7 now"):
        loop.train(cell_qa_config(drawn, phases, seed=7), whole, one_device())


@pytest.mark.slow
def test_eight_and_four_devices_agree(drawn, phases, tmp_path):
    """DESIGN 8: same data, loss within 1e-5 relative over 20 steps, though the sums run in another order."""
    config = cell_qa_config(drawn, phases, steps=20, optimizer__lr=1e-4)
    losses = []
    for count in (8, 4):
        workdir = tmp_path / str(count)
        mesh = make_mesh(fsdp=2, devices=jax.devices()[:count])
        loop.train(config, workdir, mesh)
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["train/loss"] for line in lines if "train/loss" in line])
    assert len(losses[0]) == 20
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_resumes_on_four(drawn, phases, tmp_path, monkeypatch):
    config = cell_qa_config(drawn, phases)
    loop.train(config, tmp_path / "whole", make_mesh(fsdp=2))
    write = MetricsWriter.write

    def die(self, step, metrics):
        write(self, step, metrics)
        if step == 3:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MetricsWriter, "write", die)
        loop.train(config, tmp_path / "moved", make_mesh(fsdp=2))
    loop.train(config, tmp_path / "moved", make_mesh(fsdp=2, devices=jax.devices()[:4]))
    one, two = trained(tmp_path / "whole"), trained(tmp_path / "moved")
    for name, value in one.items():
        # Key biases have no true gradient: Adam turns rounding into steps of the learning rate there.
        if not name.endswith("key/bias"):
            np.testing.assert_allclose(value, two[name], atol=2e-4, err_msg=name)


def test_a_handover_names_what_is_wrong(drawn, phases, tmp_path):
    with pytest.raises(DataError, match="that phase is not finished"):
        handover.read(tmp_path)
    with pytest.raises(DataError, match="is of phase language_model, expected cell_representation"):
        loop.train(cell_qa_config(drawn, {**phases, "qformer": phases["language_model"]}), tmp_path / "x", one_device())
    with pytest.raises(DataError, match="holds the trees language_model, not head"):
        handover.load(phases["language_model"], ["head"])


def test_a_changed_leaf_is_named(phases, tmp_path):
    content = json.loads((phases["qformer"] / handover.FILE).read_text())
    content["trees"]["qformer"]["query_tokens"] = [[1, 2], "float32"]
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "checkpoints").symlink_to(phases["qformer"] / "checkpoints")
    (copy / handover.FILE).write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"qformer/query_tokens is .* not "):
        handover.load(copy, ["qformer"])


@pytest.mark.parametrize("added", ["accumulate", "init_from.projector"])
def test_a_run_begun_before_a_field_was_added_goes_on(added, tmp_path, tiny):
    loop.begin(tiny, tiny_run.build(tiny), tmp_path)
    file = tmp_path / "config.json"
    older = json.loads(file.read_text())
    *outer, name = added.split(".")
    del (older[outer[0]] if outer else older)[name]
    file.write_text(json.dumps(older))
    loop.check_config(tiny, tmp_path)
    older["optimizer"]["lr"] = 0.5
    file.write_text(json.dumps(older))
    with pytest.raises(DataError, match=r"another config \(optimizer.lr: 0.5 there, 0.1 now\)"):
        loop.check_config(tiny, tmp_path)


def test_how_data_are_read_and_where_they_lie_may_change(tmp_path, tiny):
    """Their content may not: see the next tests."""
    loop.begin(tiny, tiny_run.build(tiny), tmp_path)
    changes = {"data.threads": 4, "data.prefetch": 7, "data.root": "/elsewhere", "data.features": "/f", "mesh.fsdp": 2}
    loop.check_config(tiny_run.tiny_config(**changes), tmp_path)
    with pytest.raises(DataError, match=r"another config .data_seed"):
        loop.check_config(tiny_run.tiny_config(**changes, data_seed=9), tmp_path)


def test_a_killed_start_leaves_its_time_until_the_last_save(tmp_path, monkeypatch, tiny):
    train_killed_once(tiny, tmp_path, 3, monkeypatch)
    starts = [json.loads(line) for line in (tmp_path / "goodput.jsonl").read_text().splitlines()]
    assert [start["steps"] for start in starts] == [2, tiny.steps - 2]
    assert all(start["step"] > 0 for start in starts)


def test_a_start_that_an_error_ends_leaves_its_report(tmp_path, tiny):
    with pytest.raises(DataError, match="not finite"):
        loop.train(tiny_run.tiny_config(**{"optimizer.lr": 1e30}), tmp_path, one_device())
    assert "optimizer.lr" in (tmp_path / "run_report.html").read_text()


def test_a_refused_config_leaves_the_workdir_to_the_corrected_one(tmp_path, tiny):
    with pytest.raises(DataError, match="64 examples, fewer than batch_size=128"):
        loop.train(tiny_run.tiny_config(batch_size=128), tmp_path, one_device())
    assert not any(tmp_path.iterdir())
    assert loop.train(tiny, tmp_path, one_device()) == 0


def test_a_run_does_not_go_on_with_other_data(tmp_path, tiny, monkeypatch):
    def on(digit: str):
        return lambda config: dataclasses.replace(tiny_run.build(config), facts={"datasets": {"cells": digit * 64}})

    loop.begin(tiny, on("a")(tiny), tmp_path)
    monkeypatch.setattr(loop, "build_phase", on("b"))
    with pytest.raises(DataError, match=r"begun on cells a{12}, config.data now holds b{12}: use another --workdir"):
        loop.train(tiny, tmp_path, one_device())
    (tmp_path / loop.DATASETS).unlink()  # as in a run begun before there was this record
    assert loop.train(tiny, tmp_path, one_device()) == 0
    assert json.loads((tmp_path / loop.DATASETS).read_text()) == {"cells": "b" * 64}


def test_the_learning_rate_is_logged_and_drawn(tmp_path, tiny):
    loop.train(tiny, tmp_path, one_device())
    rate = schedule(tiny.optimizer.lr, tiny.steps, tiny.optimizer.warmup_fraction)
    expected = [float(rate(update)) for update in range(tiny.steps)]
    assert [line["lr"] for line in logged(tmp_path) if "lr" in line] == pytest.approx(expected)
    assert "Learning rate" in (tmp_path / "run_report.html").read_text()


def test_a_loss_that_is_not_finite_stops_before_the_save(tmp_path, tiny):
    config = tiny_run.tiny_config(**{"optimizer.lr": 1e30, "save_every": 1})
    with pytest.raises(DataError, match=r"not finite at step 2 .*example indices.*--inspect_batch=2"):
        loop.train(config, tmp_path, one_device())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()] == ["1"]


def test_frozen_trees_are_in_no_checkpoint(whole):
    assert set(handover.read(whole)["trees"]) == {"qformer", "projector"}
    with pytest.raises(DataError, match="not language_model"):
        handover.load(whole, ["language_model"])


def test_the_mesh_that_does_not_fit_is_refused():
    with pytest.raises(DataError, match="needs 3 devices but 8 are visible"):
        make_mesh(3)


def test_a_finished_run_leaves_its_report_and_says_where_the_time_went(whole):
    page = (whole / "run_report.html").read_text()
    assert "Where the time went" in page and "norm/param_norm" in page and "optimizer.lr" in page
    start = json.loads((whole / "goodput.jsonl").read_text())
    assert start["steps"] == 4 and min(start[part] for part in ("init", "data", "step", "save", "eval")) > 0
    lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    later = [line for line in lines if "norm/update_norm" in line][-1]  # the first step's rate is 0
    assert later["time/tokens_per_s"] > 0 and later["norm/update_norm"] > 0
    assert "time/mfu" not in later, "a CPU has no peak to compare with"


def test_a_batch_can_be_read_as_text(drawn, phases):
    text = loop.show_batch(cell_qa_config(drawn, phases))
    lines = text.splitlines()
    assert sum("'<|image_pad|>'" in line for line in lines) == 32
    scored = [line for line in lines if line.split()[-2:-1] and "'<|im_end|>'" in line]
    assert scored, "no answer ends in the text"
    assert any(line.startswith("  visual") and "bfloat16" in line for line in lines)


def test_the_first_bad_step_is_named_with_its_examples(tmp_path):
    def step(number: int, loss: float) -> tuple[int, jax.Array, dict[str, jax.Array]]:
        return number, jax.numpy.asarray([10 * number, 10 * number + 1]), {"loss": jax.numpy.asarray(loss)}

    recent = [step(5, 1.0), step(6, float("nan")), step(7, float("nan"))]
    with pytest.raises(
        DataError, match=r"train/loss not finite at step 6 \(example indices \[60, 61\]: cell 60, cell 61\)"
    ):
        loop.require_finite(recent, tmp_path, lambda index: f"cell {index}")
    assert loop.require_finite(recent[:1], tmp_path, str) == {"train/loss": 1.0}
