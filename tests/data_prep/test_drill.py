"""Language drills: statements are true half of the time, answers follow from the slot, words are the same tokens in both."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_prep import qa_bank, tokens
from data_prep.drill import drill
from data_prep.tokens import Tokenizer

KINDS = {"true_false": 0.5, "multiple_choice": 0.25, "fill_blank": 0.25}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that knows the question bank's words."""
    folder: Path = tmp_path_factory.mktemp("words")
    texts = [*qa_bank.vocabulary(), "(True/False) Answer with only true or false.", "Options:\nA. B. C. D. E. F."]
    return tokens.train_tokenizer([*texts, *tokens.tokenizer_texts([], [])], folder)


def answers(record: dict, words: Tokenizer) -> list[tuple[str, str]]:
    """(question, answer) of each branch of a bin."""
    found = []
    for segment in range(1, int(np.max(record["segments"])) + 1):
        here = np.asarray(record["segments"]) == segment
        supervised = here & (np.asarray(record["targets"]) >= 0)
        text = words.decode(np.asarray(record["tokens"])[here])
        found.append((text.split("\n")[0], words.decode(np.asarray(record["targets"])[supervised]).strip()))
    return found


def test_half_of_the_statements_are_true(words: Tokenizer) -> None:
    records, _ = drill(words, count=300, bin_length=192, slot_facts=(1, 2, 3), kinds=KINDS, seed=0)
    said = Counter(
        answer for record in records for question, answer in answers(record, words) if "True/False" in question
    )
    assert set(said) == {"true", "false"}
    assert abs(said["true"] / said.total() - 0.5) < 0.06


def test_a_blank_is_answered_by_the_slot(words: Tokenizer) -> None:
    records, slots = drill(words, count=40, bin_length=192, slot_facts=(1,), kinds={"fill_blank": 1.0}, seed=1)
    for record, slot in zip(records, slots, strict=True):
        fact, value = next(
            (fact, value)
            for fact in qa_bank.FACTS
            for value in qa_bank.values(fact)
            if words.decode(slot) == f" {qa_bank.phrase(fact, value)}."
            and answers(record, words)[0][0] in qa_bank.WORDINGS[fact].blanks
        )
        assert {answer for _, answer in answers(record, words)} == {qa_bank.answer(fact, value)}


def test_a_slots_words_are_the_tokens_of_statements(words: Tokenizer) -> None:
    slot = set(tokens.caption_slot(words, "Irregular nucleus, Monocyte.").tolist())
    for word in (" irregular", " Monocyte"):
        assert set(words.encode(word)) <= slot, word


def test_the_same_seed_draws_the_same(words: Tokenizer) -> None:
    first, again, other = (
        drill(words, count=5, bin_length=192, slot_facts=(1, 2), kinds=KINDS, seed=seed) for seed in (3, 3, 4)
    )
    np.testing.assert_equal(first, again)
    assert any((a != b).any() for a, b in zip(first[1], other[1], strict=True))
