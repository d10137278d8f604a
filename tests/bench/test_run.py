"""Asking models: what they are shown, resuming after a kill, modalities, and the report over seeds."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from data_prep.schema import DataError, option_order
from pbs_jax import cli
from pbs_jax.bench import run, score
from pbs_jax.bench.adapters import Response, load_adapter
from pbs_jax.bench.evaluate import Settings
from pbs_jax.bench.records import load_predictions, load_questions
from pbs_jax.bench.report import write
from tests.bench.conftest import Table

FAST = Settings(draws=200)


@pytest.fixture
def model(dataset: Path, use_model: Callable[[object], None]) -> Table:
    table = Table(load_questions(dataset, "test").items)
    use_model(table)
    return table


def test_answers_are_recorded_with_the_options_as_shown(dataset: Path, tmp_path: Path, model: Table) -> None:
    assert run.run("table", dataset, tmp_path / "r") == 0
    questions = load_questions(dataset, "test")
    found = load_predictions(tmp_path / "r/predictions.jsonl", questions)
    assert len(found) == len(questions.items)
    for item in found:
        stored = next(qa for qa in questions.items if qa.id == item.qa.id)
        assert item.perm == option_order(stored.id, len(stored.options))
        assert item.qa.options == tuple(stored.options[k] for k in item.perm)
    assert run.run("table", dataset, tmp_path / "r") == 0
    assert len(model.asked) == len(found)  # the second call asked nothing
    card = json.loads((tmp_path / "r/run.json").read_text())
    assert (card["protocol"], card["modality"], card["dataset_id"]) == ("shuffle", "image", questions.dataset_id)


def test_models_get_no_gold_and_no_path(dataset: Path, tmp_path: Path, model: Table) -> None:
    run.run("table", dataset, tmp_path / "r", limit=50)
    for request in model.asked:
        fields = repr([getattr(request, name) for name in request.__dataclass_fields__ if name != "images"])
        assert "made:" not in fields  # image ids carry the label here
        assert request.text.startswith(request.question) and len(request.images) == 1
    (choice,) = {r.text for r in model.asked if r.question_type == "multiple_choice"} and [
        next(r for r in model.asked if r.question_type == "multiple_choice")
    ]
    assert choice.text.endswith("\nOptions:" + "".join(f"\n{'ABCD'[k]}. {o}" for k, o in enumerate(choice.options)))


def shade(encoded: tuple[bytes, ...]) -> int:
    return round(sum(Image.open(io.BytesIO(encoded[0])).convert("L").get_flattened_data()) / 256)


def test_modalities(dataset: Path, tmp_path: Path, model: Table) -> None:
    shown = {}
    for modality in run.MODALITIES:
        model.asked.clear()
        run.run("table", dataset, tmp_path / modality, modality=modality)
        shown[modality] = {r.id: r.images for r in model.asked}
    assert set(shown["blind"].values()) == {()}
    assert len(set(shown["blank"].values())) == 1
    images = {qa.id: qa.image_id for qa in load_questions(dataset, "test").items}
    pairs = {(images[id], shade(shown["image"][id]), shade(shown["mismatched"][id])) for id in images}
    assert len(pairs) == len(set(images.values()))  # one wrong picture per image
    assert all(right != wrong for _, right, wrong in pairs)
    assert sorted(right for _, right, _ in pairs) == sorted(wrong for *_, wrong in pairs)


def test_other_settings_are_refused_in_the_same_folder(dataset: Path, tmp_path: Path, model: Table) -> None:
    run.run("table", dataset, tmp_path, limit=5)
    assert run.run("table", dataset, tmp_path, limit=9) == 0
    assert len(load_predictions(tmp_path / "predictions.jsonl")) == 9
    with pytest.raises(DataError, match="was made with modality 'image', now 'blind'"):
        run.run("table", dataset, tmp_path, modality="blind")


def test_errors_are_asked_again(dataset: Path, tmp_path: Path, model: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Table, "generate", lambda self, requests, mode: [Response("", "error") for _ in requests])
        assert run.run("table", dataset, tmp_path, limit=20) == 3
    assert run.run("table", dataset, tmp_path, limit=20) == 0
    assert {item.status for item in load_predictions(tmp_path / "predictions.jsonl")} == {"ok"}


def test_letter_likelihood_is_asked_of_closed_types_only(dataset: Path, tmp_path: Path, model: Table) -> None:
    run.run("table", dataset, tmp_path, mode="letter_likelihood")
    modes = Counter((p.qa.question_type, p.answer_mode) for p in load_predictions(tmp_path / "predictions.jsonl"))
    assert set(modes) == {
        ("true_false", "letter_likelihood"),
        ("multiple_choice", "letter_likelihood"),
        ("fill_blank", "generate"),
        ("open", "generate"),
    }


SLOW = """
import sys, time
from pathlib import Path
from pbs_jax.bench import run
from pbs_jax.bench.adapters import Constant
class Slow(Constant):
    def generate(self, requests, mode):
        time.sleep(0.004)
        return super().generate(requests, mode)
run.load_adapter = lambda spec, options: Slow("true")
run.run("slow", Path(sys.argv[1]), Path(sys.argv[2]), batch_size=3)
"""


@pytest.mark.slow
def test_killed_runs_continue_without_loss_or_repeat(dataset: Path, tmp_path: Path, repo: Path) -> None:
    expected = {qa.id for qa in load_questions(dataset, "test").items}
    command = [sys.executable, "-c", SLOW, str(dataset), str(tmp_path / "r")]
    path, seen = tmp_path / "r/predictions.jsonl", 0
    for _ in range(2):
        process = subprocess.Popen(command, cwd=repo, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if path.exists() and path.read_bytes().count(b"\n") > seen + 30:
                break
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        lines = path.read_bytes().count(b"\n")
        assert seen < lines < len(expected)
        seen = lines
    subprocess.run(command, cwd=repo, check=True, capture_output=True)
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == len(expected) and set(ids) == expected


def test_replay_and_constant(dataset: Path, tmp_path: Path, model: Table) -> None:
    run.run("table", dataset, tmp_path / "a", limit=40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "load_adapter", load_adapter)
        assert run.run(f"replay:{tmp_path}/a/predictions.jsonl", dataset, tmp_path / "b", limit=40) == 0
        assert run.run(f"replay:{tmp_path}/a/predictions.jsonl", dataset, tmp_path / "c", limit=41) == 3
    a, b = (load_predictions(tmp_path / name / "predictions.jsonl") for name in "ab")
    assert [p.prediction for p in a] == [p.prediction for p in b]
    assert load_adapter("constant:yes").name == 'constant "yes"'
    with pytest.raises(DataError, match='--model "gpt" is unknown'):
        load_adapter("gpt")


def test_report_over_seeds(dataset: Path, tmp_path: Path, use_model: Callable[[object], None]) -> None:
    items = load_questions(dataset, "test").items
    folders = []
    for seed in (0, 1):
        for modality, wrong in (("image", 1), ("blind", 6)):
            use_model(Table(items, wrong, seed))
            folders.append(tmp_path / f"{modality}{seed}")
            run.run("table", dataset, folders[-1], modality=modality)
    train = load_questions(dataset, "train").items
    found = write(tmp_path / "report", [score.load_run(folder) for folder in folders], FAST, train=train)
    assert {item["question_type"] for item in found["gains"]} == {"true_false", "multiple_choice", "fill_blank", "open"}
    assert all(item["difference"]["low"] > 0 for item in found["gains"])
    assert len(found["attributes"]["table"]) == 11 and found["classes"]["table"][0]["track"] == "cell_id"
    accuracy = next(c for c in found["cells"] if c["row"] == "table" and c["metric"] == "accuracy")
    assert len(accuracy["seeds"]) == 2 and 0.8 < accuracy["value"] < 1
    markdown = (tmp_path / "report/report.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|", markdown, re.MULTILINE)
    assert rows.index('always "True"') < rows.index("table, blind") < rows.index("table")
    page = (tmp_path / "report/report.html").read_text()
    assert page.count("<table") >= markdown.count("\n### ") and "http" not in page.replace("http-equiv", "")


def test_compare_command(dataset: Path, tmp_path: Path, model: Table, capsys: pytest.CaptureFixture[str]) -> None:
    run.run("table", dataset, tmp_path / "image")
    model._wrong = 5
    run.run("table", dataset, tmp_path / "blind", modality="blind")
    command = ["bench", "compare", str(tmp_path / "image"), str(tmp_path / "blind"), "--draws=200"]
    assert cli.main([*command, f"--out={tmp_path}"]) == 0
    assert "| table - table, blind | Cell, in domain | T/F Bal. acc" in capsys.readouterr().out
    assert all(item["difference"]["low"] > 0 for item in json.loads((tmp_path / "compare.json").read_text()))
    assert cli.main(command[:3]) == 1
    assert "runs of two models" in capsys.readouterr().err


def test_audit_command_prints_and_writes(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "audit", str(dataset), "--out", str(tmp_path)]) == 0
    assert "Gold balance" in capsys.readouterr().out
    assert json.loads((tmp_path / "audit.json").read_text())["groups"]
    assert cli.main(["bench", "audit", str(tmp_path / "nowhere")]) == 1
    assert "neither a JSONL file" in capsys.readouterr().err


def test_our_model_sees_each_picture_once_and_no_gold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's own work, with a stand-in for the network: pictures encoded once, rows in the questions' order."""
    import numpy as np

    from pbs_jax.bench.adapters import Pbs, Request

    class Answerer:
        def encode(self, images: list[bytes]) -> np.ndarray:
            assert images == [b"one", b"two"]
            return np.array([1.0, 2.0])

        def answer(self, visual: np.ndarray | None, questions: list, options: list, mode: str) -> list[str]:
            assert not any(qa.answer or qa.image_id for qa in questions)
            rows = ["blind"] * len(questions) if visual is None else [str(int(v)) for v in visual]
            return [f"{qa.id}:{row}:{mode}" for qa, row in zip(questions, rows, strict=True)]

    model = Pbs.__new__(Pbs)
    model._answerer = Answerer()
    pictures = (b"one", b"two", b"one")
    asked = [Request(f"q{k}", (), (image,), "Big?", "true_false", (), "Big?") for k, image in enumerate(pictures)]
    assert [r.text for r in model.generate(asked, "generate")] == ["q0:1:generate", "q1:2:generate", "q2:1:generate"]
    blind = [Request(r.id, (), (), r.question, r.question_type, (), r.text) for r in asked]
    assert model.generate(blind, "letter_likelihood")[0].text == "q0:blind:letter_likelihood"
    with pytest.raises(DataError, match="with and without a picture"):
        model.generate([asked[0], blind[1]], "generate")
