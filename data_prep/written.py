"""The form of what a language model writes, checked by pydantic: captions, summaries, questions.

The JSON schemas go to the server (strict: every field required, none besides), and the same classes check the answer,
because not every server keeps to a schema.
"""

from __future__ import annotations

import functools
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_prep.quality import CHOICES, MAX_BLANK_WORDS, MAX_OPEN_WORDS, MAX_SENTENCES

Phrase = Annotated[str, Field(min_length=2, max_length=160)]
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")
MAX_CAPTION_WORDS, MAX_SUMMARY_WORDS = 60, 110


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", str_strip_whitespace=True)


class CellCaption(_Strict):
    """Conditions come as bare names: `text` puts them into non-committal words, so no model's phrase can commit."""

    appearance: str = Field(min_length=10, max_length=600)
    normal: bool
    abnormalities: list[Phrase]
    conditions: list[Phrase]

    @model_validator(mode="after")
    def _consistent(self) -> CellCaption:
        if self.normal != (not self.abnormalities):
            raise ValueError("normal must be true exactly when abnormalities is empty")
        if self.conditions and not self.abnormalities:
            raise ValueError("conditions need an abnormality")
        if len(self.conditions) > 2:
            raise ValueError("at most two conditions")
        if len(self.appearance.split()) > MAX_CAPTION_WORDS:
            raise ValueError(f"appearance has more than {MAX_CAPTION_WORDS} words")
        return self

    def text(self) -> str:
        parts = [self.appearance.rstrip(".") + "."]
        if self.abnormalities:
            parts.append(f"Unusual: {', '.join(phrase.rstrip('.') for phrase in self.abnormalities)}.")
        if self.conditions:
            parts.append(f"Such changes may be seen in {' or '.join(p.rstrip('.') for p in self.conditions)}.")
        return " ".join(parts)


class SlideSummary(_Strict):
    summary: str = Field(min_length=10, max_length=1200)

    @model_validator(mode="after")
    def _short(self) -> SlideSummary:
        if len(self.summary.split()) > MAX_SUMMARY_WORDS:
            raise ValueError(f"summary has more than {MAX_SUMMARY_WORDS} words")
        return self

    def text(self) -> str:
        return self.summary


class Question(_Strict):
    question_type: Literal["true_false", "multiple_choice", "fill_blank", "open"]
    task: str
    question: str = Field(min_length=8, max_length=300)
    answer: str = Field(min_length=1, max_length=400)
    options: list[str]
    opposite: str
    evidence: list[str] = Field(min_length=1)

    @model_validator(mode="after")
    def _form(self) -> Question:
        words = len(self.answer.split())
        if self.question_type == "true_false":
            if self.answer != "True" or len(self.opposite) < 8 or self.opposite == self.question:
                raise ValueError('true_false needs answer "True" and an opposite statement')
        elif self.opposite:
            raise ValueError("opposite is for true_false only")
        if self.question_type == "multiple_choice":
            folded = [option.strip().casefold() for option in self.options]
            if not CHOICES[0] <= len(folded) <= CHOICES[1] or len(set(folded)) < len(folded):
                raise ValueError(f"multiple_choice needs {CHOICES[0]} to {CHOICES[1]} different options")
            if self.answer not in self.options:
                raise ValueError("the answer must be one of the options, word for word")
        elif self.options:
            raise ValueError("options are for multiple_choice only")
        if self.question_type == "fill_blank" and words >= MAX_BLANK_WORDS:
            raise ValueError(f"a fill_blank answer has fewer than {MAX_BLANK_WORDS} words")
        sentences = len(re.findall(r"[.!?](?:\s|$)", self.answer))
        if self.question_type == "open" and (words > MAX_OPEN_WORDS or sentences > MAX_SENTENCES):
            raise ValueError(f"an open answer has at most {MAX_SENTENCES} short sentences")
        return self


class CellQuestion(Question):
    task: Literal["morphology", "abnormality", "cell_subtyping", "knowledge"]


class SlideQuestion(Question):
    task: Literal["morphology", "abnormality", "cell_differential", "diagnosis", "knowledge"]


class CellQuestions(_Strict):
    questions: list[CellQuestion] = Field(min_length=1)


class SlideQuestions(_Strict):
    questions: list[SlideQuestion] = Field(min_length=1)


Written = CellCaption | SlideSummary | CellQuestions | SlideQuestions
FORMS: dict[str, type[CellCaption] | type[SlideSummary] | type[CellQuestions] | type[SlideQuestions]] = {
    "cell_caption": CellCaption,
    "slide_caption": SlideSummary,
    "cell_qa": CellQuestions,
    "slide_qa": SlideQuestions,
}


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    """JSON schema of a kind in the servers' strict subset: bounds stay with the check here."""
    return _subset(FORMS[kind].model_json_schema())


_UNSUPPORTED = ("minLength", "maxLength", "minItems", "maxItems", "default")


def _subset(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _subset(part) for name, part in value.items() if name not in _UNSUPPORTED}
    return [_subset(part) for part in value] if isinstance(value, list) else value


def parse(kind: str, text: str) -> Written | str:
    """What was written, or in one sentence what is wrong with it. A code fence around the JSON is let pass."""
    try:
        return FORMS[kind].model_validate_json(_FENCE.sub("", text.strip()))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the answer"
        return f"{place}: {first['msg']}"
