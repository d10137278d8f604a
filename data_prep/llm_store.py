"""The paid-for answers of language models: one append-only journal, fsynced before anything goes on, and its budget.

Every attempt is written down *before* it is sent and its reservation counts as spent until an answer or a release
follows, so a run that is killed can neither lose an answer that was written nor pass its budget in the next run.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.files import sync_directory
from data_prep.schema import DataError

JOURNAL = "calls.jsonl"
# What ends a request for good; "error" (retries spent) is asked again by the next run, "unasked" is never stored.
FINAL = ("ok", "refusal", "truncated", "empty", "rejected")
STATUSES = (*FINAL, "error", "unasked")


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request.

    status     meaning
    ok         text is the answer
    refusal    the model or its filter declined; detail says how
    truncated  cut at the token limit; text is the part that came
    empty      a paid answer without text
    rejected   the server will not take this request (4xx); detail says why
    error      all tries were spent on failures that pass; asked again by the next run
    unasked    not sent: budget, a stop, or a replay that lacks it

    `usage` holds "input" and "output" tokens where the server said; `usd` what the answer cost (0 when unpriced).
    """

    key: str
    status: str
    text: str = ""
    detail: str = ""
    model: str = ""
    usage: Mapping[str, int] = dataclasses.field(default_factory=dict)
    usd: float = 0.0
    tries: int = 0
    logprobs: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What all runs over one store may send together. None: no bound."""

    max_usd: float | None = None
    max_requests: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_usd", "max_requests"):
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise DataError(f"--{name.replace('_', '-')} is {value}: give 0 or more")


class Store:
    """`calls.jsonl` in a folder: a header, then reserve, answer and release lines. One process at a time.

    `replies` maps keys to their last recorded reply. Thread-safe. A line torn by a crash is cut off when opening.
    """

    def __init__(self, folder: Path, *, service: str | None, limits: Limits = Limits(), write: bool = True):
        """`service`: whom the answers come from; None reads whatever is there. Raises DataError for another service's
        store, one in use, or (not `write`) one that is missing."""
        self.path = Path(folder) / JOURNAL
        self.replies: dict[str, Reply] = {}
        self.spent, self.sent = 0.0, 0
        self.events: list[dict[str, Any]] = []  # batch events, kept in order for llm_batch
        self._held: dict[str, float] = {}
        self._limits = limits
        self._turn = threading.Condition()
        self._file: Any = None
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self._file.close()
                raise DataError(f"{self.path} is in use by another run: wait for it or name another store") from error
        elif not self.path.is_file():
            raise DataError(f"{self.path} does not exist: replay needs the store of an earlier run")
        try:
            self._load(service, write)
        except DataError:
            self.close()
            raise

    def _load(self, service: str | None, write: bool) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if write and len(whole) < len(content):
            self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{self.path}:{number} is no journal line ({error}): restore the file") from error
            if kind == "store" and service is not None and event["service"] != service:
                raise DataError(
                    f'{self.path} holds answers of service "{event["service"]}", not "{service}": name another store'
                )
            self._replay(kind, event)
        if write and not whole:
            self._append({"event": "store", "service": service})
            sync_directory(self.path.parent)
        # Reservations of a killed run: nobody knows whether the server answered, so they count as spent. Those of a
        # batch that has not ended stay reserved.
        ended = {event["token"] for event in self.events if event["step"] == "done"}
        waiting = {event["token"] for event in self.events} - ended
        for hold in [hold for hold in self._held if hold.partition("/")[0] not in waiting]:
            self.spent += self._held.pop(hold)

    def _replay(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "reserve":
            self._held[event["hold"]] = event["usd"]
            self.sent += 1
        elif kind == "release":
            self.spent += event["usd"]
            self._held.pop(event["hold"], None)
        elif kind == "answer":
            self._held.pop(event.pop("hold"), None)
            del event["event"]
            reply = Reply(**{name: value for name, value in event.items() if name in Reply.__dataclass_fields__})
            self.spent += reply.usd
            self.replies[reply.key] = reply
        elif kind == "batch":
            self.events.append(event)

    def reserve(self, key: str, usd: float, hold: str) -> bool:
        """Books one attempt of at most `usd`. False when the limits have no room; waits while others' holds fill it."""
        with self._turn:
            while True:
                if self._limits.max_requests is not None and self.sent >= self._limits.max_requests:
                    return False
                total = self.spent + sum(self._held.values()) + usd
                if self._limits.max_usd is None or total <= self._limits.max_usd:
                    break
                if not self._held:
                    return False
                self._turn.wait()
            self._held[hold] = usd
            self.sent += 1
            self._append({"event": "reserve", "hold": hold, "key": key, "usd": usd})
            return True

    def reserve_many(self, usd: Mapping[str, float], token: str) -> list[str]:
        """Books the first of the keys that the limits have room for, as holds `token/key`, and returns them."""
        with self._turn:
            total = self.spent + sum(self._held.values())
            keys: list[str] = []
            for key, cost in usd.items():
                total += cost
                if self._limits.max_usd is not None and total > self._limits.max_usd:
                    break
                if self._limits.max_requests is not None and self.sent + len(keys) >= self._limits.max_requests:
                    break
                keys.append(key)
            holds = [{"event": "reserve", "hold": f"{token}/{key}", "key": key, "usd": usd[key]} for key in keys]
            self._append(*holds)
            self._held |= {f"{token}/{key}": usd[key] for key in keys}
            self.sent += len(keys)
            return keys

    def release_many(self, token: str, *, paid: bool) -> None:
        """Ends what is left of a batch's holds; `paid`: they may have been charged."""
        with self._turn:
            left = {hold: usd for hold, usd in self._held.items() if hold.startswith(f"{token}/")}
            self._append(*({"event": "release", "hold": hold, "usd": usd * paid} for hold, usd in left.items()))
            for hold, usd in left.items():
                del self._held[hold]
                self.spent += usd * paid

    def held(self, hold: str) -> float:
        """USD reserved under a hold, 0 when it has ended."""
        return self._held.get(hold, 0.0)

    def release(self, hold: str, usd: float) -> None:
        """Ends an attempt without an answer; `usd`: what it may have cost."""
        with self._turn:
            self._held.pop(hold, None)
            self.spent += usd
            self._append({"event": "release", "hold": hold, "usd": usd})
            self._turn.notify_all()

    def record(self, reply: Reply, hold: str = "", **facts: Any) -> None:
        """Writes an answer (or what stood in its place); `facts` are kept beside it for the reader of the journal."""
        with self._turn:
            self._append({"event": "answer", "hold": hold, **dataclasses.asdict(reply), **facts})
            self._held.pop(hold, None)
            self.spent += reply.usd
            self.replies[reply.key] = reply
            self._turn.notify_all()

    def record_batch(self, **facts: Any) -> None:
        """Writes one step of a batch (see llm_batch)."""
        with self._turn:
            event = {"event": "batch", **facts}
            self._append(event)
            self.events.append(event)

    def room(self) -> str:
        """What was spent of the limits, as a sentence part."""
        of_usd = "" if self._limits.max_usd is None else f" of {self._limits.max_usd:.4f}"
        of_requests = "" if self._limits.max_requests is None else f" of {self._limits.max_requests}"
        return f"{self.spent:.4f}{of_usd} USD and {self.sent}{of_requests} requests"

    def _append(self, *events: Mapping[str, Any]) -> None:
        self._file.write(b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
