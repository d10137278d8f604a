"""Batch mode: the same requests as files of lines, cheaper and hours later, reconciled by custom id.

Every step is in the journal before the next: intent (with its keys), the service's batch id, done. A run that dies
between creating a batch and writing its id finds it again by the token in its metadata, so nothing is ordered twice.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from data_prep.llm import RETRY, Client
from data_prep.llm_request import Passing, Rejected, Request, Retry, Stop
from data_prep.llm_store import Reply, Store
from data_prep.schema import DataError

MAX_LINES, MAX_BYTES = 50_000, 190_000_000  # the service takes 50,000 lines and 200 MB
ROUNDS = 3  # a request that a finished batch does not answer goes into the next, so often
ENDED = ("completed", "failed", "expired", "cancelled")


class Batches(Protocol):
    """The service's batch calls (see llm_openai.OpenAIBatches)."""

    def submit(self, lines: bytes, token: str) -> str: ...
    def find(self, token: str) -> str | None: ...
    def state(self, batch_id: str) -> tuple[str, list[str], str]: ...
    def read(self, file_id: str) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    token: str
    keys: tuple[str, ...]
    batch_id: str


class BatchClient(Client):
    """A Client that asks through batches; `ask` returns when all have ended, and goes on where a run left off."""

    def __init__(
        self,
        store: Store,
        batches: Batches,
        *,
        poll: float = 60.0,
        retry: Retry = RETRY,
        sleep: Callable[[float], Any] = time.sleep,
        **options: Any,
    ):
        super().__init__(store, _never, retry=retry, sleep=sleep, **options)
        self._batches, self._poll = batches, poll

    def _ask_all(self, waiting: Mapping[str, Request], desc: str) -> dict[str, Reply]:
        try:
            self._fetch(waiting)
            for _ in range(ROUNDS):
                left = {key: request for key, request in waiting.items() if self._open(key)}
                ordered = [self._order(chunk) for chunk in _chunks(left)]
                if not any(ordered):
                    break
                self._fetch(waiting)
        except Stop as error:
            raise DataError(f"the service stopped the run: {error}; what was answered is kept") from error
        left = {key: request for key, request in waiting.items() if self._open(key)}
        return {key: Reply(key, "unasked", detail="no batch answered it, or the budget is spent") for key in left}

    def _order(self, chunk: Mapping[str, Request]) -> bool:
        """Orders what the budget has room for; False when that is nothing."""
        token = uuid.uuid4().hex
        self.store.record_batch(token=token, step="planned")
        worst = {key: self.worst_usd(request) for key, request in chunk.items()}
        keys = self.store.reserve_many(worst, token)
        if keys:
            self.store.record_batch(token=token, step="intent", keys=keys)
            batch_id = self._submit(b"".join(_line(key, chunk[key]) for key in keys), token)
            self.store.record_batch(token=token, step="created", batch_id=batch_id)
            print(f"batch {batch_id}: {len(keys)} requests ordered", file=sys.stderr)
        else:
            self.store.record_batch(token=token, step="done")
        return bool(keys)

    def _submit(self, lines: bytes, token: str) -> str:
        """The batch's id. A try that failed may have reached the service all the same: it is looked for first."""
        tried = False

        def submit() -> str:
            nonlocal tried
            found = self._batches.find(token) if tried else None
            tried = True
            return found or self._batches.submit(lines, token)

        return self._try(submit)

    def _fetch(self, requests: Mapping[str, Request]) -> None:
        """Waits for every open batch of the journal and records what it holds."""
        for order in self._open_orders():
            while True:
                status, files, wrong = self._try(self._batches.state, order.batch_id)
                if status in ENDED:
                    break
                print(f"batch {order.batch_id}: {status}", file=sys.stderr)
                self._sleep(self._poll)
            self._reconcile(order, status, files, wrong, requests)

    def _open_orders(self) -> list[_Order]:
        steps: dict[str, dict[str, Any]] = {}
        for event in self.store.events:
            steps.setdefault(event["token"], {})[event["step"]] = event
        orders = []
        for token, at in steps.items():
            if "done" in at:
                continue
            batch_id = at["created"]["batch_id"] if "created" in at else None
            if batch_id is None and "intent" in at:
                batch_id = self._try(self._batches.find, token)
            if batch_id is None:  # it never reached the service
                self.store.release_many(token, paid=False)
                self.store.record_batch(token=token, step="done")
                continue
            if "created" not in at:
                self.store.record_batch(token=token, step="created", batch_id=batch_id)
            orders.append(_Order(token, tuple(at["intent"]["keys"]), batch_id))
        return orders

    def _reconcile(
        self, order: _Order, status: str, files: Sequence[str], wrong: str, requests: Mapping[str, Request]
    ) -> None:
        """Records each line once by its custom id; what is missing or failed in passing stays open."""
        ordered, answered, strange, faults = set(order.keys), 0, 0, []
        lines = [line for file in files for line in self._try(self._batches.read, file).splitlines()]
        for line in filter(str.strip, lines):
            try:
                entry = json.loads(line)
                key = entry["custom_id"]
            except (ValueError, KeyError, TypeError):
                strange += 1
                continue
            if key not in ordered or not self._open(key):  # not ours, or a second line of one id
                strange += 1
                continue
            hold = f"{order.token}/{key}"
            try:
                reply = self._entry(key, entry, requests.get(key), self.store.held(hold))
            except Passing as error:
                faults.append(str(error))
                self.store.release(hold, self.store.held(hold) * error.paid)
                continue
            self.store.record(reply, hold)
            answered += reply.status in ("ok", "refusal", "truncated", "empty")
        # Of a finished batch a missing line may still have been charged; other ends bill only what they answered.
        self.store.release_many(order.token, paid=status == "completed")
        self.store.record_batch(token=order.token, step="done", status=status, answered=answered, strange=strange)
        print(
            f"batch {order.batch_id}: {status}, {answered} of {len(ordered)} answered"
            + (f", {strange} lines that are no new answer" if strange else ""),
            file=sys.stderr,
        )
        if not answered:
            rejected = [known.detail for key in order.keys if (known := self.store.replies.get(key))]
            reason = next(filter(None, [wrong, *faults, *rejected]), "no reason given")
            raise Stop(f"batch {order.batch_id} ended {status} without one answer ({reason})")

    def _entry(self, key: str, entry: Mapping[str, Any], request: Request | None, held: float) -> Reply:
        """One line as a Reply; of a request that this run does not know the price is what was `held` for it.

        Raises Passing for what may go better the next time.
        """
        response = entry.get("response") or {}
        code, body = response.get("status_code"), response.get("body")
        if code == 200 and isinstance(body, Mapping):
            if request is not None:
                return self.read(key, request, body)
            return dataclasses.replace(self.read(key, Request(str(body.get("model")), ""), body), usd=held)
        problem = entry.get("error") or (body or {}).get("error") or {}
        detail = f"{code} {problem.get('code') or ''} {problem.get('message') or ''}".strip()
        if isinstance(code, int) and 400 <= code < 500 and code not in (408, 409, 429):
            return Reply(key, "rejected", detail=detail, tries=1)
        raise Passing(detail)

    def _try[T, **P](self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """A call with the client's waits between tries. Raises Stop when it goes on failing."""
        for done in range(1, self._retry.tries + 1):
            try:
                return call(*args, **options)
            except Rejected as error:
                raise Stop(str(error)) from error
            except Passing as error:
                if done == self._retry.tries:
                    raise Stop(f"{error}, {done} times") from error
                self._sleep(self._retry.wait(done, error.retry_after))
        raise AssertionError("unreachable")


def _never(request: Request) -> Mapping[str, Any]:
    raise AssertionError("a batch client sends no single request")


def _line(key: str, request: Request) -> bytes:
    body = {"custom_id": key, "method": "POST", "url": "/v1/chat/completions", "body": request.body()}
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def _chunks(requests: Mapping[str, Request]) -> Iterator[dict[str, Request]]:
    chunk: dict[str, Request] = {}
    size = 0
    for key, request in requests.items():
        length = len(_line(key, request))
        if chunk and (len(chunk) == MAX_LINES or size + length > MAX_BYTES):
            yield chunk
            chunk, size = {}, 0
        chunk[key] = request
        size += length
    if chunk:
        yield chunk
