"""The language-model client against a server with every fault: nothing lost, nothing paid twice, no budget passed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from data_prep import llm
from data_prep.llm import Client, Request, Retry
from data_prep.llm_openai import retry_after
from data_prep.schema import DataError
from tests.data_prep.llm_server import Action, Service, completion, failure, serving

pytest.importorskip("openai")
FAST = Retry(tries=4, base=0.01, cap=0.02)
PIXEL = b"\x89PNG fake"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def request(text: str, **fields: Any) -> Request:
    return Request("fake", text, params={"max_tokens": 50}, **fields)


def prices(folder: Path) -> Path:
    path = folder / "prices.toml"
    path.write_text('[models."fake"]\ninput = 100\noutput = 1000\nimage_tokens = 100\n')
    return path


def client(store: Path, service: Service, **options: Any) -> Client:
    return llm.open_client(
        store, provider="openai", base_url=service.url, **{"retry": FAST, "timeout": 0.5, "workers": 8, **options}
    )


def echo(text: str, nth: int, body: Mapping[str, Any]) -> Action:
    return completion(f"answer to {text}")


def test_every_fault_ends_answered_or_recorded(tmp_path: Path) -> None:
    """One request per fault among sound ones; a second run asks only what had failed in passing."""
    once = {
        "429 once": failure(429),
        "429 with wait": failure(429, retry_after="0.05"),
        "500 once": failure(500),
        "hangs once": 1.0,
        "drops once": 0.0,
        "half a body": b'{"id": "c", "choices": [{"mess',
        "no choice": b'{"choices": []}',
    }
    always = {
        "500 always": failure(500),
        "too long": failure(400, "context_length_exceeded"),
        "filtered": failure(400, "content_filter"),
        "empty": completion(None),
        "refused": completion(None, refusal="no"),
        "stopped by filter": completion("", "content_filter"),
        "cut": completion("half an ans", "length"),
    }

    def plan(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        return always.get(text) or (once.get(text) if nth == 1 and text in once else echo(text, nth, body))  # type: ignore[return-value]

    sound = [f"sound {k}" for k in range(20)]
    texts = [*sound, *once, *always, "sound 0"]
    with serving(Service(plan)) as service:
        with client(tmp_path, service) as asking:
            replies = dict(zip(texts, asking.ask([request(text) for text in texts]), strict=True))
        seen = service.seen.copy()
        with client(tmp_path, service) as asking:
            again = dict(zip(texts, asking.ask([request(text) for text in texts]), strict=True))
        asked_again = service.seen - seen
    for text in (*sound, *once):
        assert (replies[text].status, replies[text].text) == ("ok", f"answer to {text}"), text
    assert {text: replies[text].status for text in always} == {
        "500 always": "error",
        "too long": "rejected",
        "filtered": "refusal",
        "empty": "empty",
        "refused": "refusal",
        "stopped by filter": "refusal",
        "cut": "truncated",
    }
    assert max(service.paid.values()) == 1  # also the text asked twice in one run
    assert asked_again == {"500 always": FAST.tries}
    assert again == replies


def test_retry_after_is_honoured(tmp_path: Path) -> None:
    waits: list[float] = []
    sent = iter([failure(429, retry_after="7"), failure(429, retry_after_ms="1500"), failure(429), completion("yes")])
    with serving(Service(lambda *_: next(sent))) as service, client(tmp_path, service) as asking:
        asking._sleep = waits.append
        assert asking.ask([request("q")])[0].text == "yes"
    assert waits[:2] == [7.0, 1.5] and 0 < waits[2] < 0.05
    assert retry_after({"retry-after": "Wed, 21 Oct 2099 07:28:00 GMT"}) > 1e6  # type: ignore[operator]
    assert retry_after({"retry-after": "soon"}) is None


@pytest.mark.parametrize("fault", [failure(401), failure(403), failure(429, "insufficient_quota"), failure(404)])
def test_auth_and_credit_stop_the_run(tmp_path: Path, fault: Action) -> None:
    plan = lambda text, nth, body: echo(text, nth, body) if text == "0" else fault  # noqa: E731
    with serving(Service(plan)) as service, client(tmp_path, service, workers=1) as asking:
        with pytest.raises(DataError, match="stopped the run"):
            asking.ask([request(str(k)) for k in range(16)])
        assert sum(service.seen.values()) <= 3  # one may be on its way when the refusal arrives
        assert [reply.status for reply in asking.store.replies.values()] == ["ok"]


@pytest.mark.slow
def test_nothing_but_rejections_stops_the_run(tmp_path: Path) -> None:
    with serving(Service(lambda *_: failure(400, "unknown_parameter"))) as service:
        with client(tmp_path, service, workers=1) as asking, pytest.raises(DataError, match="all rejected"):
            asking.ask([request(str(k)) for k in range(16)])
        assert sum(service.seen.values()) < 15
        service.plan = echo
        with client(tmp_path, service, again=True) as asking:  # after the server was set right
            assert all(reply.status == "ok" for reply in asking.ask([request(str(k)) for k in range(16)]))


def test_the_budget_is_never_passed(tmp_path: Path) -> None:
    """One answer costs 0.02 USD (100 in, 10 out), its reservation about 0.055: nothing is sent that might not fit."""
    with serving(Service(echo)) as service:
        for limit in (0.3, 0.3, 0.4):
            with client(tmp_path, service, max_usd=limit, prices=prices(tmp_path)) as asking:
                replies = asking.ask([request(f"{k:03}") for k in range(40)])
                assert asking.store.spent <= limit
            answered = [reply.status for reply in replies].count("ok")
            assert answered == sum(service.paid.values()) and answered * 0.02 <= limit < answered * 0.02 + 0.08
            assert {reply.status for reply in replies} == {"ok", "unasked"}


def test_a_request_limit_counts_tries_of_all_runs(tmp_path: Path) -> None:
    with serving(Service(lambda text, nth, body: failure(500) if nth == 1 else echo(text, nth, body))) as service:
        for _ in range(2):
            with client(tmp_path, service, max_requests=7) as asking:
                asking.ask([request(str(k)) for k in range(20)])
        assert sum(service.seen.values()) == 7


def test_what_may_have_been_paid_counts_as_spent(tmp_path: Path) -> None:
    """A hang-up after the request arrived: the server may have charged it, so the next run has that much less."""
    with serving(Service(lambda *_: 0.0)) as service:
        with client(tmp_path, service, max_usd=0.12, prices=prices(tmp_path)) as asking:
            assert asking.ask([request("q")])[0].status == "unasked"  # the third try would not fit
        assert service.seen["q"] == 2


def test_an_unknown_price_is_refused_under_a_budget(tmp_path: Path) -> None:
    with serving(Service(echo)) as service:
        with (
            client(tmp_path / "a", service, max_usd=1.0) as asking,
            pytest.raises(DataError, match='"fake" has no price'),
        ):
            asking.ask([request("q")])
        with client(tmp_path / "a", service, max_usd=1.0, allow_unpriced=True) as asking:
            assert asking.ask([request("q")])[0].status == "ok"


def test_the_key_holds_all_that_shapes_the_answer() -> None:
    base = request("q", images=(PIXEL,), system="s")
    changed = [
        dataclasses.replace(base, **change)
        for change in (
            {"model": "other"}, {"user": "r"}, {"system": "t"}, {"images": (PIXEL + b"1",)}, {"images": ()},
            {"params": {"max_tokens": 51}}, {"turns": (("assistant", "a"),)}, {"schema": {"type": "object"}},
            {"prompt_version": "2"}, {"sample": 1},
        )
    ]  # fmt: skip
    assert len({base.key, *(other.key for other in changed)}) == len(changed) + 1
    assert {field.name for field in dataclasses.fields(Request)} == {
        "model", "user", "system", "images", "params", "turns", "schema", "prompt_version", "sample",
    }  # fmt: skip


def test_images_go_as_data_urls_and_the_key_as_idempotency_key(tmp_path: Path) -> None:
    with serving(Service(echo)) as service, client(tmp_path, service) as asking:
        asked = request("what?", images=(PIXEL,), schema={"title": "t", "type": "object"})
        asking.ask([asked])
        picture, text = service.bodies[0]["messages"][0]["content"]
        assert picture["image_url"]["url"].startswith("data:image/png;base64,") and text["text"] == "what?"
        assert service.bodies[0]["response_format"]["json_schema"]["strict"] is True
        assert {name.lower(): v for name, v in service.headers[0].items()}["idempotency-key"] == asked.key


def test_replay_answers_from_the_store_and_sends_nothing(tmp_path: Path) -> None:
    with serving(Service(echo)) as service, client(tmp_path, service) as asking:
        asking.ask([request("known")])
    with llm.open_client(tmp_path, provider="replay") as asking:
        assert [reply.status for reply in asking.ask([request("known"), request("new")])] == ["ok", "unasked"]
    with pytest.raises(DataError, match="does not exist"):
        llm.open_client(tmp_path / "none", provider="replay")


def test_a_store_is_one_services_and_one_processs(tmp_path: Path) -> None:
    with serving(Service(echo)) as service:
        with client(tmp_path, service), pytest.raises(DataError, match="in use"):
            client(tmp_path, service)
        elsewhere = service.url.replace("127.0.0.1", "localhost")
        with pytest.raises(DataError, match="holds answers of service"):
            llm.open_client(tmp_path, provider="openai", base_url=elsewhere)


def test_a_missing_key_or_provider_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(DataError, match="OPENAI_API_KEY holds no key"):
        llm.open_client(tmp_path, provider="openai")
    with pytest.raises(DataError, match="use openai or replay"):
        llm.open_client(tmp_path, provider="gemini")


def test_a_dry_run_says_the_cost_and_sends_nothing(tmp_path: Path) -> None:
    with serving(Service(echo)) as service, client(tmp_path, service, prices=prices(tmp_path)) as asking:
        asking.ask([request("a")])
        estimate = asking.estimate([request("a"), request("b"), request("b"), request("c", images=(PIXEL,))])
        assert (estimate.requests, estimate.answered) == (3, 1) and sum(service.seen.values()) == 1
        # Two requests of 50 output tokens at 1000 USD a million, one picture of 100 tokens at 100.
        assert estimate.worst_usd == pytest.approx(2 * 0.05 + 0.01 + 2 * (1 + 32) * 1e-4, abs=1e-6)
        assert "2 to send; at most 0.11" in str(estimate)


CHILD = """
import sys
from pathlib import Path
from tests.data_prep.test_llm import FAST, request
from data_prep import llm
with llm.open_client(Path(sys.argv[1]), provider="openai", base_url=sys.argv[2], workers=3, retry=FAST,
                     max_usd=10.0, prices=Path(sys.argv[3])) as asking:
    asking.ask([request(f"{k:03}") for k in range(60)])
"""


@pytest.mark.slow  # three processes that import the SDK
def test_kill_and_resume_give_the_same_store(tmp_path: Path, repo: Path) -> None:
    """SIGKILL in the middle: the next run completes the same answers, and none that was stored is paid again."""

    def slow(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        time.sleep(0.01)
        return echo(text, nth, body)

    def run(store: Path, service: Service) -> subprocess.Popen[bytes]:
        args = [sys.executable, "-c", CHILD, str(store), service.url, str(prices(tmp_path))]
        return subprocess.Popen(args, cwd=repo, env=dict(os.environ), stderr=subprocess.DEVNULL)

    with serving(Service(slow)) as service:
        first = run(tmp_path / "killed", service)
        while sum(service.paid.values()) < 25 and first.poll() is None:
            time.sleep(0.005)
        first.send_signal(signal.SIGKILL)
        first.wait()
        journal = tmp_path / "killed" / "calls.jsonl"
        lines = journal.read_text().splitlines()
        stored = {json.loads(line)["key"] for line in lines if '"answer"' in line and line.endswith("}")}
        assert 5 < len(stored) < 60
        with journal.open("a") as file:
            file.write('{"event": "answer", "key": "to')  # as a crash in mid-write leaves it
        before = service.paid.copy()
        assert run(tmp_path / "killed", service).wait() == 0
        paid_again = service.paid - before
        assert not {text for text in paid_again if request(text).key in stored}
        assert max(service.paid.values()) <= 2 and sum(service.paid.values()) <= 60 + 3  # at most the three in flight
        with client(tmp_path / "whole", service) as asking:
            whole = asking.ask([request(f"{k:03}") for k in range(60)])
    with llm.open_client(tmp_path / "killed", provider="replay") as asking:
        resumed = asking.ask([request(f"{k:03}") for k in range(60)])
        assert asking.store.spent >= 60 * 0.02
    assert [(r.key, r.status, r.text) for r in resumed] == [(r.key, r.status, r.text) for r in whole]


def test_a_broken_journal_is_named(tmp_path: Path) -> None:
    (tmp_path / "calls.jsonl").write_text('{"event": "store", "service": "x"}\nnonsense\n')
    with pytest.raises(DataError, match=r"calls.jsonl:2 is no journal line"):
        llm.open_client(tmp_path, provider="replay")


def test_workers_share_one_budget_without_waiting_for_ever(tmp_path: Path) -> None:
    """Reservations that fill the budget make others wait, not fail, until answers settle below them."""
    release = threading.Event()

    def plan(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        release.wait(0.1)
        return echo(text, nth, body)

    with serving(Service(plan)) as service:
        with client(tmp_path, service, max_usd=0.16, prices=prices(tmp_path), workers=4) as asking:
            replies = asking.ask([request(f"{k:03}") for k in range(4)])
        assert [reply.status for reply in replies] == ["ok"] * 4
