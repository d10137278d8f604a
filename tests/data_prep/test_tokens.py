"""Tokenizer of the nano size and packed bins: ids, supervised positions, M-RoPE positions, nothing cut in silence."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from data_prep import prompts, tokens
from data_prep.qa import cell_questions
from data_prep.records import parser, serializer
from data_prep.schema import QA, WHITE_CELL_CLASSES, Cell, DataError, shown_options
from data_prep.tokens import Tokenizer
from tests.data_prep.wbcatt import expert_cells, made_cells

BIN = 384


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return made_cells(20)


@pytest.fixture(scope="module")
def questions(cells: list[Cell]) -> list[QA]:
    return cell_questions(cells)


@pytest.fixture(scope="module")
def tokenizer(cells: list[Cell], questions: list[QA], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokens.train_tokenizer(tokens.tokenizer_texts(cells, questions), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def bins(questions: list[QA], tokenizer: Tokenizer) -> list[dict]:
    too_long: list[str] = []
    bins = list(tokens.pack(questions, tokenizer, bin_length=BIN, too_long=too_long))
    assert too_long == []
    return bins


def test_training_is_deterministic_and_the_order_of_texts_is_nothing(
    cells: list[Cell], questions: list[QA], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    texts = list(tokens.tokenizer_texts(cells, questions))
    again = tokens.train_tokenizer(reversed(texts), tmp_path)
    assert again.sha256 == tokenizer.sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_specials_come_first_and_hugging_face_reads_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert [tokenizer.id(token) for token in tokens.SPECIALS] == list(range(10))
    (tmp_path / "tokenizer.json").write_text(tokenizer.backend.to_str())
    peer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>user\nA round Zelle µ 3.5 <|im_end|>\n"
    assert peer.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.size <= tokens.VOCABULARY


def test_expert_captions_fit_the_slot_and_the_qformer(shared: Path, tmp_path: Path) -> None:
    cells = expert_cells(shared)
    train = [cell for cell in cells if cell.split == "train"]
    tokenizer = tokens.train_tokenizer(tokens.tokenizer_texts(train, cell_questions(train)), tmp_path)
    assert max(len(tokenizer.encode(cell.caption)) for cell in cells) <= 30
    for cell in cells:
        row = tokens.qformer_text(tokenizer, cell.caption)
        text = tokenizer.decode(row)
        assert (row.shape, row.dtype, row[0]) == ((32,), np.int32, tokenizer.id(tokens.CLS))
        assert text == tokens.caption_text(cell.caption)


def test_values_unseen_in_training_are_single_tokens_all_the_same(tmp_path: Path) -> None:
    basophils = [cell for cell in made_cells(10) if cell.label == "Basophil"]
    tokenizer = tokens.train_tokenizer(tokens.tokenizer_texts(basophils, []), tmp_path)
    assert max(len(tokenizer.encode(cell.caption)) for cell in made_cells(20)) <= 30


def test_long_qformer_text_is_cut_before_sep(tokenizer: Tokenizer) -> None:
    row = tokens.qformer_text(tokenizer, "Small round cell. " * 20)
    assert row[-1] == tokenizer.id(tokens.SEP) and tokenizer.id(tokens.PAD) not in row


def test_caption_slot_pads_and_refuses_a_long_caption(tokenizer: Tokenizer, cells: list[Cell]) -> None:
    row = tokens.caption_slot(tokenizer, cells[0].caption)
    assert row.shape == (32,) and row[-1] == tokenizer.id(tokens.PAD)
    text = cells[0].caption
    within = text if text.split()[0].rstrip(".,") in WHITE_CELL_CLASSES else text[0].lower() + text[1:]
    assert tokenizer.decode(row) == f" {within}", "the slot's words are the tokens that questions use"
    with pytest.raises(DataError, match=r"cell x: .* tokens, the visual slot 32; shorten it"):
        tokens.caption_slot(tokenizer, cells[0].caption * 2, where="cell x")


def test_every_question_is_in_exactly_one_bin_of_its_image(questions: list[QA], bins: list[dict]) -> None:
    image = {qa.id: qa.image_id for qa in questions}
    packed = [(id, row["image_id"]) for row in bins for id in row["qa_ids"]]
    assert sorted(packed) == sorted(image.items())
    assert len({row["bin_id"] for row in bins}) == len(bins)


def test_branches_hold_the_paper_prompt_and_supervise_the_answer_only(
    questions: list[QA], bins: list[dict], tokenizer: Tokenizer
) -> None:
    by_id = {qa.id: qa for qa in questions}
    for row in bins:
        prefix = row["tokens"][row["segments"] == 0]
        for k, id in enumerate(row["qa_ids"], start=1):
            qa, options = by_id[id], shown_options(by_id[id])
            at = np.flatnonzero(row["segments"] == k)
            chat = [*prefix, *row["tokens"][at]]
            assert chat == tokenizer.encode(prompts.build_chat(qa, options))
            assert tokens.prompt_tokens(tokenizer, qa, options) == tokenizer.encode(
                prompts.build_chat(qa, options, with_answer=False)
            )
            supervised = at[row["targets"][at] >= 0]
            text = tokenizer.decode(row["targets"][supervised], skip_special_tokens=False)
            assert text == prompts.target_text(qa, options) + "<|im_end|>\n"
            # Shifted: the target at a position is the token that stands at the next one.
            assert np.array_equal(row["targets"][supervised], row["tokens"][supervised + 1])
            assert np.array_equal(row["positions"][:, at], prefix.size + np.tile(np.arange(at.size), (3, 1)))
        rest = row["segments"] == tokens.PADDING_SEGMENT
        assert (row["targets"][row["segments"] <= 0] == tokens.NO_TARGET).all()
        assert (row["tokens"][rest] == tokenizer.id(tokens.PAD)).all() and (row["positions"][:, rest] == 0).all()


def test_the_slot_is_a_strip_of_32(bins: list[dict], tokenizer: Tokenizer) -> None:
    for row in bins[:5]:
        slot = row["tokens"] == tokenizer.id(prompts.IMAGE_PAD)
        start = int(slot.argmax())
        assert slot.sum() == 32 and (row["segments"][slot] == 0).all()
        assert (row["positions"][:2, slot] == start).all()
        assert np.array_equal(row["positions"][2, slot], start + np.arange(32))
        assert (row["positions"][:, start + 32] == start + 32).all()


@pytest.mark.parametrize("length", [1, 8, 48])
def test_a_bin_read_with_another_slot_is_the_one_that_would_have_been_written(
    questions: list[QA], bins: list[dict], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    plain = tokens.prefix_tokens
    monkeypatch.setattr(tokens, "prefix_tokens", lambda tokenizer: plain(tokenizer, length))
    written = tokens.pack(questions, tokenizer, bin_length=BIN + length - 32, too_long=[])
    for row, want in zip(bins, written, strict=True):
        found = tokens.with_slot(row, tokenizer.id(prompts.IMAGE_PAD), length)
        assert all(np.array_equal(found[name], want[name]) for name in want), row["bin_id"]


@pytest.mark.parametrize("queries", [8, 32])
def test_rope_positions_equal_the_official_ones(shared: Path, queries: int) -> None:
    golden = load_file(shared / f"data/goldens/qwen_tiny_n{queries}.safetensors")
    for ids, mask, want in zip(
        golden["in.train.input_ids"],
        golden["in.train.attention_mask"],
        golden["out.train.position_ids"].swapaxes(0, 1),
        strict=True,
    ):
        keep = mask == 1
        assert np.array_equal(tokens.rope_positions(ids[keep], image_pad=590), want[:, keep])


def test_bins_mix_formats_and_follow_the_seed(questions: list[QA], bins: list[dict], tokenizer: Tokenizer) -> None:
    kinds = {qa.id: qa.question_type for qa in questions}
    first = [row for row in bins if row["bin_id"].endswith("#00")]
    assert np.mean([len({kinds[id] for id in row["qa_ids"]}) >= 3 for row in first]) > 0.8
    again = list(tokens.pack(questions[::-1], tokenizer, bin_length=BIN, too_long=[]))
    assert {row["bin_id"]: row["qa_ids"] for row in again} == {row["bin_id"]: row["qa_ids"] for row in bins}
    other = list(tokens.pack(questions, tokenizer, bin_length=BIN, too_long=[], seed=1))
    assert [row["qa_ids"] for row in other] != [row["qa_ids"] for row in bins]


def test_questions_that_do_not_fit_are_reported_by_id(questions: list[QA], tokenizer: Tokenizer) -> None:
    """The limit is exact (cases C17): the longest branch fits a bin of its own length and no shorter one."""
    lengths = {
        qa.id: sum(map(len, map(tokenizer.encode, prompts.branch_texts(qa, shown_options(qa))))) for qa in questions
    }
    limit = max(lengths.values())
    prefix = len(tokens.prefix_tokens(tokenizer))
    for room in (limit, limit - 1):
        too_long: list[str] = []
        packed = [
            id
            for row in tokens.pack(questions, tokenizer, bin_length=prefix + room, too_long=too_long)
            for id in row["qa_ids"]
        ]
        assert sorted(too_long) == sorted(id for id, length in lengths.items() if length > room)
        assert sorted(packed + too_long) == sorted(lengths)
    with pytest.raises(DataError, match=rf"bin_length {prefix} does not exceed the prefix"):
        list(tokens.pack(questions, tokenizer, bin_length=prefix, too_long=[]))


def test_bins_survive_the_record_format(bins: list[dict]) -> None:
    features = tokens.token_features(BIN)
    read = parser(features)(serializer(features)(bins[0]))
    assert read.keys() == bins[0].keys()
    for name, value in bins[0].items():
        assert np.array_equal(read[name], value), name


def test_missing_or_broken_tokenizer_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.json is missing"):
        tokens.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer file"):
        tokens.load_tokenizer(tmp_path)
