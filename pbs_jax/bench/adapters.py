"""Models behind one interface. They get image bytes and text under a neutral id: paths and file names carry labels,
so none is passed.

`pbs:WORKDIR` is our model, `torch:EXPORT` the same reloaded in PyTorch, `replay:FILE` gives recorded answers again,
`constant:TEXT` says one thing to everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data_prep.schema import QA, DataError
from pbs_jax.bench.records import STATUSES, Prediction, load_predictions

STAND_IN = (
    "The small sizes have a stand-in backbone, supervised on the same cell labels, and answer from a closed list: "
    "not comparable with the paper's tables."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One question: `options` in the order shown, `text` the user turn with them, `image` encoded (None when blind)."""

    id: str
    perm: tuple[int, ...]
    image: bytes | None
    question: str
    question_type: str
    options: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """`status` "error" marks an answer that was not had (asked again on resume), not a wrong one."""

    text: str
    status: str = "ok"

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise DataError(f'response status "{self.status}" is not one of {", ".join(STATUSES)}')


class Adapter(Protocol):
    """`name` and `seed` label the rows of tables; `card` is recorded in run.json (settings, revisions, hashes).

    `card["remarks"]`, sentences about the model, stand on top of every report.
    """

    name: str
    seed: int
    card: Mapping[str, Any]

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        """One response per request, in order. Greedy. `mode`: "generate", "letter_likelihood" (closed types)."""
        ...


class Constant:
    """Says the same to everything."""

    def __init__(self, text: str):
        self.name, self.seed, self._text = f'constant "{text}"', 0, text
        self.card: Mapping[str, Any] = {"text": text}

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        return [Response(self._text) for _ in requests]


class Replay:
    """Gives the answers of a predictions file again; a question that isn't in it is an error, not an empty answer."""

    def __init__(self, path: Path):
        recorded = load_predictions(path)
        self.name, self.seed = path.stem, 0
        self.card: Mapping[str, Any] = {"file": path.name}
        self._answers: dict[tuple[str, tuple[int, ...]], Prediction] = {item.key: item for item in recorded}

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        found = [self._answers.get((request.id, request.perm)) for request in requests]
        return [Response(item.prediction, item.status) if item else Response("", "error") for item in found]


class Pbs:
    """Our model: a finished question-answering phase, loaded with the parts that its handover.json names."""

    def __init__(self, workdir: Path):
        from pbs_jax.decode.answer import load_answerer  # brings jax
        from pbs_jax.train import handover

        content = handover.read(workdir)
        self._answerer: Any = load_answerer(workdir)
        self._describe(content, f"pbs {content['facts']['size']}")

    def _describe(self, content: Mapping[str, Any], name: str) -> None:
        """`content`: handover.json or export.json, which both say phase, step, facts and config."""
        self.name = name
        self.seed = int(content["config"]["seed"])
        self.card: Mapping[str, Any] = {
            "phase": content["phase"],
            "step": content["step"],
            "facts": content["facts"],
            "remarks": [] if content["facts"]["size"] == "7b" else [STAND_IN],
        }

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        questions = [_as_question(request) for request in requests]
        answers = self._answerer.answer(self._visual(requests), questions, [r.options for r in requests], mode)
        return [Response(answer) for answer in answers]

    def _visual(self, requests: Sequence[Request]) -> Any:
        """[n, Q, D], each distinct picture encoded once; None when the requests carry no picture."""
        pictures = [request.image for request in requests if request.image is not None]
        if not pictures:
            return None
        if len(pictures) < len(requests):
            raise DataError("a batch mixes questions with and without a picture")
        distinct = list(dict.fromkeys(pictures))
        place = {picture: k for k, picture in enumerate(distinct)}
        return self._answerer.encode(distinct)[[place[picture] for picture in pictures]]


class Torch(Pbs):
    """The same model in PyTorch, from the folder that `pbs weights export` wrote and nothing else."""

    def __init__(self, export: Path):
        from pbs_jax.weights.torch_answer import load_export  # brings torch

        self._answerer = load_export(export)
        card = self._answerer.card
        self._describe(card, f"pbs {card['facts']['size']} (PyTorch)")


def _as_question(request: Request) -> QA:
    """The decoder's view of a request: no image id, no gold."""
    return QA(
        id=request.id,
        image_id="",
        level="cell",
        domain="",
        split="",
        task="",
        question_type=request.question_type,
        question=request.question,
        answer="",
        options=request.options,
    )


def load_adapter(spec: str) -> Adapter:
    """`pbs:WORKDIR`, `torch:EXPORT`, `replay:FILE` or `constant:TEXT`. Raises DataError for another kind."""
    kind, colon, value = spec.partition(":")
    match kind:
        case "pbs" if value:
            return Pbs(Path(value))
        case "torch" if value:
            return Torch(Path(value))
        case "replay" if value:
            return Replay(Path(value))
        case "constant" if colon:
            return Constant(value)
    raise DataError(f'--model "{spec}" is unknown: use pbs:WORKDIR, torch:EXPORT, replay:FILE or constant:TEXT')
