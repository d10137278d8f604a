"""Who writes captions and questions: `template` from typed facts, or a language model asked now or replayed.

All give the same kind of result for the same cases, so everything after them (quality, statistics, shards) does not
care. What a model is told beside the picture (type, keywords, diagnosis, differential) stays in its request: a question
record holds the hash of the request and never its text, so that the context cannot reach an image-only test.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from data_prep import differential, prompt_files, written
from data_prep.abnormality import abnormality_questions
from data_prep.caption import cell_caption
from data_prep.knowledge import knowledge_questions
from data_prep.llm import Client, Estimate, Reply, Request
from data_prep.qa import cell_questions
from data_prep.schema import ARTIFACT, OTHERS, QA, Cell, question_id, stable_hash
from data_prep.slide_datasets import Slide
from data_prep.slide_derived import slide_cells
from data_prep.slide_qa import slide_questions

INVALID = "invalid"  # the status of an answer that a repair try did not mend; others are those of llm.Reply
_REPAIRABLE = ("ok", "truncated", "empty")


@dataclasses.dataclass(frozen=True, slots=True)
class SlideCase:
    """A slide with the captions of its cells, which the summary is written from."""

    slide: Slide
    captions: tuple[str, ...] = ()


Case = Cell | SlideCase


@dataclasses.dataclass(frozen=True, slots=True)
class Result[T]:
    """What became of one case: `value` where status is ok, else `detail` says why there is none."""

    id: str
    status: str
    value: T | None = None
    detail: str = ""
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Provider(Protocol):
    """`captions` and `questions` return one result per case, in order."""

    name: str

    def captions(self, cases: Sequence[Case]) -> list[Result[str]]: ...
    def questions(self, cases: Sequence[Case], captions: Mapping[str, str]) -> list[Result[list[QA]]]: ...


def case_id(case: Case) -> str:
    return case.cell_id if isinstance(case, Cell) else case.slide.slide_id


def slide_caption(slide: Slide, summary: str) -> str:
    """The structured caption of a slide (paper 3.2.1): recorded diagnosis, differential with n and interval, summary."""
    diagnosis = f"Recorded diagnosis: {slide.diagnosis}." if slide.diagnosis else "No diagnosis is recorded."
    counted = differential.counts(slide.counts)
    return f"{diagnosis} Estimated differential: {differential.sentence(counted)}. {summary}"


class Template:
    """Deterministic and offline; its records are labelled so. `knowledge`: background questions per cell (two make a
    tenth of all)."""

    name = "template"

    def __init__(self, seed: int = 0, knowledge: float = 2.0):
        self._seed, self._knowledge = seed, knowledge

    def captions(self, cases: Sequence[Case]) -> list[Result[str]]:
        return [Result(case_id(case), "ok", _template_caption(case), origin={"writer": "template"}) for case in cases]

    def questions(self, cases: Sequence[Case], captions: Mapping[str, str]) -> list[Result[list[QA]]]:
        found: dict[str, list[QA]] = {case_id(case): [] for case in cases}
        cells = [case for case in cases if isinstance(case, Cell)]
        slides = [slide_cells(case.slide, None) for case in cases if isinstance(case, SlideCase)]
        asked = [*cell_questions(cells, seed=self._seed), *slide_questions(slides, seed=self._seed)]
        asked += abnormality_questions(cells, self._seed)
        asked += knowledge_questions(cells, self._knowledge, self._seed) if self._knowledge else []
        for qa in asked:
            found[qa.image_id].append(qa)
        return [Result(id, "ok", questions, origin={"writer": "template"}) for id, questions in found.items()]


def _template_caption(case: Case) -> str:
    if isinstance(case, Cell):
        return cell_caption(case)
    counted = differential.counts(case.slide.counts)
    most = max(counted, key=lambda name: counted[name], default="")
    tiles = case.slide.tiles_kept
    found = f"{sum(counted.values())} white cells on {tiles} usable tiles"
    return slide_caption(case.slide, f"{found}, most of them {most.lower()}s." if most else f"{found}.")


class Model:
    """A language model behind the client: asked now (`openai`) or from its store (`replay`)."""

    def __init__(
        self,
        client: Client,
        model: str,
        *,
        name: str = "openai",
        max_tokens: int = 1500,
        temperature: float | None = None,
        cell_count: int = 8,
        slide_count: int = 6,
        structured: bool = True,
        seed: int = 0,
    ):
        """`cell_count`, `slide_count`: questions asked for each image; `structured`: send the JSON schema as such
        (else as text, for servers without structured output); `temperature` None leaves the server's."""
        self.name = f"{name}:{model}"
        self._client, self._model, self._structured, self._seed = client, model, structured, seed
        self._counts = {"cell_qa": cell_count, "slide_qa": slide_count}
        self._params: dict[str, Any] = {"max_tokens": max_tokens}
        if temperature is not None:
            self._params["temperature"] = temperature

    def captions(self, cases: Sequence[Case]) -> list[Result[str]]:
        out: list[Result[str]] = []
        for case, found in zip(cases, self._write(self.caption_requests(cases), "captions"), strict=True):
            value = found.value.text() if isinstance(found.value, written.CellCaption | written.SlideSummary) else None
            if value is not None and isinstance(case, SlideCase):
                value = slide_caption(case.slide, value)
            out.append(dataclasses.replace(found, value=value))  # type: ignore[arg-type]
        return out

    def questions(self, cases: Sequence[Case], captions: Mapping[str, str]) -> list[Result[list[QA]]]:
        results = self._write(self.question_requests(cases, captions), "questions")
        out: list[Result[list[QA]]] = []
        for case, found in zip(cases, results, strict=True):
            asked = found.value
            ready = isinstance(asked, written.CellQuestions | written.SlideQuestions)
            value = as_questions(case, asked.questions, found.origin) if ready else None  # type: ignore[union-attr]
            out.append(dataclasses.replace(found, value=value))  # type: ignore[arg-type]
        return balance_truth(out, self._seed)

    def estimate(self, cases: Sequence[Case], captions: Mapping[str, str]) -> list[Estimate]:
        """Cost of the captions and of the questions, before anything is sent (captions unknown yet count as empty)."""
        asked = (self.caption_requests(cases), self.question_requests(cases, captions))
        return [self._client.estimate([request for _, _, request in requests]) for requests in asked]

    def caption_requests(self, cases: Iterable[Case]) -> list[tuple[str, str, Request]]:
        """(id, kind, request) of each case."""
        return [self._request(case, "caption", "") for case in cases]

    def question_requests(self, cases: Iterable[Case], captions: Mapping[str, str]) -> list[tuple[str, str, Request]]:
        return [self._request(case, "qa", captions.get(case_id(case), "")) for case in cases]

    def _request(self, case: Case, what: str, caption: str) -> tuple[str, str, Request]:
        kind = f"{'cell' if isinstance(case, Cell) else 'slide'}_{what}"
        prompt = prompt_files.load(kind)
        fields = context(case, kind, caption, self._counts)
        system, user = prompt.render(fields, private_words(case))
        if not self._structured:
            system += f"\nAnswer with JSON only, of this schema:\n{json.dumps(written.schema(kind))}"
        images = (prompt_files.clean_image(case.image),) if isinstance(case, Cell) else ()
        schema = written.schema(kind) if self._structured else None
        request = Request(self._model, user, system, images, self._params, (), schema, prompt.version)
        return case_id(case), kind, request

    def _write(self, asked: Sequence[tuple[str, str, Request]], desc: str) -> list[Result[written.Written]]:
        """Answers in their form, with one repair try for those that are not."""
        replies = self._client.ask([request for _, _, request in asked], desc)
        results: list[Result[written.Written] | None] = []
        repairs: list[tuple[int, Request]] = []
        for k, ((id, kind, request), reply) in enumerate(zip(asked, replies, strict=True)):
            found = _read(id, kind, reply)
            if found.status == INVALID and reply.status in _REPAIRABLE:
                repairs.append((k, _repair(request, reply, found.detail)))
            results.append(found)
        mended = self._client.ask([request for _, request in repairs], f"{desc}, repaired") if repairs else []
        for (k, _), reply in zip(repairs, mended, strict=True):
            results[k] = _read(asked[k][0], asked[k][1], reply)
        return [result for result in results if result is not None]


def context(case: Case, kind: str, caption: str, counts: Mapping[str, int]) -> dict[str, str]:
    """The fields of a prompt: all that a model is told beside the picture."""
    if isinstance(case, Cell):
        fields = {"cell_type": case.label or "not recorded", "comments": prompt_files.keywords(case.comments)}
        if kind == "cell_caption":
            return fields
        none = case.label in (OTHERS, ARTIFACT)
        rule = "Do not ask it: this cell is none of the five types." if none else "Name it only in answers and options."
        return fields | {"caption": caption or "none", "n_questions": str(counts[kind]), "subtyping": rule}
    slide = case.slide
    fields = {
        "diagnosis": slide.diagnosis or "none",
        "differential": differential.sentence(differential.counts(slide.counts)),
    }
    if kind == "slide_caption":
        lines = "\n".join(f"- {text}" for text in case.captions)
        return fields | {"captions": lines or "- none", "n_captions": str(len(case.captions))}
    rule = "" if slide.diagnosis else "Ask no diagnosis question: none is recorded."
    return fields | {"caption": caption or "none", "n_questions": str(counts[kind]), "diagnosis_rule": rule}


def private_words(case: Case) -> set[str]:
    """Ids and their parts that must not stand in a prompt (class folders of an id may: the type is told anyway)."""
    if isinstance(case, Cell):
        ids = [case.cell_id, case.patch_id, case.slide_id, case.patient_id]
    else:
        ids = [case.slide.slide_id, case.slide.patient_id, case.slide.site, case.slide.scanner]
    return {word for id in ids for word in (id, id.rpartition("/")[2], id.rpartition(":")[2]) if len(word) >= 3}


def _repair(request: Request, reply: Reply, problem: str) -> Request:
    _, user = prompt_files.load("repair").render({"problem": problem})
    return dataclasses.replace(request, turns=(("assistant", reply.text or "(nothing)"), ("user", user)))


def _read(id: str, kind: str, reply: Reply) -> Result[written.Written]:
    origin = {"model": reply.model, "request": reply.key}
    if reply.status not in _REPAIRABLE:
        return Result(id, reply.status, detail=reply.detail, origin=origin)
    if reply.status != "ok":
        return Result(id, INVALID, detail=f"the answer was {reply.status}", origin=origin)
    found = written.parse(kind, reply.text)
    if isinstance(found, str):
        return Result(id, INVALID, detail=found, origin=origin)
    return Result(id, "ok", found, origin=origin)


def as_questions(case: Case, asked: Sequence[written.Question], origin: Mapping[str, Any]) -> list[QA]:
    """Question records of one case. True/false ones come true, with their opposite for `balance_truth`.

    Of the context nothing goes in: only who wrote it, the request's key, and the names of the facts it rests on.
    """
    image_id = case_id(case)
    if isinstance(case, Cell):
        level, split, domain = "cell", case.split, case.domain
    else:
        level, split, domain = "slide", case.slide.split, "id"
    out: dict[str, QA] = {}
    for item in asked:
        options = tuple(sorted(item.options))
        mark = "(True/False) " if item.question_type == "true_false" else ""
        question = mark + item.question.removeprefix(mark)
        id = question_id(f"{level}_qa", image_id, item.question_type, question, *options)
        provenance = {"writer": "model", **origin, "evidence": item.evidence}
        provenance |= {"opposite": mark + item.opposite.removeprefix(mark)} if item.opposite else {}
        out[id] = QA(
            id, image_id, level, domain, split, item.task, item.question_type, question, item.answer, options,
            provenance=provenance,
        )  # fmt: skip
    return list(out.values())


def balance_truth(results: Sequence[Result[list[QA]]], seed: int) -> list[Result[list[QA]]]:
    """Turns every second true statement of a split, in hash order, into its false opposite."""
    statements = [qa for result in results for qa in result.value or () if "opposite" in qa.provenance]
    ranked = sorted(statements, key=lambda qa: (qa.split, stable_hash("truth", seed, qa.id)))
    false = {qa.id for k, qa in enumerate(ranked) if k % 2}
    return [
        dataclasses.replace(result, value=[_settled(qa, qa.id in false) for qa in result.value])
        if result.value is not None
        else result
        for result in results
    ]


def _settled(qa: QA, false: bool) -> QA:
    provenance = {name: value for name, value in qa.provenance.items() if name != "opposite"}
    if not false:
        return dataclasses.replace(qa, provenance=provenance)
    question = str(qa.provenance["opposite"])
    id = question_id(f"{qa.level}_qa", qa.image_id, qa.question_type, question)
    return dataclasses.replace(qa, id=id, question=question, answer="False", provenance=provenance)
