"""Template questions about cells, balanced so that their text alone cannot win (issue 2; paper 3.2 for the four types).

Images are chosen for statements and for (option set, gold), never the other way round: each statement is true for half
of its images, each option of a set is gold equally often, and nothing in the wording depends on the answer. Where
classes are very uneven (BCCD) balance costs coverage: there are then few true/false and multiple-choice questions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from data_prep import qa_bank
from data_prep.caption import cell_caption
from data_prep.qa_bank import FACTS, LABEL, PAIRS, WORDINGS
from data_prep.schema import ARTIFACT, OTHERS, QA, Cell, check_qa, question_id, stable_hash


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


class _Load:
    """How often each cell was chosen, in all and per subject, so that choices spread evenly; ties break by hash."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[tuple[str, ...]] = Counter()

    def take(self, pool: Sequence[Cell], count: int, subject: str, salt: str) -> list[Cell]:
        """The `count` cells of the pool least often chosen for the subject, then least often in all."""

        def key(cell: Cell) -> tuple[int, int, int]:
            id = cell.cell_id
            return self.counts[id, subject], self.counts[id,], stable_hash(self.seed, subject, salt, id)

        chosen = sorted(pool, key=key)[:count]
        for cell in chosen:
            self.counts[cell.cell_id, subject] += 1
            self.counts[cell.cell_id,] += 1
        return chosen


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
    """`facts` are name -> recorded value; the id depends on the cell and what is asked, not on the answer."""
    shown = tuple(sorted(options))
    return QA(
        id=question_id("cell_qa", cell.cell_id, kind, question, *shown),
        image_id=cell.cell_id,
        level="cell",
        domain=cell.domain,
        split=cell.split,
        task=task,
        question_type=kind,
        question=question,
        answer=answer,
        options=shown,
        provenance={"writer": "template", "facts": [f"{name}={value}" for name, value in facts.items()]},
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
    """Half true, half false for every statement; the false ones spread evenly over the fact's other values."""
    pools = {fact: _by_option(cells, (fact,)) for fact in FACTS}
    statements = [(fact, value) for fact, pool in pools.items() if len(pool) > 1 for value in pool]
    weights = {s: type_weight if s[0] == LABEL else 1.0 for s in statements}
    load = _Load(seed)
    for fact, (value,) in sorted(statements, key=lambda s: (len(pools[s[0]][s[1]]), s)):
        true = pools[fact][value,]
        others = [pool for other, pool in pools[fact].items() if other != (value,)]
        quota = math.ceil(per_cell * len(cells) * weights[fact, (value,)] / sum(weights.values()) / 2)
        half = min(quota, len(true), sum(map(len, others)))
        counts = [half, *_spread(half, [len(pool) for pool in others])]
        question = f"(True/False) {qa_bank.statement(fact, value)}"
        for pool, count in zip([true, *others], counts, strict=True):
            for cell in load.take(pool, count, fact, value):
                recorded = qa_bank.recorded(cell, fact)
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
    """Multiple choice about `topics` (facts -> wordings), shared evenly among topics, then option sets, then golds.

    Only values that occur in these cells are options, else the absent ones could be ruled out from the text.
    """
    pools = {facts: _by_option(cells, facts) for facts in topics}
    sets = {facts: _option_sets(pools[facts], choices) for facts in topics}
    capacity = {facts: [len(s) * min(len(pools[facts][v]) for v in s) for s in sets[facts]] for facts in topics}
    quotas = _spread(math.ceil(per_cell * len(cells)), [sum(capacity[facts]) for facts in topics])
    load = _Load(seed)
    for facts, quota in sorted(zip(topics, quotas, strict=True), key=lambda pair: (sum(capacity[pair[0]]), pair)):
        subject = "+".join(facts)
        for options, share in zip(sets[facts], _spread(quota, capacity[facts]), strict=True):
            texts = {values: _option_text(facts, values) for values in options}
            for gold in options:
                salt = "|".join([*texts.values(), texts[gold]])
                for cell in load.take(pools[facts][gold], math.ceil(share / len(options)), subject, salt):
                    turn = stable_hash("choice", seed, cell.cell_id) + load.counts[cell.cell_id, subject]
                    question = topics[facts][turn % len(topics[facts])]
                    recorded = dict(zip(facts, gold, strict=True))
                    task = WORDINGS[facts[0]].task
                    yield _record(cell, "multiple_choice", task, question, texts[gold], recorded, texts.values())


def _option_sets(pool: Mapping[tuple[str, ...], Sequence[Cell]], choices: int) -> list[tuple[tuple[str, ...], ...]]:
    """Every set of `choices` occurring values; all when fewer occur; none below three (true/false asks those)."""
    return list(itertools.combinations(pool, min(choices, len(pool)))) if len(pool) >= 3 else []


def _option_text(facts: Sequence[str], values: Sequence[str]) -> str:
    return " and ".join(map(qa_bank.option, facts, values))


def _by_option(cells: Sequence[Cell], facts: tuple[str, ...]) -> dict[tuple[str, ...], list[Cell]]:
    """Cells by their recorded values of the facts, in sorted order of values; cells that lack one are left out."""
    pools: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        values = tuple(value for fact in facts if (value := qa_bank.recorded(cell, fact)) is not None)
        if len(values) == len(facts):
            pools.setdefault(values, []).append(cell)
    return dict(sorted(pools.items()))


def _spread(total: int, capacities: Sequence[int]) -> list[int]:
    """Shares of `total` as even as the capacities allow, in their order; less than `total` only when all are full."""
    shares = [0] * len(capacities)
    for done, k in enumerate(sorted(range(len(capacities)), key=capacities.__getitem__)):
        shares[k] = min(capacities[k], round(total / (len(capacities) - done)))
        total -= shares[k]
    return shares
