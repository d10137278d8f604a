"""Batch mode: whatever order, doubles and holes the output files have, every request ends answered or recorded once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from data_prep import llm
from data_prep.llm_batch import BatchClient
from data_prep.schema import DataError
from tests.data_prep.llm_server import Service, asked, completion, serving
from tests.data_prep.test_llm import FAST, echo, prices, request

pytest.importorskip("openai")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")


def client(store: Path, service: Service, **options: Any) -> BatchClient:
    found = llm.open_client(store, provider="openai", base_url=service.url, batch=True, retry=FAST, **options)
    assert isinstance(found, BatchClient)
    found._sleep = lambda seconds: None
    return found


def line(entry: dict[str, Any], status: int = 200, body: Any = None) -> dict[str, Any]:
    answer = body if body is not None else completion(f"answer to {asked(entry['body'])}")
    return {"custom_id": entry["custom_id"], "response": {"status_code": status, "body": answer}, "error": None}


def error(entry: dict[str, Any], status: int) -> dict[str, Any]:
    return line(entry, status, {"error": {"code": "x", "message": f"fake {status}"}})


def test_lines_are_reconciled_by_id(tmp_path: Path) -> None:
    """First batch: shuffled, doubled, missing, strange, torn and failed lines; the second takes what was left."""

    def finish(lines: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
        if len(lines) < 30:
            return [line(entry) for entry in lines], []
        output: list[Any] = [line(entry) for entry in lines[:20]] + [line(entry) for entry in lines[:5]]
        output += [line({**lines[0], "custom_id": "of another job"}), '{"custom_id": "torn\n']
        random.Random(0).shuffle(output)
        return output, [error(entry, 500) for entry in lines[20:23]] + [error(lines[23], 400)]  # 24..29 are missing

    with serving(Service(echo)) as service:
        service.finish = finish
        with client(tmp_path, service, max_usd=10.0, prices=prices(tmp_path)) as asking:
            texts = [f"{k:02}" for k in range(30)]
            replies = asking.ask([request(text) for text in texts])
            assert [len(service.files[b["input_file_id"]].splitlines()) for b in service.batches] == [30, 9]
            asking.ask([request(text) for text in texts])
            assert len(service.batches) == 2
            # 29 answers at 0.02; the six missing lines may have been charged, so their reservations stay spent.
            assert asking.store.spent == pytest.approx(29 * 0.02 + 6 * asking.worst_usd(request("00")))
    assert [reply.text for k, reply in enumerate(replies) if k != 23] == [
        f"answer to {text}" for k, text in enumerate(texts) if k != 23
    ]
    assert replies[23].status == "rejected"


def test_a_completed_batch_without_success_is_a_failure(tmp_path: Path) -> None:
    with serving(Service(echo)) as service:
        service.finish = lambda lines: ([], [error(entry, 400) for entry in lines])
        with client(tmp_path, service) as asking, pytest.raises(DataError, match="ended completed without one answer"):
            asking.ask([request("a"), request("b")])


@pytest.mark.parametrize("lost", ["before the order", "after the order"])
def test_a_run_that_died_while_ordering_orders_once(tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Service(echo)) as service:
        service.finish = lambda lines: ([line(entry) for entry in lines], [])
        with client(tmp_path, service) as asking:
            submit = asking._batches.submit

            def die(lines: bytes, token: str) -> str:
                if lost == "after the order":
                    submit(lines, token)
                raise KeyboardInterrupt

            monkeypatch.setattr(asking._batches, "submit", die)
            with pytest.raises(KeyboardInterrupt):
                asking.ask([request("a"), request("b")])
        with client(tmp_path, service) as asking:
            assert [reply.status for reply in asking.ask([request("a"), request("b")])] == ["ok", "ok"]
    assert len(service.batches) == 1


@pytest.mark.slow
def test_the_budget_bounds_an_order(tmp_path: Path) -> None:
    with serving(Service(echo)) as service:
        service.finish = lambda lines: ([line(entry) for entry in lines], [])
        with client(tmp_path, service, max_usd=0.2, prices=prices(tmp_path)) as asking:
            replies = asking.ask([request(f"{k}") for k in range(20)])
            assert asking.store.spent <= 0.2
    ordered = sum(len(service.files[b["input_file_id"]].splitlines()) for b in service.batches)
    assert ordered == [reply.status for reply in replies].count("ok") < 20
