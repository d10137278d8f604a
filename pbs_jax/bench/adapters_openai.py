"""Models behind an OpenAI-compatible server: vLLM, SGLang, OpenAI, Gemini's and Anthropic's compatible endpoints.

Every call goes through `data_prep.llm`: what is answered is never asked again (the key holds the pictures' hashes), 429
and 5xx are tried again, spending is capped. A server that answers for another model than the one asked stops the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import llm
from data_prep.prompts import PROMPT_SET
from data_prep.schema import DataError
from pbs_jax.bench.adapters import ANSWER_TOKENS, Options, Request, Response
from pbs_jax.decode.batching import first_words

LIMITS = ("max_completion_tokens", "max_tokens")
ROOM = 8  # an answer that reasoning left no room for is asked once more with so many times the tokens
TOP = 20  # most servers give no more


class OpenAiModel:
    """`value` is the model's name at the server. Raises DataError for what the client refuses."""

    def __init__(self, value: str, options: Options):
        if options.store is None:
            raise DataError("a server's answers need a folder to be kept in: give --out or --cache")
        service: dict[str, Any] = {"provider": "openai"} | dict(options.service)
        self._model = self.name = value
        self.seed = 0
        self._client = llm.open_client(Path(options.store) / "llm", **service)
        self.at_once = 8 * int(service.get("workers", 4))
        self._params = {"temperature": 0} | dict(options.params)
        self._limit = next((name for name in LIMITS if name in self._params), "max_tokens")
        self._params.pop(self._limit, None)
        self.card: Mapping[str, Any] = {
            "backend": "openai",
            "model": value,
            "base_url": service.get("base_url") or "the SDK's own",
            "params": self._sent(),
            "answer_tokens": {"name": self._limit} | ANSWER_TOKENS,
            "remarks": [],
        }

    def _sent(self) -> dict[str, Any]:
        """A parameter given as null is not sent: some models refuse `temperature`."""
        return {name: value for name, value in self._params.items() if value is not None}

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        if mode == "letter_likelihood":
            more = {"logprobs": True, "top_logprobs": TOP}
            asked = [self._request(r, 1, more) for r in requests]
            replies = self._ask(asked)
            return [self._chosen(reply, request) for reply, request in zip(replies, requests, strict=True)]
        replies = self._ask([self._request(r, ANSWER_TOKENS[r.question_type]) for r in requests])
        again = [
            k for k, reply in enumerate(replies) if reply.status in ("empty", "truncated") and not reply.text.strip()
        ]
        wider = [self._request(requests[k], ROOM * ANSWER_TOKENS[requests[k].question_type]) for k in again]
        for k, reply in zip(again, self._ask(wider) if wider else [], strict=True):
            replies[k] = reply
        return [_response(reply) for reply in replies]

    def estimate(self, requests: Sequence[Request]) -> llm.Estimate:
        return self._client.estimate([self._request(r, ANSWER_TOKENS[r.question_type]) for r in requests])

    def close(self) -> None:
        self._client.close()

    def _request(self, request: Request, tokens: int, more: Mapping[str, Any] | None = None) -> llm.Request:
        params = {**self._sent(), self._limit: tokens, **(more or {})}
        return llm.Request(
            model=self._model, user=request.text, images=request.images, params=params, prompt_version=PROMPT_SET
        )

    def _ask(self, requests: Sequence[llm.Request]) -> list[llm.Reply]:
        replies = self._client.ask(requests, desc=self.name)
        for reply in replies:
            if reply.model and not _same_model(self._model, reply.model):
                raise DataError(
                    f'asked for "{self._model}", the server answered with "{reply.model}": it stands in for a model that '
                    f"is gone or misnamed; ask for that one by name if it is the one to score"
                )
        return replies

    def _chosen(self, reply: llm.Reply, request: Request) -> Response:
        """The allowed answer whose spellings got most probability as the first token."""
        if reply.status in ("error", "rejected", "unasked", "refusal"):
            return _response(reply)
        if not reply.logprobs:
            raise DataError(f"{self._model}'s server gives no logprobs: use --mode generate")
        words = first_words(request.question_type, len(request.options))
        top = reply.logprobs[0]["top"]
        scores = {w: sum(math.exp(p) for token, p in top.items() if token.strip().lower() == w.lower()) for w in words}
        if not any(scores.values()):
            return dataclasses.replace(_failed(reply), detail={"error": f"none of {words} among the {TOP} likeliest"})
        return Response(max(scores, key=lambda word: scores[word]), "ok", _facts(reply))


def _response(reply: llm.Reply) -> Response:
    if reply.status in ("ok", "truncated") and reply.text.strip():
        return Response(reply.text, reply.status, _facts(reply))
    if reply.status == "refusal":
        return Response(reply.text, "refusal", _facts(reply))
    return _failed(reply)


def _failed(reply: llm.Reply) -> Response:
    why = {
        "empty": "an empty answer, twice",
        "truncated": f"reasoning used {ROOM} times the tokens of an answer and left none",
    }.get(reply.status, reply.detail)
    kind = "unasked" if reply.status == "unasked" else "error"
    return Response("", "error", _facts(reply) | {kind: why})


def _facts(reply: llm.Reply) -> dict[str, Any]:
    facts = {"model": reply.model, "usage": dict(reply.usage), "usd": reply.usd, "tries": reply.tries}
    return {name: value for name, value in facts.items() if value}


def _same_model(asked: str, answered: str) -> bool:
    """An alias may name its snapshot (gpt-4o, gpt-4o-2024-11-20), and a server may prefix its path."""
    short, long = asked.lower().removeprefix("models/"), answered.lower().removeprefix("models/")
    rest = long.removeprefix(short)
    return rest == "" or (rest != long and rest[0] == "-" and rest[1:].replace("-", "").isdigit())
