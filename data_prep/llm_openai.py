"""The `openai` SDK behind the client: one attempt per call, every failure sorted into passing, rejected or stop."""

from __future__ import annotations

import email.utils
import importlib.util
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from data_prep.llm_request import Passing, Rejected, Request, Stop
from data_prep.schema import DataError

BATCH_TOKEN = "pbs_token"  # metadata that finds a batch again whose id was not written down
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_FILTERED = ("content_filter", "content_policy_violation")


def connect(base_url: str | None, key_env: str, timeout: float) -> Any:
    """An SDK client without retries of its own. Raises DataError when the SDK or the key is missing."""
    if importlib.util.find_spec("openai") is None:
        raise DataError('--provider openai needs the SDK: pip install "pbs-jax[llm]"')
    import openai

    key = os.environ.get(key_env)
    if not key:
        raise DataError(
            f"the environment variable {key_env} holds no key: set it (a local server without keys takes any text)"
        )
    return openai.OpenAI(api_key=key, base_url=base_url, timeout=timeout, max_retries=0)


def service_name(sdk: Any) -> str:
    """Host of the service: the part of the address that the answers depend on."""
    return str(sdk.base_url.host)


class OpenAISend:
    """Sends one request. A service that honours Idempotency-Key won't charge a repeated try."""

    def __init__(self, sdk: Any):
        self._create = sdk.chat.completions.with_raw_response.create

    def __call__(self, request: Request) -> Mapping[str, Any]:
        import openai

        try:
            raw = self._create(**request.body(), extra_headers={"Idempotency-Key": request.key})
            answer = json.loads(raw.http_response.text)
        except openai.OpenAIError as error:
            raise sorted_error(error) from error
        except ValueError as error:
            raise Passing(f"the answer is no whole JSON ({error})", paid=True) from error
        if not isinstance(answer, dict):
            raise Passing("the answer is no JSON object", paid=True)
        return answer


def sorted_error(error: Exception) -> Exception:
    """The SDK's error as Passing, Rejected or Stop."""
    import openai

    if isinstance(error, openai.APIStatusError):
        code = error.status_code
        kind = str(getattr(error, "code", None) or "")
        detail = f"{code} {kind} {str(error.message)[:300]}"
        if code == 429 and kind not in _NO_CREDIT:
            return Passing(detail, retry_after(error.response.headers))
        if code in (401, 402, 403, 404, 429):
            return Stop(f"{detail}; check the key, the credit, the model's name and --base-url")
        if code >= 500 or code in (408, 409):
            # A gateway that gave up waiting does not know whether the model behind it answered.
            return Passing(detail, retry_after(error.response.headers), paid=code in (502, 504))
        return Rejected(detail, "refusal" if kind in _FILTERED else "rejected")
    if isinstance(error, openai.APIConnectionError):  # time-outs are a kind of it
        never_arrived = type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout")
        return Passing(f"{type(error).__name__}: {error}", paid=not never_arrived)
    return Passing(f"{type(error).__name__}: {error}", paid=True)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by Retry-After (seconds or a date) or its milliseconds form; None without one that is sound."""
    try:
        if milliseconds := headers.get("retry-after-ms"):
            return max(0.0, float(milliseconds) / 1000)
        value = headers.get("retry-after")
        if not value:
            return None
        if value.replace(".", "", 1).isdigit():
            return float(value)
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


class OpenAIBatches:
    """The file and batch calls that llm_batch needs. Raises as `sorted_error` sorts."""

    def __init__(self, sdk: Any):
        self._sdk = sdk

    def _call(self, function: Any, *args: Any, **options: Any) -> Any:
        import openai

        try:
            return function(*args, **options)
        except openai.OpenAIError as error:
            raise sorted_error(error) from error

    def submit(self, lines: bytes, token: str) -> str:
        """Uploads the request lines and starts a batch marked with `token`; its id."""
        file = self._call(self._sdk.files.create, file=(f"{token}.jsonl", lines), purpose="batch")
        batch = self._call(
            self._sdk.batches.create,
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={BATCH_TOKEN: token},
        )
        return str(batch.id)

    def find(self, token: str) -> str | None:
        """Id of the batch marked with `token`, None when the service has none."""
        for batch in self._call(self._sdk.batches.list, limit=100):
            if (batch.metadata or {}).get(BATCH_TOKEN) == token:
                return str(batch.id)
        return None

    def state(self, batch_id: str) -> tuple[str, list[str], str]:
        """(status, ids of the output and error files there are, what the service says went wrong)."""
        batch = self._call(self._sdk.batches.retrieve, batch_id)
        files = [str(id) for id in (batch.output_file_id, batch.error_file_id) if id]
        errors = getattr(batch.errors, "data", None) or []
        return str(batch.status), files, "; ".join(str(error.message) for error in errors)

    def read(self, file_id: str) -> str:
        return str(self._call(self._sdk.files.content, file_id).text)
