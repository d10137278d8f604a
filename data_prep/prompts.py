"""The `paper` prompt set: question suffixes, option letters and the ChatML frame of the official collator.

Follows QwenQACollator._format and Qwen2.5-VL's chat template (reference/official_code.md 3.5), byte for byte.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from data_prep.schema import QA

PROMPT_SET = "paper"
SYSTEM = "You are a helpful assistant."
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
SLOT_LENGTH = 32  # visual tokens per image: the Q-Former's queries

PREFIX_BEFORE_SLOT = f"{IM_START}system\n{SYSTEM}{IM_END}\n{IM_START}user\n{VISION_START}"
PREFIX_AFTER_SLOT = VISION_END
BEFORE_ANSWER = f"{IM_END}\n{IM_START}assistant\n"
AFTER_ANSWER = f"{IM_END}\n"


def letter(position: int) -> str:
    """Option letter of a 0-based position."""
    return string.ascii_uppercase[position]


def render_question(question: str, question_type: str | None, options: Sequence[str] | None = None) -> str:
    """The text after the image in the user turn. `options` in the order shown."""
    match question_type:
        case "multiple_choice" if options:
            lines = "".join(f"\n{letter(k)}. {option}" for k, option in enumerate(options))
            return f"{question}\nOptions:{lines}"
        case "true_false":
            return f"{question}\nAnswer with only true or false."
        case "fill_blank":
            return f"{question}\nAnswer in no more than 10 words."
    return question


def render_target(answer: object, question_type: str | None, options: Sequence[str] | None = None) -> str:
    """The assistant's text: a letter (raw text if the answer is no option), true/false in lower case, or the answer."""
    text = str(answer)
    if question_type == "multiple_choice" and options and text in options:
        return letter(list(options).index(text))
    return text.lower() if question_type == "true_false" else text


def question_text(qa: QA, options: Sequence[str]) -> str:
    """Question with its suffix; `options` are those of schema.shown_options (empty for the other types)."""
    return render_question(qa.question, qa.question_type, options)


def target_text(qa: QA, options: Sequence[str]) -> str:
    """What the language model is to write, given the options as shown."""
    return render_target(qa.answer, qa.question_type, options)


def branch_texts(qa: QA, options: Sequence[str]) -> tuple[str, str]:
    """(prompt part, supervised part) of one question after the shared prefix; the loss is on the second only."""
    return question_text(qa, options) + BEFORE_ANSWER, target_text(qa, options) + AFTER_ANSWER


def build_chat(qa: QA, options: Sequence[str], with_answer: bool = True, slot: str = IMAGE_PAD * SLOT_LENGTH) -> str:
    """The whole conversation; up to and including `assistant` + newline without the answer. `slot` fills the image."""
    prompt, target = branch_texts(qa, options)
    return PREFIX_BEFORE_SLOT + slot + PREFIX_AFTER_SLOT + prompt + (target if with_answer else "")
