"""Models in programs of their own: the pipe's protocol, and children that crash, hang, babble or mix answers up."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.schema import DataError
from pbs_jax.bench.adapters import Options, Request, load_adapter
from pbs_jax.bench.adapters_subprocess import ChildModel

# What the child does is told by the question; it counts its starts in a file.
RAW = """
import base64, json, os, sys, time
log = open(LOG, "a"); log.write("start\\n"); log.close()
print("loading, 1 warning")
print(json.dumps({"ready": True, "name": "raw", "revision": "r1", "remarks": ["a remark"]}), flush=True)
for line in sys.stdin:
    q = json.loads(line)
    say = lambda m: print(json.dumps(m), flush=True)
    word = q["text"].split()[0]
    if word == "crash": print("out of memory"); sys.stdout.flush(); os._exit(3)
    if word == "hang": time.sleep(60)
    if word == "babble": print("step 1/2"); print("{half"); say({"loss": 1}); say([1])
    if word == "noid": say({"text": "lost"}); time.sleep(60)
    if word == "other": say({"id": "q999", "text": "x"})
    if word == "notext": say({"id": q["id"]}); continue
    if word == "status": say({"id": q["id"], "text": "I can't", "status": "refusal"}); continue
    if word == "env": say({"id": q["id"], "text": json.dumps([sorted(os.environ), os.getcwd(), os.listdir(".")])}); continue
    if word == "echo": say({"id": q["id"], "text": json.dumps(q)}); continue
    say({"id": q["id"], "text": "B"})
"""
SERVED = """
import sys
sys.path.insert(0, FOLDER)
from child import serve
def answer(images, text, question):
    print("a library prints to stdout")
    if text == "fail":
        raise RuntimeError("no CUDA")
    return {"text": f"{len(images)} {question['mode']}", "detail": {"tokens": 3}} if images else "blind"
serve(answer, name="served", revision="r2")
"""


def ask(text: str, images: tuple[bytes, ...] = ()) -> Request:
    return Request("secret-id", (), images, text, "open", (), text)


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[ChildModel]:
    (tmp_path / "raw.py").write_text(RAW.replace("LOG", repr(str(tmp_path / "log"))))
    model = load_adapter(f"subprocess:{sys.executable} {tmp_path / 'raw.py'}", Options(timeout=0.5, start_timeout=20))
    assert isinstance(model, ChildModel)
    yield model
    model.close()


def starts(tmp_path: Path) -> int:
    return (tmp_path / "log").read_text().count("start")


def test_prints_between_answers_are_no_answers(raw: ChildModel, tmp_path: Path) -> None:
    assert [r.text for r in raw.generate([ask("babble"), ask("plain")], "generate")] == ["B", "B"]
    assert (raw.name, raw.card["child"], raw.card["remarks"]) == ("raw", {"revision": "r1"}, ["a remark"])
    assert starts(tmp_path) == 1 and str(tmp_path) not in json.dumps(raw.card)


def test_a_crash_or_silence_costs_one_question_and_a_restart(raw: ChildModel, tmp_path: Path) -> None:
    asked = [ask("plain"), ask("crash"), ask("plain"), ask("hang"), ask("noid"), ask("plain")]
    found = raw.generate(asked, "generate")
    assert [r.status for r in found] == ["ok", "error", "ok", "error", "error", "ok"]
    assert found[1].detail["error"] == 'it ended with code 3; it last printed "loading, 1 warning | out of memory"'
    assert found[3].detail["error"].startswith("no answer within 0.5 s")
    assert '{"text": "lost"}' in found[4].detail["error"]
    assert starts(tmp_path) == 4


def test_a_child_that_never_answers_is_given_up(raw: ChildModel) -> None:
    with pytest.raises(DataError, match="started 3 times and gave no answer"):
        raw.generate([ask("crash")] * 5, "generate")


def test_bad_answers(raw: ChildModel) -> None:
    refused, empty = raw.generate([ask("status"), ask("notext")], "generate")
    assert (refused.status, refused.text) == ("refusal", "I can't")
    assert empty.status == "error" and "no text" in empty.detail["error"]
    with pytest.raises(DataError, match="answered 'q999' when 'q3' was asked"):
        raw.generate([ask("other")], "generate")


def test_the_child_gets_no_id_no_key_no_folder(raw: ChildModel, monkeypatch: pytest.MonkeyPatch) -> None:
    question = json.loads(raw.generate([ask("echo", (b"\xff\x00",))], "generate")[0].text)
    assert question["images"] == ["/wA="] and "secret-id" not in json.dumps(question)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    raw.close()
    raw._child = None
    os.makedirs(raw._home.name, exist_ok=True)
    names, folder, files = json.loads(raw.generate([ask("env")], "generate")[0].text)
    assert "OPENAI_API_KEY" not in names and "PYTHONPATH" not in names and "PATH" in names
    assert files == [] and folder != os.getcwd()


def test_the_ready_made_side_serves_a_function(tmp_path: Path, repo: Path) -> None:
    (tmp_path / "served.py").write_text(SERVED.replace("FOLDER", repr(str(repo / "pbs_jax/bench"))))
    model = load_adapter(f"subprocess:{sys.executable} {tmp_path / 'served.py'}", Options(timeout=20, start_timeout=20))
    found = model.generate([ask("x", (b"1", b"2")), ask("fail"), ask("y")], "letter_likelihood")
    assert [r.text for r in found] == ["2 letter_likelihood", "", "blind"]
    assert found[0].detail == {"tokens": 3} and found[1].detail == {"error": "RuntimeError('no CUDA')"}
    assert model.card["child"]["revision"] == "r2"
    model.close()  # type: ignore[attr-defined]


def test_what_can_not_be_started_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="can't be started"):
        load_adapter(f"subprocess:{tmp_path}/nothing")
    with pytest.raises(DataError, match="never became ready: it ended with code 0"):
        load_adapter(f"subprocess:{sys.executable} -c pass")
