"""What is asked of a language model and what can go wrong: requests and their keys, prices, waits, kinds of failure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.html import data_uri
from data_prep.schema import DataError

OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens")
IMAGE_TOKENS = 2_000  # reserved for a picture when the price file gives no image_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """All that shapes an answer and nothing else: never an id, a path or a file name.

    `images` are encoded JPEG, PNG or WebP and stand before the text; `params` go to the server as they are and must
    bound the output (max_tokens or max_completion_tokens); `turns` are (role, text) after the user's; `schema` asks
    for JSON of that schema; another `sample` is another request.
    """

    model: str
    user: str
    system: str = ""
    images: tuple[bytes, ...] = ()
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    turns: tuple[tuple[str, str], ...] = ()
    schema: Mapping[str, Any] | None = None
    prompt_version: str = ""
    sample: int = 0

    @property
    def key(self) -> str:
        parts = dataclasses.asdict(self)
        parts["images"] = [hashlib.sha256(image).hexdigest() for image in self.images]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def output_limit(self) -> int:
        """Most tokens of the answer. Raises DataError when the request does not bound it."""
        for name in OUTPUT_LIMITS:
            if name in self.params:
                return int(self.params[name])
        raise DataError(f"a request to {self.model} bounds no output: give {' or '.join(OUTPUT_LIMITS)} in its params")

    def body(self) -> dict[str, Any]:
        """The arguments of a chat completion."""
        pictures = [{"type": "image_url", "image_url": {"url": data_uri(image)}} for image in self.images]
        content: Any = [*pictures, {"type": "text", "text": self.user}] if pictures else self.user
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages += [{"role": "user", "content": content}]
        messages += [{"role": role, "content": text} for role, text in self.turns]
        body: dict[str, Any] = {"model": self.model, "messages": messages, **self.params}
        if self.schema is not None:
            named = {"name": str(self.schema.get("title", "answer")), "schema": dict(self.schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """USD per million tokens; `image_tokens`: most that one picture counts for."""

    input: float
    output: float
    image_tokens: int = IMAGE_TOKENS

    def usd(self, input: int, output: int) -> float:
        return (input * self.input + output * self.output) / 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What asking would cost: `worst_usd` is the reserved bound, `likely_usd` takes 4 bytes a token and half the
    output; both None when the model has no price."""

    requests: int
    answered: int
    worst_usd: float | None
    likely_usd: float | None

    def __str__(self) -> str:
        cost = "its price is unknown (--prices)"
        if self.worst_usd is not None and self.likely_usd is not None:
            cost = f"at most {self.worst_usd:.4f} USD, likely about {self.likely_usd:.4f} USD"
        return f"{self.requests} requests, {self.answered} answered already, {self.requests - self.answered} to send; {cost}"


@dataclasses.dataclass(frozen=True, slots=True)
class Retry:
    """Waits of min(cap, base * 2^k) seconds with jitter, or what the server's Retry-After says (at most `longest`)."""

    tries: int = 6
    base: float = 1.0
    cap: float = 60.0
    longest: float = 300.0

    def wait(self, done: int, retry_after: float | None) -> float:
        if retry_after is not None:
            return min(retry_after, self.longest)
        return min(self.cap, self.base * 2 ** (done - 1)) * (0.5 + random.random() / 2)


class Passing(Exception):
    """A failure that may pass: 429, 5xx, a time-out, a broken connection or body. `paid`: the server may have
    answered, so the reservation counts as spent."""

    def __init__(self, detail: str, retry_after: float | None = None, paid: bool = False):
        super().__init__(detail)
        self.retry_after, self.paid = retry_after, paid


class Rejected(Exception):
    """The server will never take this request (4xx). `status`: rejected, or refusal where its filter declined."""

    def __init__(self, detail: str, status: str = "rejected"):
        super().__init__(detail)
        self.status = status


class Stop(Exception):
    """No request will go through: wrong key, no credit, no such model or service."""


def load_prices(path: Path) -> dict[str, Price]:
    """Prices from TOML: [models."NAME"] with input, output (USD per million tokens), maybe image_tokens."""
    try:
        models = tomllib.loads(path.read_text())["models"]
        prices = {name: Price(**entry) for name, entry in models.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path}: give a [models."NAME"] table with input and output in USD per million tokens ({error})'
        ) from error
    for name, price in prices.items():
        if not all(isinstance(v, int | float) and v >= 0 for v in dataclasses.astuple(price)):
            raise DataError(f'{path}: the prices of "{name}" must be numbers of 0 or more')
    return prices
