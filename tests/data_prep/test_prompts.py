"""The `paper` prompt set equals the official collator's strings byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep import prompts
from data_prep.schema import QA, shown_options


def _qa(kind: str, question: str, answer: str, options: tuple[str, ...] = ()) -> QA:
    return QA("0" * 20, "image", "cell", "id", "test", "morphology", kind, question, answer, options)


def test_official_records_render_byte_for_byte(shared: Path) -> None:
    records = json.loads((shared / "data/goldens/cases.json").read_text())["prompts"]["records"]
    assert set(records) == {"multiple_choice", "true_false", "fill_blank", "open"}
    for kind, rows in records.items():
        for row in rows:
            qa = _qa(kind, row["question"], row["answer"], tuple(row["options"] or ()))
            assert prompts.question_text(qa, qa.options) == row["rendered_question"]
            assert prompts.target_text(qa, qa.options) == row["target"]


def test_official_edge_cases_render_byte_for_byte(shared: Path) -> None:
    cases = json.loads((shared / "data/goldens/cases.json").read_text())["prompts"]["synthetic"]
    assert len(cases) == 8
    for case in cases:
        given = case["in"]
        kind, options = given.get("question_type"), given.get("options")
        assert prompts.render_question(given["question"], kind, options) == case["rendered_question"]
        assert prompts.render_target(given["answer"], kind, options) == case["target"]


def test_letter_follows_the_order_shown() -> None:
    qa = _qa("multiple_choice", "Which?", "b", ("a", "b", "c"))
    for seed in range(5):
        shown = shown_options(qa, seed=seed)
        assert shown["ABC".index(prompts.target_text(qa, shown))] == "b"


def test_chat_is_qwen_chatml_with_the_image_before_the_question() -> None:
    qa = _qa("true_false", "(True/False) It is.", "True")
    assert prompts.build_chat(qa, (), slot="<IMAGE>") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><IMAGE><|vision_end|>(True/False) It is.\n"
        "Answer with only true or false.<|im_end|>\n"
        "<|im_start|>assistant\ntrue<|im_end|>\n"
    )
    assert prompts.build_chat(qa, ()).count("<|image_pad|>") == 32
    assert prompts.build_chat(qa, (), with_answer=False).endswith("<|im_start|>assistant\n")
