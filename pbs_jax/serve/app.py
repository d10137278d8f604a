"""The web application: the page, its small API, and an OpenAI-compatible /v1/chat/completions (Starlette).

Every error is one JSON object with a sentence; uploads are written to disk chunk by chunk and cut off at the limit; a request
of another site's page is refused by its Origin, of another name for this machine by its Host.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from data_prep.schema import DataError
from pbs_jax.decode.sampling import Sampling
from pbs_jax.serve.desk import Busy, Desk, Unknown

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SMALL_BODY = 64 * 1024
BODIES_AT_ONCE = 4  # pictures inside JSON are held in memory


class TooLarge(Exception):
    """A body beyond its limit."""


def make_app(desk: Desk, *, max_upload: int, local: bool = True) -> Starlette:
    """max_upload: bytes of one picture. local: only this machine's own names are answered to."""
    bodies = asyncio.Semaphore(BODIES_AT_ONCE)

    async def page(request: Request) -> Response:
        headers = {
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        return HTMLResponse(PAGE.read_text(), headers=headers)

    async def about(request: Request) -> Response:
        return JSONResponse(desk.about())

    async def upload(request: Request) -> Response:
        name = _shown_name(unquote(request.headers.get("x-filename", "")))
        kind, mpp = request.query_params.get("as", "auto"), _number(request.query_params.get("mpp", "0"))
        if kind not in ("auto", "crop", "field", "slide"):
            raise DataError(f'as is "{kind}": use auto, crop, field or slide')
        file = desk.new_file(name)
        try:
            with file.open("wb") as out:
                await _receive(request, max_upload, out.write)
        except BaseException:
            desk.discard(file)
            raise
        return await _work(request, lambda: desk.opened(file, name, kind, mpp))

    async def open_slide(request: Request) -> Response:
        mpp = _number((await _json(request, SMALL_BODY)).get("mpp", 0))
        return await _work(request, lambda: desk.opened_slide(request.path_params["number"], mpp))

    async def overview(request: Request) -> Response:
        return await _work(request, lambda: desk.overview(request.path_params["id"]))

    async def cell(request: Request) -> Response:
        around = request.query_params.get("around") == "1"
        return await _work(request, lambda: desk.cell(request.path_params["id"], request.path_params["number"], around))

    async def ask(request: Request) -> Response:
        body = await _json(request, SMALL_BODY)
        options = body.get("options") or []
        if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
            raise DataError("options is a list of texts")
        question, kind = str(body.get("question", "")), str(body.get("type", "auto"))
        return await _work(request, lambda: desk.asked(request.path_params["id"], question, options, kind))

    async def evidence(request: Request) -> Response:
        return await _work(request, lambda: desk.evidence(request.path_params["id"], request.path_params["number"]))

    async def models(request: Request) -> Response:
        item = {"id": desk.models.served, "object": "model", "created": 0, "owned_by": "pbs_jax"}
        return JSONResponse({"object": "list", "data": [item]})

    async def chat(request: Request) -> Response:
        async with bodies:
            body = await _json(request, max_upload * 4 // 3 + SMALL_BODY)
            if body.get("model") not in (None, "", desk.models.served):
                return _error(f'model "{body["model"]}" is not served here: ask for "{desk.models.served}"', 404)
            for name in ("logprobs", "tools", "response_format"):
                if body.get(name):
                    raise DataError(f"{name} is not offered by this server: leave it out")
            if body.get("n") not in (None, 1):
                raise DataError("n is 1 here: ask again for another answer")
            picture, text = _last_question(body.get("messages"))
            sampling = Sampling(
                penalty=_number(body.get("repetition_penalty") or 1.0),
                temperature=_number(body.get("temperature") or 0.0),
                top_p=_number(body.get("top_p") or 1.0),
                seed=int(_number(body.get("seed") or 0)),
            )
            stop = body.get("stop") or []
            stop = [stop] if isinstance(stop, str) else stop
            reply = await desk.run(request.is_disconnected, lambda: desk.chat(picture, text, sampling, stop))
        if reply is None:
            return Response(status_code=499)
        return _completion(reply, desk.models.served, bool(body.get("stream")))

    async def _work(request: Request, work: Callable[[], Any]) -> Response:
        result = await desk.run(request.is_disconnected, work)
        if result is None:
            return Response(status_code=499)  # nobody listens
        return Response(result, media_type="image/jpeg") if isinstance(result, bytes) else JSONResponse(result)

    routes = [
        Route("/", page),
        Route("/api/about", about),
        Route("/api/pictures", upload, methods=["POST"]),
        Route("/api/slides/{number:int}", open_slide, methods=["POST"]),
        Route("/api/pictures/{id}/overview", overview),
        Route("/api/pictures/{id}/cells/{number:int}", cell),
        Route("/api/pictures/{id}/ask", ask, methods=["POST"]),
        Route("/api/pictures/{id}/evidence/{number:int}", evidence),
        Route("/v1/models", models),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    names = ["localhost", "127.0.0.1", "[::1]"] if local else ["*"]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False), Middleware(SameOrigin)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)


class SameOrigin:
    """Refuses requests that a page of another site makes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            origin = headers.get(b"origin", b"").decode("latin-1")
            if origin and urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
                await _error("requests of other sites' pages are refused", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _receive(request: Request, limit: int, write: Callable[[bytes], Any]) -> None:
    if int(request.headers.get("content-length") or 0) > limit:
        raise TooLarge
    count = 0
    async for chunk in request.stream():
        count += len(chunk)
        if count > limit:
            raise TooLarge
        write(chunk)


async def _json(request: Request, limit: int) -> dict[str, Any]:
    body = bytearray()
    await _receive(request, limit, body.extend)
    try:
        content = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise DataError("the request is not a JSON object")
    return content


def _shown_name(text: str) -> str:
    """A client's file name for display: the last part, printable, short. It never becomes a path."""
    last = text.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[-80:] or "picture"


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f'"{str(value)[:40]}" is not a number') from error


def _last_question(messages: Any) -> tuple[str, str]:
    """(data URL of the latest picture, text of the last user message) of a chat. Raises DataError."""
    picture, text = "", ""
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        text = "\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
        for part in parts:
            if part.get("type") == "image_url":
                url = part.get("image_url")
                picture = str(url.get("url", "") if isinstance(url, dict) else url)
    if not text.strip() or not picture:
        raise DataError("messages needs a user message with a text and, in it or before, a picture (image_url)")
    return picture, text


def _completion(reply: dict[str, Any], model: str, stream: bool) -> Response:
    common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    usage = {"prompt_tokens": reply["read"], "completion_tokens": reply["written"]}
    usage["total_tokens"] = sum(usage.values())
    message = {"role": "assistant", "content": reply["text"]}
    if not stream:
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return JSONResponse(common | {"object": "chat.completion", "choices": [choice], "usage": usage})
    # The answer is decoded in one compiled loop: it comes in one piece.
    deltas = [{"index": 0, "delta": message, "finish_reason": None}, {"index": 0, "delta": {}, "finish_reason": "stop"}]
    chunks = [common | {"object": "chat.completion.chunk", "choices": [delta]} for delta in deltas]
    lines = [*(json.dumps(chunk) for chunk in chunks), "[DONE]"]
    return Response("".join(f"data: {line}\n\n" for line in lines), media_type="text/event-stream")


def _error(text: str, status: int, **headers: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": text, "type": kind}}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    return _error(str(error), 422)


async def _busy(request: Request, error: Exception) -> Response:
    return _error("too many requests wait: try again in a moment", 503, **{"retry-after": "5"})


async def _unknown(request: Request, error: Exception) -> Response:
    return _error("no such picture or cell: it was dropped for newer ones, or never there; open it again", 404)


async def _too_large(request: Request, error: Exception) -> Response:
    return _error("the upload is larger than this server takes (--max_upload)", 413, connection="close")


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(f"unexpected {type(error).__name__}: {error}", 500)


HANDLERS: dict[Any, Any] = {
    DataError: _refused,
    Busy: _busy,
    Unknown: _unknown,
    TooLarge: _too_large,
    ClientDisconnect: _gone,
    Exception: _failed,
}
