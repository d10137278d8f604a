"""A child's side of `subprocess:` models. Standard library only, Python 3.8: copy this file into an old environment.

    from child import serve
    model = load()
    serve(lambda images, text, question: model(images, text), name="LLaVA-Med", revision="f2f7230")

`images` are encoded pictures, `text` the question with its options; return the answer's text, or a dict of `text`,
`status` (ok, refusal, truncated, error) and `detail`.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import traceback
from typing import Any, Callable, Dict, List, Union  # noqa: UP035

Answer = Union[str, Dict[str, Any]]  # noqa: UP006, UP007


def serve(answer: Callable[[List[bytes], str, Dict[str, Any]], Answer], **hello: Any) -> None:  # noqa: UP006
    """Answers until the input ends. What the model's libraries print goes to stderr, not between the answers."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _say(out, {"ready": True, "python": sys.version.split()[0], **hello})
    for line in sys.stdin.buffer:
        question = json.loads(line)
        try:
            images = [base64.b64decode(image) for image in question["images"]]
            given = answer(images, question["text"], question)
            reply = {"text": given} if isinstance(given, str) else dict(given)
        except Exception as error:  # one question's failure is that question's error
            traceback.print_exc()
            reply = {"text": "", "status": "error", "detail": {"error": repr(error)}}
        _say(out, {"id": question["id"], **reply})


def _say(out: Any, message: Dict[str, Any]) -> None:  # noqa: UP006
    out.write(json.dumps(message) + "\n")
    out.flush()
