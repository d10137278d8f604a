"""Whole runs against faults: servers and children that fail, kills, spent budgets, the shared cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from data_prep.datasets import qa_record
from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.bench import run
from pbs_jax.bench.adapters import Request
from pbs_jax.bench.cache import Cached
from pbs_jax.bench.records import load_predictions, load_questions
from tests.bench.conftest import Counting, Table
from tests.data_prep.llm_server import Action, Service, completion, failure, serving


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[..., Action]], Service]]:
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    opened = []

    def start(plan: Callable[..., Action]) -> Service:
        opened.append(serving(Service(plan)))
        return opened[-1].__enter__()

    yield start
    for context in opened:
        context.__exit__(None, None, None)


def command(dataset: Path, out: Path, *more: str) -> list[str]:
    return ["bench", "run", f"--data={dataset}", f"--out={out}", *more]


def test_a_run_behind_a_server_with_faults(
    dataset: Path, tmp_path: Path, serve: Callable[..., Service], capsys: pytest.CaptureFixture[str]
) -> None:
    """Passing faults are had over again, lasting ones are errors that the same command asks again."""
    broken = True

    def plan(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        if "type" in text and broken:
            return failure(400, "context_length_exceeded")
        return failure(429, retry_after="0.01") if nth == 1 and "big" in text else completion("true")

    service = serve(plan)
    here = command(
        dataset, tmp_path, "--model=openai:fake-1", f"--base-url={service.url}", "--limit=40", "--llm-workers=8"
    )
    assert cli.main(here) == 3
    said = capsys.readouterr().out
    found = load_predictions(tmp_path / "predictions.jsonl", load_questions(dataset, "test"))
    wrong = [item for item in found if item.status == "error"]
    assert (
        len(found) == 40 and 0 < len(wrong) < 40 and f"{len(wrong)} questions ended in an error (the first: 400" in said
    )
    broken = False
    assert cli.main(here) == 3  # a rejected request is not sent again unasked: it may never be taken
    assert cli.main([*here, "--retry-rejected"]) == 0
    assert {item.status for item in load_predictions(tmp_path / "predictions.jsonl")} == {"ok"}
    assert max(service.paid.values()) <= len(
        {body["messages"][0]["content"][0]["image_url"]["url"] for body in service.bodies}
    )


def test_a_spent_budget_ends_the_run_and_a_larger_one_goes_on(
    dataset: Path, tmp_path: Path, serve: Callable[..., Service], capsys: pytest.CaptureFixture[str]
) -> None:
    service = serve(lambda text, nth, body: completion("true"))
    here = command(dataset, tmp_path, "--model=openai:fake-1", f"--base-url={service.url}", "--limit=60")
    assert cli.main([*here, "--max-requests=20"]) == 3
    assert "40 questions not asked (not sent: the budget" in capsys.readouterr().out
    assert len(load_predictions(tmp_path / "predictions.jsonl")) == 20
    assert cli.main([*here, "--max-requests=100"]) == 0
    assert len(load_predictions(tmp_path / "predictions.jsonl")) == 60 == service.paid.total()


def test_a_dry_run_says_what_it_would_cost_and_asks_nothing(
    dataset: Path, tmp_path: Path, serve: Callable[..., Service], capsys: pytest.CaptureFixture[str]
) -> None:
    service = serve(lambda text, nth, body: completion("true"))
    (tmp_path / "prices.toml").write_text('[models."fake-1"]\ninput = 1\noutput = 10\nimage_tokens = 1000\n')
    model = ["--model=openai:fake-1", f"--base-url={service.url}", f"--prices={tmp_path / 'prices.toml'}"]
    assert cli.main(command(dataset, tmp_path / "r", *model, "--limit=30", "--dry-run")) == 0
    said = capsys.readouterr().out
    assert "fake-1: 30 questions, 30 pictures; 30 requests, 0 answered already, 30 to send; at most 0.0" in said
    assert not service.bodies and not (tmp_path / "r/run.json").exists()


def test_replay_of_a_servers_answers_sends_nothing(
    dataset: Path, tmp_path: Path, serve: Callable[..., Service]
) -> None:
    service = serve(lambda text, nth, body: completion("true"))
    model = ["--model=openai:fake-1", "--limit=30", f"--cache={tmp_path / 'kept'}", f"--base-url={service.url}"]
    assert cli.main(command(dataset, tmp_path / "a", *model)) == 0
    assert cli.main(command(dataset, tmp_path / "b", *model, "--provider=replay")) == 0
    assert service.paid.total() == 30


CHILD = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    q = json.loads(line)
    with open(LOG, "a") as log: log.write(json.dumps([q["text"], q["images"]]) + "\\n")
    if q["id"] == "q7": os._exit(9)
    print(json.dumps({"id": q["id"], "text": "true"}), flush=True)
"""


def test_a_run_with_a_child_that_crashes(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD.replace("LOG", repr(str(tmp_path / "log"))))
    here = command(
        dataset, tmp_path / "r", f"--model=subprocess:{sys.executable} {tmp_path / 'child.py'}", "--limit=20"
    )
    assert cli.main(here) == 3
    found = load_predictions(tmp_path / "r/predictions.jsonl")
    assert [item.status for item in found].count("error") == 1 and len(found) == 20
    assert cli.main(here) == 0  # asks the one question again
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 21 and len(set(lines)) == 20


SERVER = """
import sys
from collections import Counter
from pathlib import Path
from tests.data_prep.llm_server import Service, completion, serving
import json, time
def plan(text, nth, body):
    time.sleep(0.01)
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    with open(sys.argv[1], "a") as log: log.write(json.dumps([text, url]) + "\\n")
    return completion("true")
with serving(Service(plan)) as service:
    print(service.url, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_kills_lose_no_row_and_ask_nothing_twice(dataset: Path, tmp_path: Path, repo: Path) -> None:
    """SIGKILL at three moments of a run behind a server: what was in flight may be asked again, what was had is not."""
    pytest.importorskip("openai")
    count, workers = 250, 4
    options = ("--model=openai:fake-1", f"--limit={count}", f"--llm-workers={workers}")
    environment = os.environ | {"OPENAI_API_KEY": "test", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "log")], cwd=repo, stdin=-1, stdout=-1, text=True
    )
    assert server.stdin and server.stdout
    url = server.stdout.readline().strip()
    here = [sys.executable, "-m", "pbs_jax.cli", *command(dataset, tmp_path / "r", *options, f"--base-url={url}")]
    path, log, seen = tmp_path / "r/predictions.jsonl", tmp_path / "log", 0
    for _ in range(3):
        process = subprocess.Popen(here, cwd=repo, env=environment, stdout=-3, stderr=-3)
        while process.poll() is None and (log.read_bytes().count(b"\n") if log.exists() else 0) < seen + 60:
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        seen = log.read_bytes().count(b"\n")
        assert path.read_bytes().count(b"\n") < count
    assert subprocess.run(here, cwd=repo, env=environment, capture_output=True).returncode == 0
    server.stdin.close()
    server.wait()
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == count
    asked_for = log.read_text().splitlines()
    assert len(asked_for) - len(set(asked_for)) <= 3 * workers  # only calls that a kill cut off


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["subprocess", "hf"])
def test_a_killed_run_goes_on_where_it_stopped(kind: str, dataset: Path, tmp_path: Path, repo: Path) -> None:
    if kind == "hf":
        pytest.importorskip("torchvision")
        from tests.bench.tiny_models import build

        build("qwen2_vl", tmp_path / "m")
        model = f"hf:{tmp_path / 'm'}"
    else:
        slow = CHILD.replace("LOG", repr(str(tmp_path / "log"))).replace(
            'q["id"] == "q7"', "__import__('time').sleep(0.01)"
        )
        (tmp_path / "child.py").write_text(slow)
        model = f"subprocess:{sys.executable} {tmp_path / 'child.py'}"
    count = 24 if kind == "hf" else 60
    more = (f"--model={model}", f"--limit={count}", "--batch-size=4", "--device=cpu", "--model-batch=4")
    here = [sys.executable, "-m", "pbs_jax.cli", *command(dataset, tmp_path / "r", *more)]
    path = tmp_path / "r/predictions.jsonl"
    process = subprocess.Popen(here, cwd=repo, stdout=-3, stderr=-3)
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 8):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    had = len(load_predictions(path))
    assert 8 <= had < count
    done = subprocess.run(here, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0 and f"{had} of {count} questions already answered" in done.stdout, done.stderr
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == count
    if kind == "subprocess":  # what was in flight may be asked again, what was had is not
        assert len((tmp_path / "log").read_text().splitlines()) <= count + 1


def asking(text: str, image: bytes) -> Request:
    return Request("same id", (), (image,), text, "open", (), text)


def test_cache_is_keyed_by_content_not_id(tmp_path: Path) -> None:
    model = Counting()
    cached = Cached(model, tmp_path)
    asked_for = [asking("Which?", b"one"), asking("Which?", b"two"), asking("Which?", b"one"), asking("What?", b"one")]
    assert [r.text for r in cached.generate(asked_for, "generate")] == ["A"] * 4
    assert len(model.asked) == 3
    again = Cached(Counting(), tmp_path)
    assert [r.detail["cached"] != "" for r in again.generate(asked_for, "generate")] == [True] * 4
    assert not again._adapter.asked  # type: ignore[attr-defined]
    again.generate(asked_for[:1], "letter_likelihood")
    other = Counting()
    other.card = {"text": "A", "revision": "2"}
    Cached(other, tmp_path).generate(asked_for[:1], "generate")
    assert len(again._adapter.asked) == len(other.asked) == 1  # type: ignore[attr-defined]


def test_cache_keeps_no_error_and_mends_a_torn_line(tmp_path: Path) -> None:
    failing = Counting("error")
    Cached(failing, tmp_path).generate([asking("Which?", b"one")], "generate")
    model = Counting()
    Cached(model, tmp_path).generate([asking("Which?", b"one"), asking("What?", b"one")], "generate")
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    third = Counting()
    Cached(third, tmp_path).generate([asking("Which?", b"one"), asking("What?", b"one")], "generate")
    assert (len(model.asked), len(third.asked)) == (2, 1) and path.read_bytes().count(b"\n") == 2
    path.write_text("{}\n")
    with pytest.raises(DataError, match=r"answers.jsonl:1 is no cached answer"):
        Cached(Counting(), tmp_path)


def test_other_pictures_under_the_same_ids_are_another_run(
    dataset: Path, tmp_path: Path, use_model: Callable[[object], None]
) -> None:
    use_model(Counting())
    run.run("x", dataset, tmp_path / "r", limit=5)
    card = json.loads((tmp_path / "r/run.json").read_text())
    assert card["pictures_id"]
    (tmp_path / "r/run.json").write_text(json.dumps(card | {"pictures_id": "other"}))
    with pytest.raises(DataError, match="was made with pictures_id 'other'"):
        run.run("x", dataset, tmp_path / "r", limit=5)


def test_released_questions_are_asked_with_the_pictures_of_a_dataset(
    dataset: Path, tmp_path: Path, use_model: Callable[[object], None]
) -> None:
    items = load_questions(dataset, "test").items[:3]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(qa_record(qa)) + "\n" for qa in items))
    model = Table(items)
    use_model(model)
    assert run.run("x", dataset, tmp_path / "r", questions_from=tmp_path / "q.jsonl") == 0
    assert {r.id for r in model.asked} == {qa.id for qa in items}
