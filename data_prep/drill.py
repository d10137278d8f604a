"""Language drills for phase 0b: drawn facts in the visual slot, questions about them, as many as wanted, every value as often.

Real captions are few and their values uneven; a small language model needs tens of thousands of questions before it
compares a question's words with the slot's. Drills are text only (no cell, no image): they stand in for pretraining.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from data_prep import qa_bank, tokens
from data_prep.schema import QA, question_id, stable_hash

QUESTIONS_DRAWN = 24  # more than fit into a bin


def drill(
    tokenizer: tokens.Tokenizer,
    *,
    count: int,
    bin_length: int,
    slot_facts: Sequence[int],
    kinds: Mapping[str, float],
    seed: int,
) -> tuple[list[dict], list[np.ndarray]]:
    """`count` bins (records of `tokens.pack`) and for each int32[32] the slot that its questions are about.

    slot_facts: how many facts a slot names, drawn from these; kinds: question type -> how often it is asked.
    Half of the statements are true.
    """
    records, slots = [], []
    for number in range(count):
        rng = random.Random(stable_hash("drill", seed, number))
        facts = rng.sample(qa_bank.FACTS, rng.choice(slot_facts))
        held = {fact: rng.choice(qa_bank.values(fact)) for fact in facts}
        text = ", ".join(itertools.starmap(qa_bank.phrase, held.items())) + "."
        asked = itertools.islice(_questions(held, kinds, f"drill:{seed}:{number}", rng), QUESTIONS_DRAWN)
        records.append(next(tokens.pack(asked, tokenizer, bin_length=bin_length, too_long=[])))
        slots.append(tokens.caption_slot(tokenizer, text))
    return records, slots


def _questions(held: Mapping[str, str], kinds: Mapping[str, float], image_id: str, rng: random.Random) -> Iterator[QA]:
    """Endless questions about the facts; two-valued ones are asked as multiple choice in pairs only."""
    for turn in itertools.count():
        fact, value = rng.choice(list(held.items()))
        wording, values = qa_bank.WORDINGS[fact], qa_bank.values(fact)
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        options: tuple[str, ...] = ()
        if kind == "true_false":
            true = rng.random() < 0.5
            shown = value if true else rng.choice([other for other in values if other != value])
            question, answer = f"(True/False) {qa_bank.statement(fact, shown)}", str(true)
        elif kind == "multiple_choice" and (pair := _pair(held, fact)):
            shown_pairs = [(first, second) for first in qa_bank.values(pair[0]) for second in qa_bank.values(pair[1])]
            shown_pairs.sort(key=lambda values: values != (held[pair[0]], held[pair[1]]))
            options = tuple(" and ".join(map(qa_bank.option, pair, values)) for values in shown_pairs)
            question, answer = qa_bank.PAIRS[pair], options[0]
        elif kind == "multiple_choice" and len(values) > 2:
            others = rng.sample([other for other in values if other != value], min(3, len(values) - 1))
            options = tuple(qa_bank.option(fact, shown) for shown in (value, *others))
            question, answer = rng.choice(wording.choices or wording.blanks), options[0]
        else:
            kind = "fill_blank"
            question, answer = rng.choice(wording.blanks), qa_bank.answer(fact, value)
        yield QA(
            id=question_id(image_id, str(turn), question),
            image_id=image_id,
            level="cell",
            domain="id",
            split="train",
            task=wording.task,
            question_type=kind,
            question=question,
            answer=answer,
            options=options,
        )


def _pair(held: Mapping[str, str], fact: str) -> tuple[str, str] | None:
    """A pair of held facts, `fact` one of them, that is asked in one multiple-choice question."""
    return next((pair for pair in qa_bank.PAIRS if fact in pair and set(pair) <= held.keys()), None)
