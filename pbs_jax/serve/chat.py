"""OpenAI's form of a question and its answer: every parameter is honoured, changes nothing, or is refused by its name.

An answer is at most MAX_NEW tokens long: limits and stop texts cut what was written, which gives the text that stopping
would have given. A stream carries an answer in pieces, as it is written; a chosen one (a letter, true or false) in one.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from data_prep.schema import DataError
from data_prep.tokens import Tokenizer
from pbs_jax.decode.answer import MAX_NEW
from pbs_jax.decode.sampling import Sampling

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "penalty"}
WHOLE = ("top_k", "seed", "max_tokens", "max_completion_tokens")
HONOURED = {"model", "messages", "stop", "stream", "stream_options", *SAMPLING, *WHOLE}
CALLER = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # who asks; the answer is the same
NOTHING: dict[str, tuple[Any, ...]] = {  # not offered: only the values that ask for nothing
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
MOST_STOPS = 4
MOST_TOKENS = max(MAX_NEW.values())


class BadParameter(DataError):
    """A parameter that cannot be honoured."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """`picture`: data URL; `limit`: most tokens of the answer, None = the model's own; `usage`: a stream ends with it."""

    picture: str
    text: str
    sampling: Sampling
    limit: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool


@dataclasses.dataclass(frozen=True)
class Reply:
    """`read`, `written`: tokens; `finish`: "length" for an answer that was cut."""

    text: str
    read: int
    written: int
    finish: str


def read_request(body: dict[str, Any]) -> ChatRequest:
    """Raises BadParameter."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in HONOURED | CALLER and value not in NOTHING.get(name, ()):
            raise BadParameter(name, f"{name[:80]} is not offered by this server: leave it out")
    for name in {*SAMPLING, *WHOLE} & given.keys():
        kinds = int if name in WHOLE else int | float
        if isinstance(given[name], bool) or not isinstance(given[name], kinds):
            raise BadParameter(name, f"{name} is not a {'whole ' if name in WHOLE else ''}number")
    for name in ("max_tokens", "max_completion_tokens"):
        if given.get(name, 1) < 1:
            raise BadParameter(name, f"{name} is {given[name]}: give 1 or more")
    if not isinstance(given.get("stream", False), bool):
        raise BadParameter("stream", "stream is neither true nor false")
    streaming = given.get("stream_options", {})
    if not isinstance(streaming, dict) or streaming.keys() - {"include_usage"}:
        raise BadParameter("stream_options", "stream_options may hold include_usage, nothing else")
    limits = [given[name] for name in ("max_tokens", "max_completion_tokens") if name in given]
    return ChatRequest(
        *_last_question(body.get("messages")),
        _sampling(given),
        min(limits, default=None),
        _stop(given.get("stop", [])),
        given.get("stream", False),
        bool(streaming.get("include_usage")),
    )


def _sampling(given: dict[str, Any]) -> Sampling:
    sampling = Sampling(seed=given.get("seed", 0) % 2**31)
    for name, own in SAMPLING.items():
        if name in given:
            try:
                sampling = dataclasses.replace(sampling, **{own: given[name]})
            except DataError as error:
                raise BadParameter(name, name + str(error).removeprefix(own)) from error
    return sampling


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(s and isinstance(s, str) for s in stops):
        raise BadParameter("stop", f"stop is a text or a list of up to {MOST_STOPS} texts, none of them empty")
    return tuple(stops)


def _last_question(messages: Any) -> tuple[str, str]:
    """(data URL of the latest picture, text of the last user message) of a chat. Raises BadParameter."""
    picture, text = "", ""
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        for part in parts:
            if part.get("type") not in ("text", "image_url"):
                raise BadParameter(
                    "messages", f'a part of type "{part.get("type")}" cannot be read: send text and image_url'
                )
        text = "\n".join(str(part.get("text", "")) for part in parts if part["type"] == "text")
        urls = [part.get("image_url") for part in parts if part["type"] == "image_url"]
        if len(urls) > 1:
            raise BadParameter("messages", f"a message holds {len(urls)} pictures: ask about one at a time")
        for url in urls:
            picture = str(url.get("url", "") if isinstance(url, dict) else url)
    if not text.strip() or not picture:
        raise BadParameter(
            "messages", "messages needs a user message with a text and, in it or before, a picture (image_url)"
        )
    return picture, text


def ended(text: str, asked: ChatRequest, tokenizer: Tokenizer, longest: int, read: int) -> Reply:
    """The reply that says `text` as far as the request lets it. longest: tokens after which the model itself stops short."""
    ids = tokenizer.encode(text)
    finish = "length" if len(ids) >= longest else "stop"
    if asked.limit is not None and len(ids) > asked.limit:
        text, finish = tokenizer.decode(ids[: asked.limit]), "length"
    ends = [text.find(stop) for stop in asked.stop if stop in text]
    if ends:
        text, finish = text[: min(ends)], "stop"
    return Reply(text, read, len(tokenizer.encode(text)), finish)


def sure(text: str, asked: ChatRequest, tokenizer: Tokenizer) -> str:
    """What of an answer so far begins its reply (`ended`), whatever comes: whole words, and no end that may begin a stop text."""
    words = ended(text.rpartition(" ")[0], asked, tokenizer, MOST_TOKENS, 0).text
    return words[: max(len(words) - max(map(len, asked.stop), default=1) + 1, 0)]


def completion(reply: Reply, model: str) -> Response:
    """The answer as one object."""
    message = {"role": "assistant", "content": reply.text}
    choice = {"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}
    return JSONResponse(_common(model) | {"object": "chat.completion", "choices": [choice], "usage": _usage(reply)})


def completion_stream(texts: AsyncIterator[str], replied: Awaitable[Any], asked: ChatRequest, model: str) -> Response:
    """The answer as server-sent events: what is new in each of `texts` (the answer so far), then the rest of `replied`, a Reply."""
    common = _common(model) | {"object": "chat.completion.chunk"}

    def event(**chunk: Any) -> str:
        return f"data: {json.dumps(common | chunk)}\n\n"

    def delta(content: dict[str, str], finish: str | None = None) -> str:
        return event(choices=[{"index": 0, "delta": content, "finish_reason": finish}])

    async def events() -> AsyncIterator[str]:
        told = ""
        yield delta({"role": "assistant", "content": ""})
        async for text in texts:
            if len(text) > len(told):
                yield delta({"content": text[len(told) :]})
                told = text
        reply = await replied
        if reply.text != told:
            yield delta({"content": reply.text[len(told) :]})
        yield delta({}, reply.finish)
        if asked.usage:
            yield event(choices=[], usage=_usage(reply))
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _common(model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.read,
        "completion_tokens": reply.written,
        "total_tokens": reply.read + reply.written,
    }
