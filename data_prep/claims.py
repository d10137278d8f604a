"""What a question with its answer claims about the facts of its picture, and whether the recorded facts deny it.

Questions of the template bank are read exactly; free text by patterns, which miss much and must not invent: a claim is
read only where its words allow one meaning, and negated or general ("a normal cell of this type") text claims nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from rapidfuzz import fuzz

from data_prep import differential, qa_bank, stats
from data_prep.schema import QA, WHITE_CELL_CLASSES, Cell
from data_prep.slide_datasets import Slide

TOLERANCE = 0.02  # beyond the Wilson interval, for percentages of a differential


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is recorded about one image; empty where nothing is. `counts`: white cells of a slide by class."""

    label: str = ""
    attributes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    diagnosis: str = ""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def value(self, fact: str) -> str:
        return self.label if fact == qa_bank.LABEL else self.attributes.get(fact, "")


def cell_facts(cell: Cell) -> Facts:
    return Facts(cell.label, cell.attributes)


def slide_facts(slide: Slide) -> Facts:
    return Facts(diagnosis=slide.diagnosis, counts=slide.counts)


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """`fact` has one of `values`; `words` is where the text says so."""

    fact: str
    values: frozenset[str]
    words: str

    def denied(self, facts: Facts) -> bool:
        recorded = facts.value(self.fact)
        return bool(recorded) and recorded not in self.values

    def holds(self, facts: Facts) -> bool:
        return facts.value(self.fact) in self.values


_STATEMENTS = {qa_bank.statement(f, v): (f, v) for f in qa_bank.FACTS for v in qa_bank.values(f)}
_BLANKS = {question: fact for fact, wording in qa_bank.WORDINGS.items() for question in wording.blanks}
_CHOICES: dict[str, tuple[str, ...]] = {
    question: (fact,) for fact, wording in qa_bank.WORDINGS.items() for question in wording.choices
} | {question: facts for facts, question in qa_bank.PAIRS.items()}

_TYPES = "|".join(name.lower() for name in WHITE_CELL_CLASSES)
_SUBJECT = re.compile(
    rf"\b(?:this|the)\s+(?:\w+\s+)?({_TYPES})(?:\s+(?:shown|depicted|pictured|in (?:the|this) (?:image|picture|crop)))\b|"
    rf"\bthis\s+(?:\w+\s+)?({_TYPES})\b|"
    rf"\bcell(?: shown| depicted)?(?: in (?:the|this) image)? is an? (?:\w+ )?({_TYPES})\b|"
    rf"^an? (?:\w+ )?({_TYPES})(?=[ .,]|$)",
    re.IGNORECASE,
)
_ASKS_TYPE = re.compile(
    r"\b(?:type|kind|class|subtype|name|identity)\b.*\b(?:cell|leukocyte)\b|\bidentify\b", re.IGNORECASE
)
_COMPARED = re.compile(r"\b(?:than|unlike|from|other|like|resembl\w+|mimic\w*)\b[^.;,]*$", re.IGNORECASE)
_OPEN_ENDED = re.compile(r"^(?:is|are|do|does|has|have|can)\b|\bor\b|\bwhether\b", re.IGNORECASE)
_GENERAL = re.compile(
    r"\b(?:typical\w*|normal\w*|usually|generally|expected|commonly|other|unlike|compared|than)\b", re.IGNORECASE
)
_NEGATED = re.compile(
    r"\b(?:no|not|non|without|absen\w+|lack\w*|devoid|free of|rather than|neither|nor|isn.t)\b[^.;,]*$", re.IGNORECASE
)
_PATTERNS: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    # pattern, fact, values it claims, values it claims when negated (none: claims nothing then)
    (r"\bbi-?lob(?:ed|ular)\b", "nucleus_shape", ("segmented-bilobed",), ()),
    (r"\b(?:multi-?lob(?:ed|ulated)|hyper-?segment\w+)\b", "nucleus_shape", ("segmented-multilobed",), ()),
    (r"\b(?:kidney|bean)[- ]shaped\b|\bindented nucle", "nucleus_shape", ("unsegmented-indented", "irregular"), ()),
    (r"\bband[- ]shaped\b|\bband nucle", "nucleus_shape", ("unsegmented-band",), ()),
    (
        r"\bround nucle\w+|\bnucleus is round\b",
        "nucleus_shape",
        ("unsegmented-round", "unsegmented-indented", "irregular"),
        (),
    ),
    (r"\bvacuol\w+", "cytoplasm_vacuole", ("yes",), ("no",)),
    (r"\bagranular\b", "granularity", ("no",), ()),
    (r"\b(?:granular cytoplasm|cytoplasmic granules|granules)\b", "granularity", ("yes",), ("no",)),
    (r"\b(?:dense|densely \w+|condensed|clumped) chromatin\b", "chromatin_density", ("densely",), ()),
    (r"\b(?:loose|open|fine) chromatin\b", "chromatin_density", ("loosely",), ()),
    (r"\bhigh (?:n:c|nuclear[- ](?:to[- ])?cytoplasmic) ratio\b", "nuclear_cytoplasmic_ratio", ("high",), ()),
    (r"\blow (?:n:c|nuclear[- ](?:to[- ])?cytoplasmic) ratio\b", "nuclear_cytoplasmic_ratio", ("low",), ()),
)
_COMPILED = [(re.compile(pattern, re.IGNORECASE), fact, says, denies) for pattern, fact, says, denies in _PATTERNS]


@functools.lru_cache(maxsize=50_000)
def text_claims(text: str) -> list[Claim]:
    """Claims of free text. A type is claimed only of the cell pictured, never by a mere mention."""
    claims = []
    for found in _SUBJECT.finditer(text):
        named = next(group for group in found.groups() if group).capitalize()
        before = text[: found.start()]
        if not _NEGATED.search(before) and not _COMPARED.search(before):
            claims.append(Claim(qa_bank.LABEL, frozenset({named}), found.group()))
    if _GENERAL.search(text):
        return claims
    for pattern, fact, values, negated in _COMPILED:
        for found in pattern.finditer(text):
            meant = negated if _NEGATED.search(text[: found.start()]) else values
            if meant:
                claims.append(Claim(fact, frozenset(meant), found.group()))
    return claims


def contradiction(qa: QA, facts: Facts) -> str | None:
    """What of the item the facts deny, as a phrase; None where they deny nothing."""
    if qa.level == "slide":
        return _slide_contradiction(qa, facts)
    body = qa.question.removeprefix("(True/False) ")
    if qa.question_type == "true_false":
        return _truth_contradiction(body, qa.answer == "True", facts)
    if body in _BLANKS:
        return _bank_answer(_BLANKS[body], qa.answer, facts)
    if body in _CHOICES:
        return _bank_choice(qa, _CHOICES[body], facts)
    # What the question takes for granted; one that offers or asks whether takes nothing.
    claims = [] if _OPEN_ENDED.search(body) else list(text_claims(body))
    if qa.task != "knowledge" and not _GENERAL.search(body):
        claims += _answer_claims(body, qa.answer)
    for claim in claims:
        if claim.denied(facts):
            return _said(claim, facts)
    return None


def _said(claim: Claim, facts: Facts) -> str:
    return f'"{claim.words}" against the recorded {claim.fact} "{facts.value(claim.fact)}"'


def _truth_contradiction(body: str, answer: bool, facts: Facts) -> str | None:
    if body in _STATEMENTS:
        fact, value = _STATEMENTS[body]
        claims = [Claim(fact, frozenset({value}), body)]
    else:
        claims = text_claims(body)
    # "This monocyte has ..." takes the type for granted, whether the rest is true or not.
    granted = [
        claim for claim in claims if claim.fact == qa_bank.LABEL and " is a" not in claim.words and body != claim.words
    ]
    denied = next((claim for claim in (claims if answer else granted) if claim.denied(facts)), None)
    if answer or denied:
        return _said(denied, facts) if denied else None
    # A statement of several parts may be false for a part that is not read here.
    claims = [claim for claim in claims if claim not in granted]
    single = len(claims) == 1 and (body in _STATEMENTS or len(body.split()) <= 10)
    if single and claims[0].holds(facts):
        return f'"{claims[0].words}" called false is what is recorded'
    return None


def _bank_answer(fact: str, answer: str, facts: Facts) -> str | None:
    recorded, claimed = facts.value(fact), qa_bank.value_of(fact, answer)
    if recorded and claimed != recorded:
        return f'answer "{answer}" against the recorded {fact} "{recorded}"'
    return None


def _bank_choice(qa: QA, names: tuple[str, ...], facts: Facts) -> str | None:
    recorded = tuple(facts.value(fact) for fact in names)
    if not all(recorded):
        return None
    right = " and ".join(map(qa_bank.option, names, recorded))
    if qa.answer != right:
        return f'option "{qa.answer}" against the recorded {" and ".join(names)}: "{right}"'
    return None


def _answer_claims(question: str, answer: str) -> Iterator[Claim]:
    stated = re.sub(r"^(?:an?|the) ", "", answer.strip().rstrip(".").lower()).removesuffix(" cell")
    if stated.rstrip("s") in _TYPES.split("|") and _ASKS_TYPE.search(question):
        yield Claim(qa_bank.LABEL, frozenset({stated.rstrip("s").capitalize()}), answer)
    topic = next((word for word in ("nucleus", "chromatin") if word[:5] in question.lower()), "")
    short = len(answer.split()) <= 3 and topic and topic[:5] not in answer.lower()
    yield from text_claims(f"{answer} {topic}" if short else answer)


# --- slides

_NAMED_TYPE = re.compile(rf"\b({_TYPES})s?\b", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:[–-]\s*(\d+(?:\.\d+)?)\s*)?%")
_MOST, _LEAST = (
    re.compile(rf"\b{word}\b[^.?]*\b(?:abundant|frequent|common|numerous)\b") for word in ("most", "least")
)
_ASKS_DIAGNOSIS = re.compile(
    r"\b(?:what is|what|which)(?: (?:the|most|likely|underlying|best|hematolog\w+|probable))* "
    r"(?:diagnosis|condition|disease|disorder)\b",
    re.IGNORECASE,
)


def _slide_contradiction(qa: QA, facts: Facts) -> str | None:
    body = qa.question.removeprefix("(True/False) ")
    asserted = body if qa.question_type == "true_false" else f"{body} {qa.answer}"
    total = sum(facts.counts.values())
    stated = total >= differential.FEWEST and not (qa.question_type == "true_false" and qa.answer == "False")
    if stated and (wrong := _differential(body, asserted, qa, facts, total)):
        return wrong
    if (
        facts.diagnosis
        and qa.task == "diagnosis"
        and qa.question_type in ("fill_blank", "multiple_choice")
        and _ASKS_DIAGNOSIS.search(body)
        and fuzz.partial_ratio(qa.answer.lower(), facts.diagnosis.lower()) < 85
    ):
        return f'answer "{qa.answer}" against the recorded diagnosis "{facts.diagnosis}"'
    return None


def _differential(body: str, asserted: str, qa: QA, facts: Facts, total: int) -> str | None:
    counts = {name.lower(): facts.counts.get(name, 0) for name in WHITE_CELL_CLASSES}
    source = body if qa.question_type == "true_false" else qa.answer
    named = [name.lower() for name in _NAMED_TYPE.findall(source)]
    if qa.task == "cell_differential" and len(named) == 1 and "second" not in body.lower():
        offered = [name.lower() for option in qa.options for name in _NAMED_TYPE.findall(option)] or list(counts)
        for pattern, pick, word in ((_MOST, max, "most"), (_LEAST, min, "least")):
            if pattern.search(body.lower()) and counts[named[0]] != pick(counts[name] for name in offered):
                return f'"{named[0]}" as {word} abundant against the counts {dict(facts.counts)}'
    types = [name.lower() for name in _NAMED_TYPE.findall(body)]
    share = _PERCENT.search(asserted)
    if share and len(types) == 1 and not re.search(r"<|>|more than|less than|over|below|at least", asserted):
        low, high = stats.wilson(counts[types[0]], total)
        stated = [float(number) / 100 for number in share.groups() if number]
        if max(stated) < low - TOLERANCE or min(stated) > high + TOLERANCE:
            return f'"{share.group()}" {types[0]} against {counts[types[0]]} of {total}'
    return None
