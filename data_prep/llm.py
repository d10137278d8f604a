"""One client of language models for captions, questions and the benchmark: resumable, bounded in cost, never twice.

A request's key is the hash of all that shapes its answer; answers live in an append-only store (llm_store) and a key
that is there is not asked again. 429, 5xx and time-outs back off and are tried again, other 4xx are recorded, a wrong
key or an empty account stops the run. Nothing is sent unless `--provider` names a service.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from data_prep.llm_options import PROVIDERS, add_llm_arguments
from data_prep.llm_request import Estimate, Passing, Price, Rejected, Request, Retry, Stop, load_prices
from data_prep.llm_store import FINAL, Limits, Reply, Store
from data_prep.progress import progress
from data_prep.schema import DataError

__all__ = [
    "Client",
    "Estimate",
    "Limits",
    "Reply",
    "Request",
    "Retry",
    "add_llm_arguments",
    "client_from_args",
    "open_client",
]
RETRY = Retry()
HOPELESS = 8  # so many rejections and nothing else end the run


class Send(Protocol):
    """One attempt: the chat completion as the SDK's plain dict. Raises Passing, Rejected or Stop."""

    def __call__(self, request: Request) -> Mapping[str, Any]: ...


class Client:
    """Asks requests through `send` (None: replay), at most `workers` at a time, and keeps what comes in `store`."""

    def __init__(
        self,
        store: Store,
        send: Send | None,
        *,
        prices: Mapping[str, Price] = {},
        priced: bool = False,
        retry: Retry = RETRY,
        workers: int = 4,
        again: bool = False,
        sleep: Callable[[float], Any] | None = None,
    ):
        """`priced`: a model without a price is an error; `again`: what was rejected before is asked anew."""
        self.store, self._send, self._prices, self._priced = store, send, prices, priced
        self._retry, self._workers, self._again = retry, workers, again
        self._stop = threading.Event()
        self._sleep = sleep or self._stop.wait

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.store.close()

    def ask(self, requests: Sequence[Request], desc: str = "asking") -> list[Reply]:
        """One reply per request, in order; equal keys are asked once.

        Raises DataError when a wrong key, an empty account or the like stops the run (what came before is kept), and
        for a model without a price under --max-usd.
        """
        keys = [request.key for request in requests]
        waiting = {k: r for k, r in zip(keys, requests, strict=True) if self._open(k)}
        replies: dict[str, Reply] = {}
        if waiting and self._send is not None:
            for request in waiting.values():
                self.worst_usd(request)
            self._stop.clear()
            replies = self._ask_all(waiting, desc)
        lacking = "not in the store" if self._send is None else "not sent: the budget is spent or the run was stopped"
        return [replies.get(k) or self.store.replies.get(k) or Reply(k, "unasked", detail=lacking) for k in keys]

    def estimate(self, requests: Sequence[Request]) -> Estimate:
        """Cost of asking what is not answered yet. Raises DataError as `ask` does for a missing price."""
        distinct = {request.key: request for request in requests}
        waiting = [request for key, request in distinct.items() if self._open(key)]
        known = all(request.model in self._prices for request in waiting)
        worst = math.fsum(map(self.worst_usd, waiting)) if known else None
        likely = math.fsum(self._usd(r, 4, r.output_limit // 2) for r in waiting) if known else None
        return Estimate(len(distinct), len(distinct) - len(waiting), worst, likely)

    def worst_usd(self, request: Request) -> float:
        """Upper bound of an attempt's price: a byte-level tokenizer makes at most one token of a byte."""
        limit = request.output_limit
        if request.model not in self._prices and self._priced:
            raise DataError(
                f'model "{request.model}" has no price: add it to the --prices file or pass --allow-unpriced'
            )
        return self._usd(request, 1, limit)

    def _usd(self, request: Request, bytes_per_token: int, output: int) -> float:
        price = self._prices.get(request.model)
        if price is None:
            return 0.0
        text = "".join((request.system, request.user, *itertools.chain(*request.turns)))
        text += json.dumps(request.schema) if request.schema else ""
        fixed = 16 * (2 + len(request.turns)) + price.image_tokens * len(request.images)
        return price.usd(fixed + len(text.encode()) // bytes_per_token, output)

    def _open(self, key: str) -> bool:
        known = self.store.replies.get(key)
        return known is None or known.status not in FINAL or (self._again and known.status == "rejected")

    def _ask_all(self, waiting: Mapping[str, Request], desc: str) -> dict[str, Reply]:
        replies: dict[str, Reply] = {}
        stopped: Stop | None = None
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self._ask_one, key, request) for key, request in waiting.items()]
            try:
                for future in progress(as_completed(futures), len(futures), desc):
                    try:
                        reply = future.result()
                        replies[reply.key] = reply
                        self._refuse_hopeless(replies)
                    except Stop as error:
                        self._stop.set()
                        stopped = stopped or error
            except BaseException:  # Ctrl-C: end the waits, keep what came, send nothing more
                self._stop.set()
                raise
        if stopped is not None:
            raise DataError(f"the service stopped the run: {stopped}; what was answered is kept, run again to go on")
        return replies

    def _refuse_hopeless(self, replies: Mapping[str, Reply]) -> None:
        """Raises Stop when nothing but rejections came: the request's form is wrong, not its content."""
        if len(replies) == HOPELESS and all(reply.status == "rejected" for reply in replies.values()):
            first = next(iter(replies.values()))
            raise Stop(f"the first {HOPELESS} requests were all rejected ({first.detail})")

    def _ask_one(self, key: str, request: Request) -> Reply:
        assert self._send is not None
        worst, detail = self.worst_usd(request), ""
        for done in range(1, self._retry.tries + 1):
            hold = uuid.uuid4().hex[:16]
            if self._stop.is_set() or not self.store.reserve(key, worst, hold):
                return Reply(key, "unasked", detail="not sent: the budget is spent or the run was stopped")
            try:
                answer = self._send(request)
                reply = self.read(key, request, answer, done)
            except Passing as error:
                detail = str(error)
                self.store.release(hold, worst if error.paid else 0.0)
                if done < self._retry.tries:
                    self._sleep(self._retry.wait(done, error.retry_after))
                continue
            except Rejected as error:
                reply = Reply(key, error.status, detail=str(error), tries=done)
            except BaseException as error:
                self.store.release(hold, 0.0 if isinstance(error, Stop) else worst)
                raise
            self.store.record(reply, hold, prompt_version=request.prompt_version, asked=request.model)
            return reply
        reply = Reply(key, "error", detail=detail, tries=self._retry.tries)
        self.store.record(reply, prompt_version=request.prompt_version, asked=request.model)
        return reply

    def read(self, key: str, request: Request, answer: Mapping[str, Any], tries: int = 1) -> Reply:
        """A chat completion as a Reply. Raises Passing for a body that is none (it may have been paid)."""
        try:
            choice = answer["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError) as error:
            raise Passing(f"the answer holds no choice ({error!r})", paid=True) from error
        text, refused = message.get("content") or "", message.get("refusal") or ""
        status = "ok" if text.strip() else "empty"
        if refused or reason == "content_filter":
            status = "refusal"
        elif reason == "length":
            status = "truncated"
        counted = answer.get("usage") or {}
        usage = {"input": counted.get("prompt_tokens"), "output": counted.get("completion_tokens")}
        price = self._prices.get(request.model)
        if price is None:
            usd = 0.0
        elif None in usage.values():
            usd = self.worst_usd(request)
        else:
            usd = price.usd(int(usage["input"] or 0), int(usage["output"] or 0))
        return Reply(
            key,
            status,
            text,
            refused or ("" if reason in ("stop", None) else str(reason)),
            str(answer.get("model") or request.model),
            {name: int(value) for name, value in usage.items() if value is not None},
            usd,
            tries,
            _logprobs(choice),
        )


def _logprobs(choice: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    content = (choice.get("logprobs") or {}).get("content")
    if not content:
        return None
    return [
        {"token": at["token"], "top": {o["token"]: o["logprob"] for o in at.get("top_logprobs") or [at]}}
        for at in content
    ]


def open_client(
    store: Path,
    *,
    provider: str,
    base_url: str | None = None,
    key_env: str = "OPENAI_API_KEY",
    workers: int = 4,
    timeout: float = 120.0,
    max_usd: float | None = None,
    max_requests: int | None = None,
    prices: Path | None = None,
    allow_unpriced: bool = False,
    again: bool = False,
    batch: bool = False,
    retry: Retry = RETRY,
) -> Client:
    """A client over the folder `store`.

    provider "openai" talks to any compatible service at `base_url` (None: the SDK's own) with the key in the
    environment variable `key_env`; "replay" gives stored answers and sends nothing. Budgets count all runs of the
    store together. Raises DataError for an option that cannot be used, a missing SDK or key.
    """
    limits = Limits(max_usd, max_requests)
    if provider == "replay":
        return Client(Store(store, service=None, write=False), None)
    if provider != "openai":
        raise DataError(f'--provider "{provider}" is unknown: use {" or ".join(PROVIDERS)}')
    if workers < 1:
        raise DataError(f"--llm-workers is {workers}: give 1 or more")
    from data_prep import llm_openai

    sdk = llm_openai.connect(base_url, key_env, timeout)
    options: dict[str, Any] = {
        "prices": load_prices(prices) if prices else {},
        "priced": max_usd is not None and not allow_unpriced,
        "retry": retry,
        "workers": workers,
        "again": again,
    }
    journal = Store(store, service=llm_openai.service_name(sdk), limits=limits)
    if batch:
        from data_prep.llm_batch import BatchClient

        return BatchClient(journal, llm_openai.OpenAIBatches(sdk), **options)
    return Client(journal, llm_openai.OpenAISend(sdk), **options)


def client_from_args(args: argparse.Namespace, store: Path, *, batch: bool = False) -> Client:
    """`open_client` with the options of `add_llm_arguments`."""
    return open_client(
        store,
        provider=args.provider,
        base_url=args.base_url,
        key_env=args.key_env,
        workers=args.llm_workers,
        timeout=args.timeout,
        max_usd=args.max_usd,
        max_requests=args.max_requests,
        prices=args.prices,
        allow_unpriced=args.allow_unpriced,
        again=args.retry_rejected,
        batch=batch,
    )
