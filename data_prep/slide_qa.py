"""Template questions about slides: differential, morphology of most cells, pattern; balanced as those about cells.

All four question types. The truth is what was pasted into a mosaic (drawn into a synthetic smear), or, for a lab's own
slides, what the pipeline counted; the provenance says which.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from data_prep import balance, slide_qa_bank
from data_prep.schema import QA, check_qa, stable_hash
from data_prep.slide_caption import slide_caption
from data_prep.slide_qa_bank import BLANKS, CHOICES, DIAGNOSIS, DOMINANT, PATTERN, STATED, WORDINGS, SlideCells

LEADING = (DOMINANT, PATTERN, DIAGNOSIS)  # facts asked of every slide that shows them clearly


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Questions asked for per slide (balance comes first: scarce values give fewer)."""

    fill_blank: int  # beside LEADING
    true_false: float
    leading_choice: float
    other_choice: float


@dataclasses.dataclass(frozen=True, slots=True)
class SlideQAConfig:
    train: Rates = Rates(fill_blank=8, true_false=12.0, leading_choice=4.0, other_choice=6.0)
    held_out: Rates = Rates(fill_blank=8, true_false=8.0, leading_choice=2.0, other_choice=4.0)
    choices: int = 4
    weights: Mapping[str, float] = dataclasses.field(default_factory=lambda: {DOMINANT: 3.0, PATTERN: 2.0})


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    cells: SlideCells
    facts: Mapping[str, str]


def slide_questions(
    slides: Sequence[SlideCells], *, seed: int = 0, config: SlideQAConfig = SlideQAConfig()
) -> list[QA]:
    """All questions of the slides, grouped by slide in the given order; balance holds within each (domain, split).

    Slides with too few white cells get none.
    """
    groups: dict[tuple[str, str], list[_Asked]] = {}
    for slide in slides:
        if facts := slide_qa_bank.facts(slide):
            groups.setdefault((slide.domain, slide.split), []).append(_Asked(slide, facts))
    questions: list[QA] = []
    for (_, split), group in groups.items():
        rates = config.train if split == "train" else config.held_out
        leading = [fact for fact in CHOICES if fact in LEADING]
        others = [fact for fact in CHOICES if fact not in LEADING]
        questions += itertools.chain(
            _fill_blank(group, rates.fill_blank, seed),
            _describe(group),
            _true_false(group, rates.true_false, config.weights, seed),
            _choose(group, leading, rates.leading_choice, config.choices, seed),
            _choose(group, others, rates.other_choice, config.choices, seed),
        )
    rank = {slide.slide_id: k for k, slide in enumerate(slides)}
    questions.sort(key=lambda qa: (rank[qa.image_id], qa.id))
    for qa in questions:
        check_qa(qa, "slide template questions")
    return questions


def _record(
    asked: _Asked, kind: str, task: str, question: str, answer: str, names: Iterable[str], options: Iterable[str] = ()
) -> QA:
    slide, facts = asked.cells, [f"{name}={asked.facts[name]}" for name in names]
    return balance.template_question(
        "slide_qa", slide, slide.slide_id, kind, task, question, answer, options, "slide",
        facts=facts, source=slide.source,
    )  # fmt: skip


def _fill_blank(group: Sequence[_Asked], beside: int, seed: int) -> Iterator[QA]:
    """The dominant type, the pattern, and so many other facts, chosen by hash among those that differ between slides."""
    values = {fact: {asked.facts[fact] for asked in group if fact in asked.facts} for fact in BLANKS}
    asked_about = [fact for fact in BLANKS if len(values[fact]) > 1]
    for asked in group:
        present = [fact for fact in asked_about if fact in asked.facts]
        leading = [fact for fact in present if fact in LEADING]
        ranks = {fact: stable_hash("asked", seed, asked.cells.slide_id, fact) for fact in present}
        others = sorted(set(present) - set(leading), key=ranks.__getitem__)
        for fact in [*leading, *others[:beside]]:
            answer = slide_qa_bank.answer(fact, asked.facts[fact])
            yield _record(asked, "fill_blank", WORDINGS[fact].task, WORDINGS[fact].blanks[0], answer, [fact])


def _describe(group: Sequence[_Asked]) -> Iterator[QA]:
    for asked in group:
        counted = [fact for fact in asked.facts if fact.startswith("count ") or fact == PATTERN]
        text = slide_caption(asked.cells, variant=0)
        yield _record(asked, "open", "cell_differential", slide_qa_bank.DESCRIBE, text, counted)


def _true_false(group: Sequence[_Asked], per_slide: float, weights: Mapping[str, float], seed: int) -> Iterator[QA]:
    pools = {fact: _pools(group, (fact,)) for fact in STATED}
    total = per_slide * len(group)
    for fact, value, asked in balance.statements(pools, total, lambda fact: weights.get(fact, 1.0), _load(seed)):
        question = f"(True/False) {slide_qa_bank.statement(fact, value)}"
        yield _record(asked, "true_false", WORDINGS[fact].task, question, str(asked.facts[fact] == value), [fact])


def _choose(group: Sequence[_Asked], topics: Sequence[str], per_slide: float, choices: int, seed: int) -> Iterator[QA]:
    pools: dict[balance.Values, balance.Pools[_Asked]] = {(fact,): _pools(group, (fact,)) for fact in topics}
    picked = balance.choices(pools, per_slide * len(group), choices, slide_qa_bank.option, _load(seed))
    for (fact,), texts, gold, asked in picked:
        words = WORDINGS[fact]
        yield _record(asked, "multiple_choice", words.task, words.choices[0], texts[gold], [fact], texts.values())


def _load(seed: int) -> balance.Load[_Asked]:
    return balance.Load(seed, lambda asked: asked.cells.slide_id)


def _pools(group: Sequence[_Asked], names: Sequence[str]) -> balance.Pools[_Asked]:
    return balance.by_values(group, lambda asked: [asked.facts.get(name) for name in names])
