"""The server as clients meet it: real sockets and uploads; the models are stood in for, so that nothing is compiled."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_prep.picture import Preparation
from data_prep.pyramid import write_pyramid
from pbs_jax.ask import picture as asking
from pbs_jax.ask.evaluate import QUESTION
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


def answered(ready: Any, qa: Any, *more: Any, tell: Any = None) -> asking.Answer:
    """ "A", or for an open question as many words as it names, told one by one."""
    text = "A"
    if qa.question_type == "open":
        words = [f"w{k}" for k in range(int(qa.question.split()[-1]))]
        text = " ".join(words)
        for count in range(1, len(words) + 1) if tell else ():
            tell(" ".join(words[:count]))
    return asking.Answer(qa.question, qa.question_type, qa.options, text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from pbs_jax.serve.app import make_app
    from pbs_jax.serve.desk import Desk

    folder = tmp_path_factory.mktemp("slides")
    (folder / "text.svs").write_text("hello")
    outside = tmp_path_factory.mktemp("outside") / "secret.png"
    outside.write_text("secret")
    (folder / "link.png").symlink_to(outside)
    write_pyramid(folder / "unscaled.tiff", 1024, 1024, lambda x, y, w, h: np.full((h, w, 3), 200, np.uint8))
    models: Any = SimpleNamespace(
        prepare=Preparation(), backbone=None, classify=None, slide=None, remark="", name="stand-in", served="pbs-test"
    )
    tokenizer = SimpleNamespace(encode=lambda text: text.split(), decode=" ".join)
    prepared = SimpleNamespace(
        level="cell", asked=[0], answerer=SimpleNamespace(tokenizer=tokenizer), prefix=SimpleNamespace(ids=[1] * 40)
    )
    patch = pytest.MonkeyPatch()
    patch.setattr(asking, "ready", lambda picture, models: prepared)
    patch.setattr(asking, "ask", answered)
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


def files(server: Server) -> list[str]:
    return sorted(str(path) for path in server.desk._folder.rglob("*"))


@pytest.mark.parametrize("way", ["uploaded", "listed"])
def test_refused_slides_leave_nothing_behind(server: Server, way: str):
    slide = server.desk._slides[1][1]
    before = files(server)
    for _ in range(3):
        status, reply = (
            upload(server, slide.read_bytes(), "slide.tiff")
            if way == "uploaded"
            else server.call("/api/slides/1", b"{}")
        )
        assert status == 422 and "states no usable pixel size" in reply["error"]["message"], reply
    assert files(server) == before


def test_dropped_pictures_take_their_files_along(server: Server, monkeypatch: pytest.MonkeyPatch):
    from pbs_jax.serve import desk

    def opened(file: Path, *more: Any, work: Path, name: str, **options: Any) -> Any:
        work.mkdir()
        (work / "dataset").write_text("…")
        return SimpleNamespace(kind="slide")

    monkeypatch.setattr(desk, "open_picture", opened)
    monkeypatch.setattr(desk, "as_json", lambda *more: {})
    before = len(list(server.desk._folder.iterdir()))
    for number in range(desk.KEPT + 3):
        call = (lambda: upload(server, b"x", "a.svs")) if number % 2 else (lambda: server.call("/api/slides/1", b"{}"))
        assert call()[0] == 200
    assert len(list(server.desk._folder.iterdir())) <= max(before, desk.KEPT)
    monkeypatch.undo()
    server.desk._entries.clear()


def test_the_page_offers_a_question_that_fits(server: Server, cell: bytes, monkeypatch: pytest.MonkeyPatch):
    from pbs_jax.serve import desk

    assert upload(server, cell)[1]["question"] == desk.CELL_QUESTION
    page = desk.Path(desk.__file__).with_name("page.html").read_text()
    assert f">{desk.CELL_QUESTION}</textarea>" in page and "found.question" in page
    monkeypatch.setattr(desk, "open_picture", lambda *more, **options: SimpleNamespace(kind="slide"))
    monkeypatch.setattr(desk, "as_json", lambda *more: {})
    for phase4, question in ((object(), QUESTION), (None, desk.CELL_QUESTION)):
        monkeypatch.setattr(server.desk.models, "slide", phase4)
        assert server.call("/api/slides/1", b"{}")[1]["question"] == question
    server.desk._entries.clear()


def test_only_the_listed_slides_can_be_named(server: Server):
    listed = server.call("/api/about")[1]["slides"]
    assert [item["name"] for item in listed] == ["text.svs", "unscaled.tiff"], "a link out of it is not offered"
    assert server.call("/api/slides/0", b"{}")[0] == 422
    assert server.call("/api/slides/2", b"{}")[0] == 404
    assert server.call("/api/slides/..%2F..%2Fetc%2Fpasswd", b"{}")[0] == 404
    assert server.call("/..%2f..%2fpyproject.toml")[0] == 404


def test_other_sites_and_other_names_are_refused(server: Server):
    assert server.call("/api/about", origin="http" + "://evil.example")[0] == 403
    assert server.call("/api/about", host="evil.example")[0] == 400
    assert server.call("/api/about", origin="http" + f"://127.0.0.1:{server.port}")[0] == 200


def chat(server: Server, content: Any, **more: Any) -> tuple[int, Any]:
    body = {"model": "pbs-test", "messages": [{"role": "user", "content": content}], **more}
    return server.call("/v1/chat/completions", json.dumps(body).encode())


def streamed(reply: bytes) -> tuple[list[str], str, dict[str, Any]]:
    """(pieces of text, finish reason, usage if the stream ends with it) of a streamed chat."""
    *lines, last, rest = reply.decode().split("\n\n")
    assert last == "data: [DONE]" and not rest
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and not choices[-1]["delta"]
    pieces = [choice["delta"]["content"] for choice in choices[1:-1]]
    return pieces, choices[-1]["finish_reason"], chunks[-1].get("usage", {})


def parts(cell: bytes, text: str) -> list[dict[str, Any]]:
    url = f"data:image/jpeg;base64,{base64.b64encode(cell).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def test_chat_completions_speak_openais_form(server: Server, cell: bytes):
    status, reply = chat(server, parts(cell, "Which?\nOptions:\nA. x\nB. y"), temperature=0)
    assert status == 200 and reply["choices"][0]["message"] == {"role": "assistant", "content": "A"}
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
    status, stream = chat(server, parts(cell, "Which?"), stream=True)
    assert status == 200 and streamed(stream)[0] == ["A"]
    status, stream = chat(server, parts(cell, "Describe it in words: 9"), stream=True)
    assert streamed(stream)[0] == ["w0", *(f" w{k}" for k in range(1, 9))], "an answer comes while it is written"
    status, reply = chat(server, parts(b"not a picture", "Which?"), stream=True)
    assert status == 422 and "picture" in reply["error"]["message"], "what is refused is no stream"
    for content, more, expected, words in (
        ("no picture", {}, 400, "picture"),
        (parts(cell, "?"), {"model": "gpt-4o"}, 404, "is not served"),
        (parts(cell, "?"), {"temperature": -1}, 400, "temperature is -1"),
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


def test_an_answer_ends_where_the_request_says(server: Server, cell: bytes):
    for words, more, text, finish in (
        (5, {}, "w0 w1 w2 w3 w4", "stop"),
        (5, {"max_tokens": 2}, "w0 w1", "length"),
        (5, {"max_completion_tokens": 3, "max_tokens": 9}, "w0 w1 w2", "length"),
        (5, {"max_tokens": 5}, "w0 w1 w2 w3 w4", "stop"),
        (5, {"stop": "w3"}, "w0 w1 w2 ", "stop"),
        (5, {"stop": ["w4", " w1"], "max_tokens": 3}, "w0", "stop"),
        (5, {"stop": ["w3"], "max_tokens": 2}, "w0 w1", "length"),
        (64, {}, None, "length"),  # where the model itself stops short
    ):
        for stream in (False, True):
            question = parts(cell, f"Describe the cell in words: {words}")
            status, reply = chat(server, question, **more, stream=stream, stream_options={"include_usage": True})
            assert status == 200, reply
            if stream:
                pieces, reason, usage = streamed(reply)
                told = "".join(pieces)
            else:
                told, reason = reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]
                usage = reply["usage"]
            assert reason == finish and told == (text if text is not None else told), (more, told)
            assert usage["completion_tokens"] == len(told.split()) <= more.get("max_tokens", 64)


NOTHING_ASKED = {
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": False, "tools": [],
    "response_format": {"type": "text"}, "stop": None, "max_tokens": None, "seed": None, "temperature": None,
    "store": False, "user": "me", "top_p": 1, "top_k": 0, "stream": False, "unheard_of": None,
}  # fmt: skip


def test_every_parameter_is_honoured_or_refused_by_name(server: Server, cell: bytes):
    assert chat(server, parts(cell, "Which?"), **NOTHING_ASKED)[0] == 200
    honoured = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": -(2**40), "repetition_penalty": 1.05}
    assert chat(server, parts(cell, "Which?"), **honoured)[0] == 200
    for name, value in (
        ("n", 3), ("presence_penalty", 0.5), ("frequency_penalty", 1), ("logit_bias", {"5": 1}), ("logprobs", True),
        ("tools", [{}]), ("response_format", {"type": "json_object"}), ("unheard_of", 1), ("temperature", "hot"),
        ("temperature", True), ("temperature", 1e9), ("top_p", 0), ("top_k", 2.5), ("repetition_penalty", 0), ("seed", 1.5),
        ("seed", "1"), ("max_tokens", 0), ("max_tokens", 2.5), ("max_completion_tokens", "9"), ("stop", 5), ("stop", [1]),
        ("stop", {}), ("stop", ""), ("stop", ["a"] * 5), ("stream", "yes"), ("stream_options", {"other": 1}),
        ("messages", [{"role": "user", "content": 2 * parts(cell, "Which?")}]),
        ("messages", [{"role": "user", "content": [*parts(cell, "Which?"), {"type": "input_audio"}]}]), ("messages", 5),
    ):  # fmt: skip
        status, reply = chat(server, parts(cell, "Which?"), **{name: value})
        assert status == 400 and reply["error"]["param"] == name and name in reply["error"]["message"] + name, reply
    status, reply = chat(server, 2 * parts(cell, "Which?"))
    assert status == 400 and "2 pictures" in reply["error"]["message"]


def test_no_request_ends_in_a_fault_of_the_server(server: Server, cell: bytes):
    _, found = upload(server, cell)
    ask, half = f"/api/pictures/{found['id']}/ask", chr(0xD800)
    nines = "9" * 5000
    bodies: list[tuple[str, bytes]] = [
        (ask, json.dumps(body).encode())
        for body in (
            {"question": half}, {"question": "Which?", "options": ["a", half]}, {"question": "Which?", "type": half},
            {"question": {}}, {"question": "Which?", "options": 5}, {"question": float("nan")},
        )
    ]  # fmt: skip
    bodies += [(ask, f'{{"question": {number}}}'.encode()) for number in (nines, "1e999", "-Infinity")]
    bodies += [(f"/api/slides/{nines}", b"{}"), ("/api/slides/0", b'{"mpp": 1e999}')]
    bodies += [("/api/slides/1", f'{{"mpp": {"9" * 400}}}'.encode()), ("/api/slides/1", b'{"mpp": [1]}')]
    bodies += [(f"/api/pictures?mpp={mpp}", cell) for mpp in ("nan", "inf", "-1", "1e9", nines, "x")]
    for path, body in bodies:
        status, reply = server.call(path, body)
        assert 400 <= status < 500, (path[:80], body[:80], status, reply)
    for path in (f"/api/pictures/{found['id']}/cells/{nines}", f"/api/pictures/{found['id']}/evidence/{nines}"):
        assert server.call(path)[0] == 404
    wrong: tuple[dict[str, Any], ...] = (
        {"seed": float("inf")}, {"seed": 10**400}, {"temperature": 10**400}, {"stop": half}, {"model": half},
        {half: 1}, {"messages": [{"role": "user", "content": half}]}, {"max_tokens": -(10**400)},
    )  # fmt: skip
    for more in wrong:
        status, reply = chat(server, parts(cell, "Which?"), **more)
        assert status == 200 if more == {"seed": 10**400} else 400 <= status < 500, (status, reply)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_server_takes_its_uploads_along(tmp_path: Path, cell: bytes, number: signal.Signals):
    code = """
import sys
from types import SimpleNamespace
from data_prep.picture import Preparation
from pbs_jax import cli
from pbs_jax.ask import picture
picture.load_models = lambda workdirs, int8: SimpleNamespace(
    prepare=Preparation(), backbone=None, classify=None, slide=None, remark="", name="stand-in", served="pbs-test"
)
sys.exit(cli.main(["serve", "--checkpoint=x", "--port=0"]))
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
            status, _ = upload(Server(port, None), cell)
            assert status == 200 and list(tmp_path.glob("pbs-serve-*"))
            process.send_signal(number)
            assert process.wait(30) != 0
        finally:
            process.kill()
    assert not list(tmp_path.glob("pbs-serve-*"))


@pytest.mark.parametrize(
    "option", ["--port=99999", "--port=-1", "--max_upload=0", f"--max_upload={10**30}", "--max_waiting=0"]
)
def test_options_out_of_range_are_named_before_a_model_is_loaded(option: str, capsys: pytest.CaptureFixture[str]):
    from pbs_jax import cli

    assert cli.main(["serve", "--checkpoint=x", option]) == 1
    assert f"{option.replace('=', ' is ')}: give" in capsys.readouterr().err


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
