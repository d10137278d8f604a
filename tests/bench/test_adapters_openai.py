"""Models behind a server: what is sent, and a server with every fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from data_prep.llm import Retry
from data_prep.schema import DataError
from pbs_jax.bench.adapters import ANSWER_TOKENS, Options, Request
from pbs_jax.bench.adapters_openai import OpenAiModel, _same_model
from tests.data_prep.llm_server import Action, Service, asked, completion, failure, serving

pytest.importorskip("openai")
JPEG = b"\xff\xd8\xff fake"
FAST = Retry(tries=3, base=0.01, cap=0.02)


def plan(text: str, nth: int, body: Mapping[str, Any]) -> Action:
    """Answers by the question's first word."""
    word, limit = text.split()[0], body["max_tokens"]
    faults: dict[str, Callable[[], Action]] = {
        "429": lambda: failure(429) if nth == 1 else completion("ok"),
        "429-wait": lambda: failure(429, retry_after="0.05") if nth == 1 else completion("ok"),
        "500": lambda: failure(500) if nth == 1 else completion("ok"),
        "always-500": lambda: failure(500),
        "slow": lambda: 1.0 if nth == 1 else completion("ok"),
        "empty": lambda: completion(None),
        "thinks": lambda: completion(None, "length", reasoning_content="hm") if limit < 100 else completion("B"),
        "thinks-on": lambda: completion("", "length", reasoning_content="hm"),
        "cut": lambda: completion("half an ans", "length"),
        "refused": lambda: completion(None, refusal="I can't help with that"),
        "too-long": lambda: failure(400, "context_length_exceeded"),
        "renamed": lambda: completion("ok") | {"model": "fake-2"},
    }
    return faults.get(word, lambda: completion("B"))()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving(Service(plan)) as running:
        yield running


def model(service: Service, store: Path, params: Mapping[str, Any] | None = None, **more: Any) -> OpenAiModel:
    connection = {"base_url": service.url, "retry": FAST, "timeout": 0.5, "workers": 8} | more
    return OpenAiModel("fake-1", Options(store=store, service=connection, params=params or {}))


def ask(text: str, kind: str = "multiple_choice", images: tuple[bytes, ...] = (JPEG,)) -> Request:
    return Request("secret-id", (1, 0), images, text, kind, ("Round", "Bilobed"), text)


def test_what_is_sent(service: Service, tmp_path: Path) -> None:
    asking = model(service, tmp_path, {"seed": 7, "temperature": None})
    assert asking.generate([ask("Which?", images=(JPEG, JPEG))], "generate")[0].text == "B"
    (body,) = service.bodies
    (message,) = body["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert message["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert body["seed"] == 7 and "temperature" not in body
    assert body["max_tokens"] == ANSWER_TOKENS["multiple_choice"]
    assert "secret-id" not in json.dumps(service.bodies) + json.dumps(service.headers)
    assert asking.card["params"] == {"seed": 7}


def test_greedy_unless_told_otherwise_and_the_limits_other_name(service: Service, tmp_path: Path) -> None:
    service.plan = lambda text, nth, body: completion("B")
    model(service, tmp_path, {"max_completion_tokens": None}).generate([ask("a", "open")], "generate")
    (body,) = service.bodies
    assert body["temperature"] == 0 and "max_tokens" not in body
    assert body["max_completion_tokens"] == ANSWER_TOKENS["open"]


def test_every_fault_is_answered_or_an_error_with_its_reason(service: Service, tmp_path: Path) -> None:
    words = (
        "429",
        "429-wait",
        "500",
        "slow",
        "plain",
        "thinks",
        "cut",
        "refused",
        "empty",
        "thinks-on",
        "always-500",
        "too-long",
    )
    asking = model(service, tmp_path)
    found = dict(zip(words, asking.generate([ask(word) for word in words], "generate"), strict=True))
    assert {w: found[w].text for w in words[:6]} == dict.fromkeys(words[:4], "ok") | {"plain": "B", "thinks": "B"}
    assert {w: found[w].status for w in words[:6]} == dict.fromkeys(words[:6], "ok")
    assert (found["cut"].status, found["cut"].text) == ("truncated", "half an ans")
    assert found["refused"].status == "refusal"
    reasons = {w: str(found[w].detail["error"]) for w in words[8:]}
    assert {found[w].status for w in words[8:]} == {"error"} and {found[w].text for w in words[8:]} == {""}
    assert "an empty answer, twice" in reasons["empty"] and "reasoning used 8 times" in reasons["thinks-on"]
    assert "500" in reasons["always-500"] and "400" in reasons["too-long"]
    assert found["429"].detail["tries"] == 2 and found["plain"].detail["usage"] == {"input": 100, "output": 10}


def test_another_model_than_the_one_asked_stops_the_run(service: Service, tmp_path: Path) -> None:
    with pytest.raises(DataError, match='asked for "fake-1", the server answered with "fake-2"'):
        model(service, tmp_path).generate([ask("renamed")], "generate")


@pytest.mark.parametrize(
    ("asked_for", "answered", "same"),
    [
        ("gpt-4o", "gpt-4o-2024-11-20", True),
        ("gemini-2.5-pro", "models/gemini-2.5-pro", True),
        ("Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2-VL-7B-Instruct", True),
        ("gpt-4o", "gpt-4o-mini", False),
        ("gpt-4o", "gpt-4o-mini-2024-07-18", False),
        ("gpt-4o-2024-08-06", "gpt-4o-2024-11-20", False),
        ("gemini-2.5-pro", "gemini-3.8-flash", False),
        ("gpt-4", "gpt-4o", False),
    ],
)
def test_which_names_are_the_same_model(asked_for: str, answered: str, same: bool) -> None:
    assert _same_model(asked_for, answered) is same


def test_letters_by_likelihood(service: Service, tmp_path: Path) -> None:
    def top(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        assert (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)
        shares = {"A": 0.3, "B": 0.25, " B": 0.2, "The": 0.25} if text == "letters" else {"The": 0.9}
        content = [{"token": t, "logprob": math.log(p), "top_logprobs": []} for t, p in shares.items()]
        answer = completion("A")
        answer["choices"][0]["logprobs"] = (
            {"content": [content[0] | {"top_logprobs": content}]} if text != "none" else None
        )
        return answer

    service.plan = top
    asking = model(service, tmp_path)
    chosen, missing = asking.generate([ask("letters"), ask("words")], "letter_likelihood")
    assert chosen.text == "B" and missing.status == "error" and "none of" in missing.detail["error"]
    with pytest.raises(DataError, match="gives no logprobs: use --mode generate"):
        asking.generate([ask("none")], "letter_likelihood")


def test_answers_are_kept_by_the_pictures_content(service: Service, tmp_path: Path) -> None:
    with_one, with_other = ask("same"), ask("same", images=(JPEG + b"2",))
    first = model(service, tmp_path)
    first.generate([with_one, with_other, with_one], "generate")
    first.close()
    assert service.paid["same"] == 2
    second = model(service, tmp_path)
    assert second.generate([with_one], "generate")[0].text == "B" and service.paid["same"] == 2
    assert {asked(body) for body in service.bodies} == {"same"}


def test_a_spent_budget_leaves_questions_unasked(service: Service, tmp_path: Path) -> None:
    found = model(service, tmp_path, max_requests=2, workers=1).generate([ask(f"n{k}") for k in range(4)], "generate")
    assert [r.status for r in found] == ["ok", "ok", "error", "error"]
    assert "budget" in found[2].detail["unasked"]
