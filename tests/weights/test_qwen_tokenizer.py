"""Qwen2.5's ids on awkward text, and the ChatML prompt with its label mask byte for byte (official_code.md 3.5)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep.prompts import build_chat
from data_prep.schema import QA
from data_prep.tokens import NO_TARGET, PAD, Tokenizer, load_tokenizer, pack, prompt_tokens
from tests.models.golden import cases
from tests.weights.qwen import SPECIALS, by_the_book, ranks, write_tokenizer

pytestmark = pytest.mark.slow  # the vocabulary's 151,643 merges take ten seconds to write down
TEXTS = (
    "Pelger–Huët anomaly, N:C ratio 3-5", "Pelger-Hue\u0308t (decomposed)", "Å Å Å ﬁ ﬂ ½ ² Ⅷ", "12345 3.14159 1,000,000",
    "What's the cell’s nucleus like? It'LL be ROUND.", "  two  spaces\n\nand\ttabs \r\n end ", "白血球 嗜中性 フレンチ 한국어 🩸🔬👩‍⚕️",
    "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Which?<|im_end|>\n", "", " ", "<|im_startx|>",
)  # fmt: skip
FRAME = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>{slot}<|vision_end|>"
)


@pytest.fixture(scope="module")
def file(shared: Path) -> Path:
    return shared / "data" / "qwen_tokenizer" / "qwen.tiktoken"


@pytest.fixture(scope="module")
def tokenizer(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(file, tmp_path_factory.mktemp("qwen")))


@pytest.mark.parametrize("text", TEXTS)
def test_ids(tokenizer: Tokenizer, file: Path, text: str) -> None:
    assert tokenizer.encode(text) == by_the_book(text, ranks(file))


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert all(tokenizer.encode(token) == [id] for token, id in SPECIALS.items())
    assert tokenizer.id(PAD) == 151643  # Qwen pads with <|endoftext|>


def test_ids_of_the_golden_prompts(tokenizer: Tokenizer, file: Path, shared: Path) -> None:
    records = [record for group in cases(shared)["prompts"]["records"].values() for record in group]
    assert len(records) == 20
    for record in records:
        for name in ("rendered_question", "target"):
            assert tokenizer.encode(record[name]) == by_the_book(record[name], ranks(file))


def test_the_prompt_and_what_is_supervised(tokenizer: Tokenizer, file: Path) -> None:
    qa = QA(
        id="q", image_id="i", level="cell", domain="id", split="train", task="morphology", question_type="multiple_choice",
        question="Which nucleus?", answer="Round", options=("Lobed", "Round"), source={},
    )  # fmt: skip
    options = ("Lobed", "Round")
    text = FRAME.format(slot="<|image_pad|>" * 32) + (
        "Which nucleus?\nOptions:\nA. Lobed\nB. Round<|im_end|>\n<|im_start|>assistant\n"
    )
    assert build_chat(qa, options, with_answer=False) == text
    assert prompt_tokens(tokenizer, qa, options) == by_the_book(text, ranks(file))
    whole = by_the_book(text + "B<|im_end|>\n", ranks(file))
    (row,) = pack([qa], tokenizer, bin_length=128, too_long=[], order="as_released")
    assert row["tokens"][: len(whole)].tolist() == whole
    # Loss on the letter, <|im_end|> and the newline (198); everything before, and padding, has none.
    supervised = np.flatnonzero(row["targets"] != NO_TARGET)
    assert row["targets"][supervised].tolist() == whole[-3:] == [33, 151645, 198]
    assert supervised.tolist() == [len(whole) - 4, len(whole) - 3, len(whole) - 2]
