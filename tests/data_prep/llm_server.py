"""A local stand-in for a chat-completions service, with every fault that a test asks of it, and counts of what it did."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
# What a plan may answer: a dict is a body sent with 200; a tuple is (status, headers, body); a float hangs up after so
# many seconds; bytes are sent as they are.
Action = Mapping[str, Any] | tuple[int, Mapping[str, str], Any] | float | bytes


def completion(text: str | None, reason: str = "stop", **message: Any) -> dict[str, Any]:
    return {
        "id": "c", "object": "chat.completion", "created": 0, "model": "fake-1", "usage": USAGE,
        "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text, **message}}],
    }  # fmt: skip


def failure(status: int, code: str = "", **headers: str) -> tuple[int, Mapping[str, str], Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return status, named, {"error": {"message": f"fake {status}", "code": code, "type": "fake"}}


def asked(body: Mapping[str, Any]) -> str:
    """The text of the user's first turn."""
    content = next(m["content"] for m in body["messages"] if m["role"] == "user")
    return content if isinstance(content, str) else content[-1]["text"]


class Service:
    """`plan(text, nth time it is asked, body)` decides each answer. `paid` counts whole 200 answers by text."""

    def __init__(self, plan: Callable[[str, int, Mapping[str, Any]], Action]):
        self.plan = plan
        self.seen: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()
        self.bodies: list[Mapping[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.files: dict[str, str] = {}
        self.batches: list[dict[str, Any]] = []
        self.finish: Callable[[list[dict[str, Any]]], tuple[list[Any], list[Any]]] = lambda lines: ([], [])
        self.lock = threading.Lock()
        self.url = ""

    def chat(self, body: Mapping[str, Any]) -> Action:
        text = asked(body)
        with self.lock:
            self.seen[text] += 1
            self.bodies.append(body)
            action = self.plan(text, self.seen[text], body)
            if isinstance(action, Mapping):
                self.paid[text] += 1
        return action

    def add_file(self, content: str) -> str:
        id = f"file-{len(self.files)}"
        self.files[id] = content
        return id

    def add_batch(self, body: Mapping[str, Any]) -> dict[str, Any]:
        lines = [json.loads(line) for line in self.files[body["input_file_id"]].splitlines()]
        output, errors = self.finish(lines)
        text = ["".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in part) for part in (output, errors)]
        batch = {
            "id": f"batch-{len(self.batches)}", "object": "batch", "endpoint": body["endpoint"], "created_at": 0,
            "input_file_id": body["input_file_id"], "completion_window": "24h", "status": "completed",
            "metadata": body.get("metadata"), "output_file_id": self.add_file(text[0]) if output else None,
            "error_file_id": self.add_file(text[1]) if errors else None,
        }  # fmt: skip
        self.batches.append(batch)
        return batch


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, *_: Any) -> None:
        return

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.service.headers.append(dict(self.headers))
        if self.path.endswith("/files"):
            lines = [line for line in content.decode().splitlines() if line.startswith('{"custom_id"')]
            id = self.service.add_file("\n".join(lines))
            self.answer((200, {}, {"id": id, "object": "file", "bytes": 1, "created_at": 0, "filename": "f",
                                   "purpose": "batch", "status": "processed"}))  # fmt: skip
        elif self.path.endswith("/batches"):
            self.answer((200, {}, self.service.add_batch(json.loads(content))))
        else:
            self.answer(self.service.chat(json.loads(content)))

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.endswith("/content"):
            self.answer(self.service.files[path.split("/")[-2]].encode())
        elif path.endswith("/batches"):
            self.answer({"object": "list", "data": self.service.batches, "has_more": False})
        else:
            self.answer(next(b for b in self.service.batches if b["id"] == path.rpartition("/")[2]))

    def answer(self, action: Action) -> None:
        if isinstance(action, float):
            time.sleep(action)
            self.close_connection = True
            return
        status, headers, body = action if isinstance(action, tuple) else (200, {}, action)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving(service: Service) -> Iterator[Service]:
    """Runs the service on a free port of this machine; its address is `service.url`."""
    handler = type("Handler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    service.url = "http:" + f"//127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
