"""Models with an environment of their own: a program that reads questions and writes answers, one JSON line each.

The child says `{"ready": true, ...}` when it is loaded (what else it says there goes into the run's card: name, revision,
max_images, remarks), then answers
each `{"id", "mode", "question_type", "text", "options", "images"}` (pictures in base64) with `{"id", "text"}`, if it
wants with `status` and `detail`. `child.py` holds its side of this and can be copied into an old environment. Ids are
counted numbers: with the question's own one a child could look the answer up. Lines that are no answers are taken for
prints. A child that dies or is silent for too long is started again; the question it had is an error.
"""

from __future__ import annotations

import base64
import collections
import json
import os
import queue
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.schema import DataError
from pbs_jax.bench.adapters import Options, Request, Response
from pbs_jax.bench.records import STATUSES

STARTS = 3  # a child that dies so often without one answer between is given up
# What a program needs to run and to find its GPU and model cache. Keys of services stay here.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME",
             "HF_HUB_OFFLINE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME")  # fmt: skip


class ChildModel:
    """`value` is a command line. The child starts with the first question, in an empty folder."""

    def __init__(self, value: str, options: Options):
        self._command = shlex.split(value)
        self._options = options
        self._child: _Child | None = None
        self._count = self._deaths = 0
        self._home = tempfile.TemporaryDirectory(prefix="pbs_bench_child_")
        self.seed, self.at_once = 0, 1
        hello = self._running().hello
        self.name = str(hello.pop("name", None) or Path(self._command[-1]).stem)
        remarks = [str(remark) for remark in hello.pop("remarks", [])]
        if not hello.get("revision"):
            remarks.append(f"The program behind {self.name} names no revision of its model.")
        self.card: Mapping[str, Any] = {
            "backend": "subprocess",
            "program": [Path(part).name for part in self._command],
            "child": hello,
            "timeout": options.timeout,
            "max_images": hello.pop("max_images", None),
            "remarks": remarks,
        }

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        return [self._ask(request, mode) for request in requests]

    def close(self) -> None:
        if self._child:
            self._child.end()
        self._home.cleanup()

    def _ask(self, request: Request, mode: str) -> Response:
        self._count += 1
        own = f"q{self._count}"
        question = {
            "id": own,
            "mode": mode,
            "question_type": request.question_type,
            "text": request.text,
            "options": list(request.options),
            "images": [base64.b64encode(image).decode() for image in request.images],
        }
        child = self._running()
        answer = child.ask(question, self._options.timeout)
        if isinstance(answer, str):  # why there is none
            child.end(0)
            self._child = None
            return Response("", "error", {"error": answer})
        self._deaths = 0
        status = str(answer.get("status", "ok"))
        if "text" not in answer or status not in STATUSES:
            return Response("", "error", {"error": f"the answer has no text, or the unknown status {status}"})
        return Response(str(answer["text"] or ""), status, dict(answer.get("detail") or {}))

    def _running(self) -> _Child:
        if self._child is None:
            if self._deaths >= STARTS:
                raise DataError(
                    f"{self._command[0]} was started {STARTS} times and gave no answer: see its messages above"
                )
            self._deaths += 1
            self._child = _Child(self._command, self._home.name, self._options.start_timeout)
        return self._child


class _Child:
    """A running program. `hello` is what it said when it was ready. Raises DataError if it never was."""

    def __init__(self, command: Sequence[str], folder: str, timeout: float):
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        try:
            self._process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise DataError(f"{command[0]} can't be started ({error}); programs need absolute paths") from error
        assert self._process.stdin and self._process.stdout
        self._write = self._process.stdin
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._prints: collections.deque[str] = collections.deque(maxlen=3)
        threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        hello = self._read(lambda message: message.get("ready") is True, timeout)
        if isinstance(hello, str):
            self.end(0)
            raise DataError(f"{command[0]} never became ready: {hello}")
        self.hello = {name: value for name, value in hello.items() if name != "ready"}

    def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any] | str:
        """The answer, or why there is none. Raises DataError for an answer to a question that was not asked."""
        try:
            self._write.write(json.dumps(question, ensure_ascii=False).encode() + b"\n")
            self._write.flush()
        except OSError:
            return self._ended()
        answer = self._read(lambda message: "id" in message, timeout)
        if not isinstance(answer, str) and answer["id"] != question["id"]:
            raise DataError(
                f"the child answered {answer['id']!r} when {question['id']!r} was asked: answers may be mixed up"
            )
        return answer

    def _read(self, wanted: Any, timeout: float) -> dict[str, Any] | str:
        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                return self._ended()
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict) and wanted(message):
                return message
            self._prints.append(line.decode(errors="replace").strip()[:200])
        return f"no answer within {timeout:g} s{self._said()}"

    def _ended(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return f"it closed its output{self._said()}"
        return f"it ended with code {code}{self._said()}"

    def _said(self) -> str:
        return f'; it last printed "{" | ".join(self._prints)}"' if self._prints else ""

    def end(self, patience: float = 5.0) -> None:
        """Closes its input, which asks it to end, and kills it if it does not within `patience` seconds."""
        try:
            self._write.close()
            self._process.wait(patience)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def _pump(stream: BinaryIO, lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
