"""Template questions about cells, balanced so that their text alone cannot win (issue 2; paper 3.2 for the four types).

Cells are chosen by the rules of `balance`; nothing in the wording depends on the answer. Where classes are very uneven
(BCCD) balance costs coverage: there are then few true/false and multiple-choice questions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from data_prep import balance, qa_bank
from data_prep.caption import cell_caption
from data_prep.qa_bank import FACTS, LABEL, PAIRS, WORDINGS
from data_prep.schema import ARTIFACT, OTHERS, QA, Cell, check_qa, stable_hash


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Questions asked for per cell (balance comes first: scarce values give fewer)."""

    fill_blank: int  # attributes asked beside the type
    true_false: float
    subtype_choice: float
    attribute_choice: float


@dataclasses.dataclass(frozen=True, slots=True)
class QAConfig:
    train: Rates = Rates(fill_blank=4, true_false=6.0, subtype_choice=3.0, attribute_choice=3.0)
    held_out: Rates = Rates(fill_blank=11, true_false=3.0, subtype_choice=1.0, attribute_choice=1.5)
    choices: int = 4  # options of a multiple-choice question, fewer only where fewer values occur
    type_weight: float = 2.0  # how many times as often a statement about the type is asked as one about an attribute


def cell_questions(cells: Sequence[Cell], *, seed: int = 0, config: QAConfig = QAConfig()) -> list[QA]:
    """All questions of the cells, grouped by cell in the given order; balance holds within each (domain, split).

    `Others` and `Artifact` get no questions (paper 9.4), cells without attributes only questions about their type.
    Raises DataError for a value outside the schema.
    """
    questions: list[QA] = []
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.label not in (OTHERS, ARTIFACT):
            groups.setdefault((cell.domain, cell.split), []).append(cell)
    for (_, split), group in groups.items():
        rates = config.train if split == "train" else config.held_out
        questions += itertools.chain(
            _fill_blank(group, rates.fill_blank, seed),
            _describe(group),
            _true_false(group, rates.true_false, config.type_weight, seed),
            _subtype_choice(group, rates.subtype_choice, config.choices, seed),
            _attribute_choice(group, rates.attribute_choice, config.choices, seed),
        )
    rank = {cell.cell_id: k for k, cell in enumerate(cells)}
    questions.sort(key=lambda qa: (rank[qa.image_id], qa.id))
    for qa in questions:
        check_qa(qa, "template questions")
    return questions


def _record(
    cell: Cell,
    kind: str,
    task: str,
    question: str,
    answer: str,
    facts: Mapping[str, str | None],
    options: Iterable[str] = (),
) -> QA:
    """`facts` are name -> recorded value."""
    written = [f"{name}={value}" for name, value in facts.items()]
    return balance.template_question(
        "cell_qa", cell, cell.cell_id, kind, task, question, answer, options, facts=written
    )


def _fill_blank(cells: Sequence[Cell], attributes: int, seed: int) -> Iterator[QA]:
    """The type, and so many of a cell's attributes, chosen by hash."""
    for cell in cells:
        ranked = sorted(FACTS, key=lambda fact: (fact != LABEL, stable_hash("asked", seed, cell.cell_id, fact)))
        recorded = [(fact, value) for fact in ranked if (value := qa_bank.recorded(cell, fact)) is not None]
        for fact, value in recorded[: 1 + attributes]:
            blanks = WORDINGS[fact].blanks
            question = blanks[stable_hash("blank", seed, cell.cell_id, fact) % len(blanks)]
            yield _record(cell, "fill_blank", WORDINGS[fact].task, question, qa_bank.answer(fact, value), {fact: value})


def _describe(cells: Sequence[Cell]) -> Iterator[QA]:
    for cell in cells:
        if cell.attributes:
            facts = {fact: qa_bank.recorded(cell, fact) for fact in FACTS}
            yield _record(cell, "open", "morphology", qa_bank.DESCRIBE, cell_caption(cell, variant=0), facts)


def _true_false(cells: Sequence[Cell], per_cell: float, type_weight: float, seed: int) -> Iterator[QA]:
    pools = {fact: _pools(cells, (fact,)) for fact in FACTS}
    weight = {LABEL: type_weight}
    total = per_cell * len(cells)
    for fact, value, cell in balance.statements(pools, total, lambda fact: weight.get(fact, 1.0), _load(seed)):
        recorded = qa_bank.recorded(cell, fact)
        question = f"(True/False) {qa_bank.statement(fact, value)}"
        facts = {fact: recorded}
        yield _record(cell, "true_false", WORDINGS[fact].task, question, str(recorded == value), facts)


def _subtype_choice(cells: Sequence[Cell], per_cell: float, choices: int, seed: int) -> Iterator[QA]:
    return _choose(cells, {(LABEL,): WORDINGS[LABEL].choices}, per_cell, choices, seed)


def _attribute_choice(cells: Sequence[Cell], per_cell: float, choices: int, seed: int) -> Iterator[QA]:
    single = {(fact,): WORDINGS[fact].choices for fact in FACTS if WORDINGS[fact].choices and fact != LABEL}
    return _choose(cells, single | {pair: (question,) for pair, question in PAIRS.items()}, per_cell, choices, seed)


def _choose(
    cells: Sequence[Cell], topics: Mapping[tuple[str, ...], tuple[str, ...]], per_cell: float, choices: int, seed: int
) -> Iterator[QA]:
    """Multiple choice about `topics` (facts -> wordings)."""
    pools = {facts: _pools(cells, facts) for facts in topics}
    load = _load(seed)
    for facts, texts, gold, cell in balance.choices(pools, per_cell * len(cells), choices, _option_text, load):
        turn = stable_hash("choice", seed, cell.cell_id) + load.counts[cell.cell_id, "+".join(facts)]
        question = topics[facts][turn % len(topics[facts])]
        recorded = dict(zip(facts, gold, strict=True))
        task = WORDINGS[facts[0]].task
        yield _record(cell, "multiple_choice", task, question, texts[gold], recorded, texts.values())


def _option_text(facts: Sequence[str], values: Sequence[str]) -> str:
    return " and ".join(map(qa_bank.option, facts, values))


def _load(seed: int) -> balance.Load[Cell]:
    return balance.Load(seed, lambda cell: cell.cell_id)


def _pools(cells: Sequence[Cell], facts: tuple[str, ...]) -> balance.Pools[Cell]:
    return balance.by_values(cells, lambda cell: [qa_bank.recorded(cell, fact) for fact in facts])
