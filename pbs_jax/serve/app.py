"""The web application: the page, its small API, and an OpenAI-compatible /v1/chat/completions (Starlette).

Every error is one JSON object with a sentence; uploads are written to disk chunk by chunk and cut off at the limit; a request
of another site's page is refused by its Origin, of another name for this machine by its Host.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from data_prep.schema import DataError
from pbs_jax.serve.chat import BadParameter, completion, completion_stream, read_request
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


class BadModel(DataError):
    """A model that is not served."""


class Place(IntegerConvertor):
    """A place in a list; no list here is so long that more digits mean anything."""

    regex = "[0-9]{1,9}"


register_url_convertor("place", Place())


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
        question, kind = body.get("question", ""), body.get("type", "auto")
        if not isinstance(options, list) or not all(isinstance(text, str) for text in (question, kind, *options)):
            raise DataError("question and type are texts, options is a list of texts")
        return await _work(request, lambda: desk.asked(request.path_params["id"], question, options, kind))

    async def evidence(request: Request) -> Response:
        return await _work(request, lambda: desk.evidence(request.path_params["id"], request.path_params["number"]))

    async def models(request: Request) -> Response:
        item = {"id": desk.models.served, "object": "model", "created": 0, "owned_by": "pbs_jax"}
        return JSONResponse({"object": "list", "data": [item]})

    async def chat(request: Request) -> Response:
        await bodies.acquire()
        try:
            body = await _json(request, max_upload * 4 // 3 + SMALL_BODY)
            if body.get("model") not in (None, "", desk.models.served):
                raise BadModel(f'model "{body["model"]}" is not served here: ask for "{desk.models.served}"')
            asked = read_request(body)
        except BaseException:
            bodies.release()
            raise
        texts: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(texts.put_nowait, text)

        def done(_: Any) -> None:
            bodies.release()
            texts.put_nowait(None)

        work: asyncio.Future[Any] = asyncio.ensure_future(
            desk.run(request.is_disconnected, lambda: desk.chat(asked, tell))
        )
        work.add_done_callback(done)
        begun = await texts.get() if asked.stream else None  # what is refused is no stream yet
        if begun is None and await work is None:
            return Response(status_code=499)
        if asked.stream:
            return completion_stream(_texts(begun, texts), work, asked, desk.models.served)
        return completion(await work, desk.models.served)

    async def _work(request: Request, work: Callable[[], Any]) -> Response:
        result = await desk.run(request.is_disconnected, work)
        if result is None:
            return Response(status_code=499)  # nobody listens
        return Response(result, media_type="image/jpeg") if isinstance(result, bytes) else JSONResponse(result)

    routes = [
        Route("/", page),
        Route("/api/about", about),
        Route("/api/pictures", upload, methods=["POST"]),
        Route("/api/slides/{number:place}", open_slide, methods=["POST"]),
        Route("/api/pictures/{id}/overview", overview),
        Route("/api/pictures/{id}/cells/{number:place}", cell),
        Route("/api/pictures/{id}/ask", ask, methods=["POST"]),
        Route("/api/pictures/{id}/evidence/{number:place}", evidence),
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


async def _texts(first: str | None, rest: asyncio.Queue[str | None]) -> AsyncIterator[str]:
    while first is not None:
        yield first
        first = await rest.get()


async def _json(request: Request, limit: int) -> dict[str, Any]:
    body = bytearray()
    await _receive(request, limit, body.extend)
    try:
        content = json.loads(body or b"{}")
        json.dumps(content, ensure_ascii=False, allow_nan=False).encode()  # neither half characters nor endless numbers
    except (ValueError, RecursionError) as error:
        raise DataError(f"the request is not JSON of Unicode texts and finite numbers ({error})") from error
    if not isinstance(content, dict):
        raise DataError("the request is not a JSON object")
    return content


def _shown_name(text: str) -> str:
    """A client's file name for display: the last part, printable, short. It never becomes a path."""
    last = text.replace("\\", "/").rpartition("/")[2]
    return "".join(c for c in last if c.isprintable())[-80:] or "picture"


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f'"{str(value)[:40]}" is not a number')
    return number


def _error(text: str, status: int, param: str | None = None, **headers: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return JSONResponse({"error": {"message": text, "type": kind, "param": param}}, status, headers)


async def _refused(request: Request, error: Exception) -> Response:
    return _error(str(error), 422)


async def _bad_model(request: Request, error: Exception) -> Response:
    return _error(str(error), 404)


async def _bad_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadParameter)
    return _error(str(error), 400, error.name)


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
    BadModel: _bad_model,
    BadParameter: _bad_parameter,
    Busy: _busy,
    Unknown: _unknown,
    TooLarge: _too_large,
    ClientDisconnect: _gone,
    Exception: _failed,
}
