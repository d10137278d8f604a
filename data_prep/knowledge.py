"""Background questions that hang on recognising the pictured cell (paper 3.2.2: about a tenth of all questions).

The right answer follows the cell's type, so the text alone cannot know it. The facts are common textbook statements,
one per type and topic, chosen so that none fits two types; they were written for this project and not reviewed by a
physician. Optional: `pbs data run` asks none of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from data_prep.balance import Load, Values, choices, statements, template_question
from data_prep.schema import QA, WHITE_CELL_CLASSES, Cell, check_qa, stable_hash


@dataclasses.dataclass(frozen=True, slots=True)
class Topic:
    """`choice` and `statement` ask it; `phrases` in the order of WHITE_CELL_CLASSES; `blank` where a word answers."""

    choice: str
    statement: str
    phrases: tuple[str, str, str, str, str]
    blank: str = ""

    def phrase(self, label: str) -> str:
        return self.phrases[WHITE_CELL_CLASSES.index(label)]


TOPICS: Mapping[str, Topic] = {
    "task": Topic(
        "What is the main task of this type of white blood cell?",
        "The main task of this type of white blood cell is to {}.",
        (
            "engulf and kill bacteria",
            "recognize antigens and make antibodies",
            "turn into macrophages that clear debris",
            "attack parasitic worms",
            "release histamine in allergic reactions",
        ),
    ),
    "raised": Topic(
        "What is a raised count of this type of white blood cell most typical of?",
        "A raised count of this type of white blood cell is most typical of {}.",
        (
            "acute bacterial infection",
            "acute infection with a virus",
            "chronic infection, as in tuberculosis",
            "parasitic infection or asthma",
            "chronic myeloid leukemia",
        ),
    ),
    "share": Topic(
        "What share of the white blood cells of a healthy adult does this type usually have?",
        "In a healthy adult this type usually has a share of {} of the white blood cells.",
        ("40 to 75 percent", "20 to 45 percent", "2 to 10 percent", "1 to 6 percent", "below 2 percent"),
    ),
    "term": Topic(
        "What is a raised count of this type of white blood cell called?",
        "A raised count of this type of white blood cell is called {}.",
        ("neutrophilia", "lymphocytosis", "monocytosis", "eosinophilia", "basophilia"),
        blank="What is the word for too many white blood cells of this type?",
    ),
}
OPTIONS = 4
# Of the knowledge questions: so many statements, choices, and words to fill in.
_PARTS = {"true_false": 0.4, "multiple_choice": 0.45, "fill_blank": 0.15}


def knowledge_questions(cells: Sequence[Cell], per_cell: float, seed: int = 0) -> list[QA]:
    """About `per_cell` questions for each cell of the five types, balanced within each (domain, split)."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.label in WHITE_CELL_CLASSES:
            groups.setdefault((cell.domain, cell.split), []).append(cell)
    questions = [qa for group in groups.values() for qa in _questions(group, per_cell * len(group), seed)]
    rank = {cell.cell_id: k for k, cell in enumerate(cells)}
    questions.sort(key=lambda qa: (rank[qa.image_id], qa.id))
    for qa in questions:
        check_qa(qa, "knowledge questions")
    return questions


def _questions(cells: Sequence[Cell], total: float, seed: int) -> Iterator[QA]:
    by_label: dict[Values, list[Cell]] = {
        (label,): found for label in WHITE_CELL_CLASSES if (found := [cell for cell in cells if cell.label == label])
    }
    load: Load[Cell] = Load(seed, lambda cell: cell.cell_id)
    pools = dict.fromkeys(TOPICS, by_label)
    for name, label, cell in statements(pools, total * _PARTS["true_false"], lambda _: 1.0, load):
        topic = TOPICS[name]
        text = f"(True/False) {topic.statement.format(topic.phrase(label))}"
        yield _record(cell, "true_false", text, str(topic.phrase(cell.label) == topic.phrase(label)))
    asked: dict[Values, dict[Values, list[Cell]]] = {(name,): by_label for name in TOPICS}
    for (name,), texts, gold, cell in choices(
        asked,
        total * _PARTS["multiple_choice"],
        OPTIONS,
        lambda facts, values: TOPICS[facts[0]].phrase(values[0]),
        Load(seed, lambda cell: cell.cell_id),
    ):
        yield _record(cell, "multiple_choice", TOPICS[name].choice, texts[gold], tuple(sorted(texts.values())))
    blanks = [topic for topic in TOPICS.values() if topic.blank]
    ranked = sorted(cells, key=lambda cell: stable_hash("knowledge", seed, cell.cell_id))
    for cell in ranked[: math.ceil(total * _PARTS["fill_blank"])]:
        topic = blanks[stable_hash("topic", seed, cell.cell_id) % len(blanks)]
        yield _record(cell, "fill_blank", topic.blank, topic.phrase(cell.label))


def _record(cell: Cell, kind: str, question: str, answer: str, options: tuple[str, ...] = ()) -> QA:
    return template_question(
        "cell_knowledge", cell, cell.cell_id, kind, "knowledge", question, answer, options,
        facts=[f"label={cell.label}"], evidence=["label", "knowledge"],
    )  # fmt: skip
