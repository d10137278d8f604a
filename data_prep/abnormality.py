"""Questions about what sets a cell apart from others of its type (task abnormality), from recorded attributes alone.

Unusual is a count and no verdict: a value that fewer than RARE of the training cells of the type have. A cell with
exactly one such attribute is asked about, and as many ordinary cells as the commonest finding has; a cell with several
could be answered in several ways. Used by `pbs data instruct`; `pbs data run` asks none of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from data_prep import qa_bank
from data_prep.balance import Load, by_values, choices, statements, template_question
from data_prep.schema import ATTRIBUTES, QA, WHITE_CELL_CLASSES, Cell, check_qa, stable_hash

RARE = 0.1
FEWEST_OF_TYPE = 50  # training cells of a type; with fewer a tenth of them says nothing
NOTHING = "no feature does"
OPTIONS = 4
KINDS = 6  # the commonest findings of a split; of more, single cells would stand in hundreds of option sets
STATED, CHOSEN = 1.0, 1.0  # true/false and multiple choice for each cell asked about
BLANK = "Which feature makes this cell stand out from other cells of its type?"
DESCRIBE = "How does this cell differ from other cells of its type?"
# Alike in length, so that no option gives itself away by it.
_WORDS = {
    "cell_size": "{} cell size",
    "nuclear_cytoplasmic_ratio": "{} N:C ratio",
    ("cytoplasm_vacuole", "yes"): "cytoplasmic vacuoles",
    ("cytoplasm_vacuole", "no"): "vacuole-free cytoplasm",
}


def words(fact: str, value: str) -> str:
    """The finding as an option and an answer, e.g. "band nucleus", "high N:C ratio"."""
    known = _WORDS.get((fact, value)) or _WORDS.get(fact)
    return known.format(qa_bank.answer(fact, value)) if known else qa_bank.phrase(fact, value)


def findings(cells: Sequence[Cell]) -> dict[str, str]:
    """Cell id -> its one unusual finding in words, or NOTHING; cells with several, or of scarce types, are left out."""
    train = [cell for cell in cells if cell.split == "train"]
    of_type = Counter(cell.label for cell in train if cell.attributes)
    counts = Counter((cell.label, fact, cell.attributes.get(fact, "")) for cell in train for fact in ATTRIBUTES)
    found = {}
    for cell in cells:
        if cell.label not in WHITE_CELL_CLASSES or not cell.attributes or of_type[cell.label] < FEWEST_OF_TYPE:
            continue
        rare = [
            words(fact, value)
            for fact in ATTRIBUTES
            if (value := qa_bank.recorded(cell, fact)) and counts[cell.label, fact, value] < RARE * of_type[cell.label]
        ]
        if len(rare) < 2:
            found[cell.cell_id] = rare[0] if rare else NOTHING
    return found


def abnormality_questions(cells: Sequence[Cell], seed: int = 0) -> list[QA]:
    """All four types, balanced within each (domain, split); in the cells' order."""
    found = findings(cells)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: stable_hash("ordinary", seed, cell.cell_id)):
        if cell.cell_id in found:
            groups.setdefault((cell.domain, cell.split), []).append(cell)
    questions: list[QA] = []
    for group in groups.values():
        counts = Counter(found[cell.cell_id] for cell in group if found[cell.cell_id] != NOTHING)
        common = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:KINDS])
        odd = [cell for cell in group if found[cell.cell_id] in common]
        ordinary = [cell for cell in group if found[cell.cell_id] == NOTHING]
        questions += _questions([*odd, *ordinary[: max(common.values(), default=0)]], found, seed)
    rank = {cell.cell_id: k for k, cell in enumerate(cells)}
    questions.sort(key=lambda qa: (rank[qa.image_id], qa.id))
    for qa in questions:
        check_qa(qa, "abnormality questions")
    return questions


def _questions(cells: Sequence[Cell], found: Mapping[str, str], seed: int) -> Iterator[QA]:
    def load() -> Load[Cell]:
        return Load(seed, lambda cell: cell.cell_id)

    pool = by_values(cells, lambda cell: [found[cell.cell_id]])
    for _, stated, cell in statements({"finding": pool}, STATED * len(cells), lambda _: 1.0, load()):
        text = "stands out by none of its features" if stated == NOTHING else f"stands out by its {stated}"
        question = f"(True/False) Compared with other cells of its type, this cell {text}."
        yield _record(cell, "true_false", question, str(found[cell.cell_id] == stated))
    picked = choices({("finding",): pool}, math.ceil(CHOSEN * len(cells)), OPTIONS, lambda _, values: values[0], load())
    for _, texts, gold, cell in picked:
        yield _record(cell, "multiple_choice", BLANK, gold[0], tuple(texts.values()))
    for cell in cells:
        finding = found[cell.cell_id]
        yield _record(cell, "fill_blank", BLANK, finding)
        yield _record(cell, "open", DESCRIBE, _description(finding))


def _description(finding: str) -> str:
    if finding == NOTHING:
        return "It does not: every feature is common among cells of its type."
    return f"It stands out by its {finding}; its other features are common among cells of its type."


def _record(cell: Cell, kind: str, question: str, answer: str, options: Sequence[str] = ()) -> QA:
    return template_question(
        "cell_abnormality", cell, cell.cell_id, kind, "abnormality", question, answer, options,
        facts=[f"label={cell.label}"], evidence=["abnormality"],
    )  # fmt: skip
