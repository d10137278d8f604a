"""Models behind one interface. They get image bytes and text under a neutral id: paths and file names carry labels,
so none is passed.

`pbs:WORKDIR` is our model, `torch:EXPORT` the same reloaded in PyTorch, `replay:FILE` gives recorded answers again,
`constant:TEXT` says one thing to everything. `hf:` runs transformers models here, `openai:` asks a server,
`subprocess:` a program with its own environment; `baseline:KEY` is an entry of the registry (baselines.json).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from data_prep.schema import QA, DataError
from pbs_jax.bench.records import STATUSES, Prediction, load_predictions

if TYPE_CHECKING:
    from pbs_jax.bench.slide_rows import EncodedBags

STAND_IN = (
    "The small sizes have a stand-in backbone, supervised on the same cell labels, and answer from a closed list: "
    "not comparable with the paper's tables."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One question: `options` in the order shown, `text` the user turn with them.

    `images` are encoded pictures: a cell has one, a slide its patches in a fixed order, a blind question none.
    """

    id: str
    perm: tuple[int, ...]
    images: tuple[bytes, ...]
    question: str
    question_type: str
    options: tuple[str, ...]
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """`status` "error" marks an answer that was not had (asked again on resume), not a wrong one.

    `detail` says why, and what the answer cost; it is stored with the answer and never scored.
    """

    text: str
    status: str = "ok"
    detail: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise DataError(f'response status "{self.status}" is not one of {", ".join(STATUSES)}')


class Adapter(Protocol):
    """`name` and `seed` label the rows of tables; `card` is recorded in run.json (settings, revisions, hashes).

    `card["remarks"]`, sentences about the model, stand on top of every report. `at_once`: how many questions one call
    gets at most; each call's answers are on disk before the next.
    """

    name: str
    seed: int
    card: Mapping[str, Any]
    at_once: int

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        """One response per request, in order. Greedy. `mode`: "generate", "letter_likelihood" (closed types)."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """How a model is run. What shapes its answers is recorded in its card.

    `batch` questions go through the model together; `timeout` and `start_timeout` are seconds for an answer and for
    loading; `params` are generation settings of the server; `service` are keywords of `data_prep.llm.open_client`, whose
    record of paid calls lies in `store`.
    """

    device: str = "auto"
    dtype: str = "auto"
    batch: int = 8
    timeout: float = 600.0
    start_timeout: float = 1800.0
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    service: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    store: Path | None = None


# Tokens an answer may have: room for a sentence before the letter, three for an open answer.
ANSWER_TOKENS = {"true_false": 32, "multiple_choice": 32, "fill_blank": 48, "open": 192}
_MANY = 512


class Constant:
    """Says the same to everything."""

    at_once = _MANY

    def __init__(self, text: str):
        self.name, self.seed, self._text = f'constant "{text}"', 0, text
        self.card: Mapping[str, Any] = {"text": text}

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        return [Response(self._text) for _ in requests]


class Replay:
    """Gives the answers of a predictions file again; a question that isn't in it is an error, not an empty answer."""

    at_once = _MANY

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

    at_once = _MANY

    def __init__(self, workdir: Path):
        from pbs_jax.decode.answer import load_answerer  # brings jax
        from pbs_jax.train import handover

        content = handover.read(workdir)
        self._answerer: Any = load_answerer(workdir)
        self._describe(content, f"pbs {content['facts']['size']}")

    def _describe(self, content: Mapping[str, Any], name: str) -> None:
        """`content`: handover.json or export.json, which both say phase, step, facts and config."""
        from configs.base import FULL
        from pbs_jax.weights.files import seen_by_backbone

        seen = content["seen_by_backbone"] if "seen_by_backbone" in content else seen_by_backbone(content["facts"])
        self.name = name
        self.seed = int(content["config"]["seed"])
        # Folders of this machine say nothing to a reader: the hashes beside them name the weights.
        facts = {k: v for k, v in content["facts"].items() if f"{k}_sha256" not in content["facts"]}
        self.card: Mapping[str, Any] = {
            "phase": content["phase"],
            "step": content["step"],
            "facts": facts,
            **({"seen_by_backbone": seen} if seen else {}),
            "remarks": [] if content["facts"]["size"] in FULL else [STAND_IN],
        }

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        questions = [_as_question(request) for request in requests]
        answers = self._answerer.answer(self._visual(requests), questions, [r.options for r in requests], mode)
        return [Response(answer) for answer in answers]

    def _visual(self, requests: Sequence[Request]) -> Any:
        """[n, Q, D], each distinct picture encoded once; None when the requests carry no picture."""
        pictures = [picture for request in requests for picture in request.images]
        if not pictures:
            return None
        if [len(request.images) for request in requests] != [1] * len(requests):
            raise DataError("a batch mixes questions with and without a picture, or shows several at once")
        distinct = list(dict.fromkeys(pictures))
        place = {picture: k for k, picture in enumerate(distinct)}
        return self._answerer.encode(distinct)[[place[picture] for picture in pictures]]


class PbsSlide(Pbs):
    """Our slide model, a finished phase 4: what it is shown are a slide's features, encoded."""

    def __init__(self, workdir: Path):
        from pbs_jax.decode.slide_answer import load_slide_answerer  # brings jax
        from pbs_jax.train import handover

        self._answerer = load_slide_answerer(workdir)
        content = handover.read(workdir)
        kind = " on raw backbone features" if content["facts"]["features"]["kind"] == "backbone" else ""
        self._describe(content, f"pbs {content['facts']['size']}{kind}")

    def open_bags(self, folder: Path, split: str, patches: int | None = None) -> EncodedBags:
        """The split's slides of folder/slide_features, of at most so many patches. Raises DataError when other weights made them."""
        from pbs_jax.bench.slide_rows import EncodedBags

        return EncodedBags(self._answerer.open_bags(folder, split, patches))


class Torch(Pbs):
    """The same model in PyTorch, from the folder that `pbs weights export` wrote and nothing else."""

    def __init__(self, export: Path):
        from pbs_jax.weights.torch_answer import load_export  # brings torch

        self._answerer = load_export(export)
        card = self._answerer.card
        self._describe(card, f"pbs {card['facts']['size']} (PyTorch)")
        if card["phase"] == "slide_qa":
            from pbs_jax.bench.slide_rows import EncodedBags

            self.open_bags = lambda folder, split: EncodedBags(self._answerer.open_bags(folder, split))


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


SPECS = (
    "pbs:WORKDIR, torch:EXPORT, hf:FOLDER_OR_REPOSITORY[@REVISION], openai:MODEL, subprocess:COMMAND, baseline:KEY[@REVISION], "
    "replay:FILE or constant:TEXT"
)


def load_adapter(spec: str, options: Options | None = None) -> Adapter:
    """The model that `spec` names (SPECS lists the forms). Raises DataError for another kind."""
    options = options or Options()
    kind, colon, value = spec.partition(":")
    match kind:
        case "pbs" if value:
            from pbs_jax.train import handover

            return (PbsSlide if handover.read(value)["phase"] == "slide_qa" else Pbs)(Path(value))
        case "torch" if value:
            return Torch(Path(value))
        case "hf" if value:
            from pbs_jax.bench.adapters_hf import HfModel  # brings torch

            return HfModel(value, options)
        case "openai" if value:
            from pbs_jax.bench.adapters_openai import OpenAiModel

            return OpenAiModel(value, options)
        case "subprocess" if value:
            from pbs_jax.bench.adapters_subprocess import ChildModel

            return ChildModel(value, options)
        case "baseline" if value:
            from pbs_jax.bench.baselines import load_baseline

            return load_baseline(value, options)
        case "replay" if value:
            return Replay(Path(value))
        case "constant" if colon:
            return Constant(value)
    raise DataError(f'--model "{spec}" is unknown: use {SPECS}')
