"""The server as clients meet it: real sockets and uploads; the models are stood in for, so that nothing is compiled."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep.picture import Preparation
from pbs_jax.ask import picture as asking
from pbs_jax.ask.evidence import Evidence

uvicorn = pytest.importorskip("uvicorn")
LIMIT = 200_000


class Server:
    """A running server's address and its clients' requests."""

    def __init__(self, port: int, desk: Any) -> None:
        self.port, self.desk = port, desk

    def call(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        url = "http" + f"://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, body, {k.replace("_", "-"): v for k, v in headers.items()})
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                data, status = reply.read(), reply.status
        except urllib.error.HTTPError as error:
            data, status = error.read(), error.code
        return status, json.loads(data) if data[:1] in (b"{", b"[") else data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from pbs_jax.serve.app import make_app
    from pbs_jax.serve.desk import Desk

    folder = tmp_path_factory.mktemp("slides")
    (folder / "text.svs").write_text("hello")
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    outside.write_text("secret")
    (folder / "link.png").symlink_to(outside)
    models: Any = SimpleNamespace(
        prepare=Preparation(), backbone=None, classify=None, remark="", name="stand-in", served="pbs-test"
    )
    tokenizer = SimpleNamespace(encode=lambda text: text.split())
    prepared = SimpleNamespace(
        level="cell", asked=[0], answerer=SimpleNamespace(tokenizer=tokenizer), prefix=SimpleNamespace(ids=[1] * 40)
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(asking, "ready", lambda picture, models: prepared)
    patch.setattr(asking, "ask", lambda r, qa, *more: asking.Answer(qa.question, qa.question_type, qa.options, "A"))
    patch.setattr(asking, "looked_at", lambda r, cell: Evidence(b"\xff\xd8", [(0, 0, 16, 1.0)], "seen"))
    with Desk(models, folder, max_waiting=60) as desk:
        config = uvicorn.Config(make_app(desk, max_upload=LIMIT), host="127.0.0.1", port=0, log_level="error")
        listening = config.bind_socket()
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield Server(listening.getsockname()[1], desk)
        running.should_exit = True
        thread.join(10)
    patch.undo()


@pytest.fixture(scope="module")
def cell(shared: Path) -> bytes:
    return next((shared / "data/cells/pbc_barcelona/Neutrophil").glob("*.jpg")).read_bytes()


def upload(server: Server, data: bytes, name: str = "cell.jpg") -> tuple[int, Any]:
    return server.call("/api/pictures", data, x_filename=name, content_type="application/octet-stream")


def test_a_picture_is_opened_asked_and_explained(server: Server, cell: bytes):
    status, found = upload(server, cell)
    assert status == 200 and found["kind"] == "crop" and len(found["cells"]) == 1
    at = f"/api/pictures/{found['id']}"
    assert server.call(f"{at}/overview")[1][:2] == server.call(f"{at}/cells/0")[1][:2] == b"\xff\xd8"
    status, answer = server.call(f"{at}/ask", json.dumps({"question": "Which?", "options": ["x", "y"]}).encode())
    assert status == 200 and answer["sentence"] == "A. x"
    assert server.call(f"{at}/evidence/0")[1]["caption"] == "seen"
    assert server.call(f"{at}/cells/7")[0] == server.call("/api/pictures/none/overview")[0] == 404


def test_the_page_is_whole_and_lets_nothing_in(server: Server):
    url = "http" + f"://127.0.0.1:{server.port}/"
    with urllib.request.urlopen(url) as reply:
        text, policy = reply.read().decode(), reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "Not a diagnostic device" in text and 'src="http' not in text and 'href="http' not in text


def test_bad_uploads_get_a_sentence_and_leave_nothing_behind(server: Server, cell: bytes):
    before = sorted(p.name for p in server.desk._folder.iterdir())
    for data, name, expected, words in (
        (b"hello", "slide.svs", 422, "does not open"),
        (b"", "cell.png", 422, "0 bytes"),
        (b"hello", "../../etc/passwd", 422, "not an image"),
        (bytes(LIMIT + 1), "large.png", 413, "larger"),
    ):
        status, reply = upload(server, data, name)
        assert status == expected and words in reply["error"]["message"], (name, reply)
        assert str(server.desk._folder) not in reply["error"]["message"]
    assert sorted(p.name for p in server.desk._folder.iterdir()) == before
    assert upload(server, cell)[0] == 200


def test_only_the_listed_slides_can_be_named(server: Server):
    listed = server.call("/api/about")[1]["slides"]
    assert [item["name"] for item in listed] == ["text.svs"], "a link out of the folder is not offered"
    assert server.call("/api/slides/0", b"{}")[0] == 422
    assert server.call("/api/slides/1", b"{}")[0] == 404
    assert server.call("/api/slides/..%2F..%2Fetc%2Fpasswd", b"{}")[0] == 404
    assert server.call("/..%2f..%2fpyproject.toml")[0] == 404


def test_other_sites_and_other_names_are_refused(server: Server):
    assert server.call("/api/about", origin="http" + "://evil.example")[0] == 403
    assert server.call("/api/about", host="evil.example")[0] == 400
    assert server.call("/api/about", origin="http" + f"://127.0.0.1:{server.port}")[0] == 200


def chat(server: Server, content: Any, **more: Any) -> tuple[int, Any]:
    body = {"model": "pbs-test", "messages": [{"role": "user", "content": content}], **more}
    return server.call("/v1/chat/completions", json.dumps(body).encode())


def parts(cell: bytes, text: str) -> list[dict[str, Any]]:
    url = f"data:image/jpeg;base64,{base64.b64encode(cell).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def test_chat_completions_speak_openais_form(server: Server, cell: bytes):
    status, reply = chat(server, parts(cell, "Which?\nOptions:\nA. x\nB. y"), temperature=0)
    assert status == 200 and reply["choices"][0]["message"] == {"role": "assistant", "content": "A"}
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
    status, stream = chat(server, parts(cell, "Which?"), stream=True)
    lines = [line for line in stream.decode().split("\n\n") if line]
    assert status == 200 and lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "A"
    for content, more, expected, words in (
        ("no picture", {}, 422, "picture"),
        (parts(cell, "?"), {"model": "gpt-4o"}, 404, "is not served"),
        (parts(cell, "?"), {"n": 3}, 422, "n is 1"),
        (parts(cell, "?"), {"temperature": "hot"}, 422, "not a number"),
        (parts(cell, "?"), {"temperature": -1}, 422, "temperature is -1"),
        (
            [{"type": "image_url", "image_url": {"url": "http" + "://evil.example/x.png"}}, parts(cell, "?")[1]],
            {},
            422,
            "none is fetched",
        ),
        (parts(b"not a picture", "?"), {}, 422, "picture"),
    ):
        status, reply = chat(server, content, **more)
        assert status == expected and words in reply["error"]["message"], reply


def test_the_openai_package_can_call_it(server: Server, cell: bytes):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url="http" + f"://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    message = {"role": "user", "content": parts(cell, "Which?")}
    assert client.chat.completions.create(model="pbs-test", messages=[message]).choices[0].message.content == "A"
    assert [model.id for model in client.models.list()] == ["pbs-test"]


@pytest.mark.slow
def test_fifty_at_once_are_served_and_few_pictures_are_kept(server: Server, cell: bytes):
    from pbs_jax.serve.desk import KEPT

    with ThreadPoolExecutor(50) as pool:
        assert {status for status, _ in pool.map(lambda k: upload(server, cell), range(50))} == {200}
    assert len(server.desk._entries) == KEPT


def test_clients_that_vanish_leave_it_standing(server: Server, cell: bytes):
    for half in (
        b"POST /api/pictures HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 90000\r\n\r\nhalf",
        b"GET / HT",
        b"\x00\xff",
    ):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as one:
                one.sendall(half)
    assert upload(server, cell)[0] == 200
    assert server.desk._waiting == 0


def test_more_than_can_wait_are_turned_away(server: Server, cell: bytes):
    _, found = upload(server, cell)
    server.desk._most, kept = 0, server.desk._most
    try:
        status, reply = server.call(f"/api/pictures/{found['id']}/overview")
    finally:
        server.desk._most = kept
    assert status == 503 and "try again" in reply["error"]["message"]
