"""Tokenizer of the nano size and packed bins of questions about one image (dataset `cell_qa_tokens`).

A bin is one row of the language model: system text and image slot, then questions that see this prefix but not each
other. Targets are already shifted; positions are Qwen2.5-VL's M-RoPE with a 1 x 32 image grid (official_code.md 3.5).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from data_prep import prompts, qa_bank
from data_prep.caption import caption_text
from data_prep.records import TEXT, TEXTS, Features, array
from data_prep.schema import QA, WHITE_CELL_CLASSES, Cell, DataError, shown_options, stable_hash

VOCABULARY = 4096
PAD, CLS, SEP, DEC = "[PAD]", "[CLS]", "[SEP]", "[DEC]"
SPECIALS = (
    "<|endoftext|>",
    prompts.IM_START,
    prompts.IM_END,
    prompts.VISION_START,
    prompts.VISION_END,
    prompts.IMAGE_PAD,
    PAD,
    CLS,
    SEP,
    DEC,
)
NO_TARGET = -1
PADDING_SEGMENT, PREFIX_SEGMENT = -1, 0


def token_features(bin_length: int) -> Features:
    """The fields of one record of `cell_qa_tokens`."""
    row = array("int32", bin_length)
    return {
        "bin_id": TEXT,
        "image_id": TEXT,
        "qa_ids": TEXTS,
        "tokens": row,
        "targets": row,
        "segments": row,
        "positions": array("int32", 3, bin_length),
    }


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.json with the ids that prompts need. `sha256` is that of the file."""

    backend: tokenizers.Tokenizer
    sha256: str

    @property
    def size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Special token -> id, of those in SPECIALS that the vocabulary has."""
        found = {token: self.backend.token_to_id(token) for token in SPECIALS}
        if found[PAD] is None:
            found[PAD] = found[SPECIALS[0]]  # Qwen pads with <|endoftext|>
        return {token: id for token, id in found.items() if id is not None}

    def id(self, token: str) -> int:
        """Raises DataError when the vocabulary lacks the special token."""
        if token not in self.ids:
            raise DataError(f'the tokenizer has no special token "{token}": train it with `pbs data tokens`')
        return self.ids[token]

    def encode(self, text: str) -> list[int]:
        """Ids; special tokens written in the text become their ids, none are added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)


def train_tokenizer(texts: Iterable[str], directory: Path, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE with SPECIALS as ids 0..9, written to directory/tokenizer.json; equal texts give equal bytes."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sorted(texts), trainer=trainer)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads directory/tokenizer.json. Raises DataError when it is missing or unreadable."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise DataError(f"{path} is missing: write it with `pbs data tokens` or point to the folder that holds it")
    data = path.read_bytes()
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the Rust side raises bare Exception
        raise DataError(f"{path} is not a tokenizer file ({error}): write it again with `pbs data tokens`") from error
    return Tokenizer(backend, hashlib.sha256(data).hexdigest())


def tokenizer_texts(cells: Iterable[Cell], questions: Iterable[QA]) -> Iterator[str]:
    """The texts that the nano tokenizer learns from; give it the train split only.

    The question bank's words are added, so that a value that is rare in training still is one token in a caption.
    """
    yield prompts.SYSTEM
    yield "system\nuser\nassistant\n"
    yield from qa_bank.vocabulary()
    for cell in cells:
        yield cell.caption
        yield caption_text(cell.caption)
    for qa in questions:
        options = shown_options(qa)
        yield prompts.question_text(qa, options)
        yield prompts.target_text(qa, options)


def prefix_tokens(tokenizer: Tokenizer, slot: int = prompts.SLOT_LENGTH) -> list[int]:
    """Shared prefix of every question on an image: system turn, user turn up to the end of the slot of so many tokens."""
    visual = [tokenizer.id(prompts.IMAGE_PAD)] * slot
    before, after = prompts.PREFIX_BEFORE_SLOT, prompts.PREFIX_AFTER_SLOT
    return tokenizer.encode(before) + visual + tokenizer.encode(after)


def prompt_tokens(tokenizer: Tokenizer, qa: QA, options: Sequence[str], slot: int = prompts.SLOT_LENGTH) -> list[int]:
    """Prefix and question up to and including `assistant` + newline: what the decoder is given."""
    return prefix_tokens(tokenizer, slot) + tokenizer.encode(prompts.branch_texts(qa, options)[0])


def rope_positions(ids: Sequence[int], image_pad: int) -> np.ndarray:
    """int32[3, n] M-RoPE positions (t, h, w) of one unpadded row with at most one run of `image_pad`.

    The run shares t = h = its start and has w = start .. start + run - 1; text after it goes on at start + run.
    """
    image = np.asarray(ids) == image_pad
    positions = np.tile(np.arange(len(ids), dtype=np.int32), (3, 1))
    if image.any():
        positions[:2, image] = positions[0, image.argmax()]
    return positions


def with_slot(record: Mapping[str, Any], image_pad: int, length: int) -> dict[str, Any]:
    """A packed bin (record of token_features) with `length` tokens in its slot instead of those it was written with."""
    tokens, segments = np.asarray(record["tokens"]), np.asarray(record["segments"])
    slot = np.flatnonzero((tokens == image_pad) & (segments == PREFIX_SEGMENT))
    start, stop = int(slot[0]), int(slot[-1]) + 1
    longer = length - len(slot)
    if not longer:
        return dict(record)

    def spliced(array: np.ndarray, middle: Any) -> np.ndarray:
        return np.concatenate([array[:start], np.full(length, middle, array.dtype), array[stop:]])

    positions = np.asarray(record["positions"]).copy()
    positions[:, stop:] += np.where(segments[stop:] == PADDING_SEGMENT, 0, longer).astype(positions.dtype)
    strip = [spliced(axis, start) for axis in positions]
    strip[2][start : start + length] += np.arange(length, dtype=positions.dtype)
    return {
        **record,
        "tokens": spliced(tokens, image_pad),
        "targets": spliced(np.asarray(record["targets"]), NO_TARGET),
        "segments": spliced(segments, PREFIX_SEGMENT),
        "positions": np.stack(strip),
    }


def caption_slot(tokenizer: Tokenizer, caption: str, length: int = prompts.SLOT_LENGTH, where: str = "") -> np.ndarray:
    """int32[length]: the caption's ids, padded with [PAD], for the visual slot of phase 0b.

    Written as if within a sentence (" small round ..."), so that a word is the same token here as in questions.
    Raises DataError (naming `where`, the cell's id) when the caption is longer than the slot.
    """
    first, _, rest = caption.partition(" ")
    named = first.rstrip(".,") in WHITE_CELL_CLASSES
    ids = tokenizer.encode(f" {first if named else first.lower()} {rest}".rstrip())
    if len(ids) > length:
        raise DataError(
            f'{where or "caption"}: "{caption}" has {len(ids)} tokens, the visual slot {length}; shorten it'
        )
    return np.array(ids + [tokenizer.id(PAD)] * (length - len(ids)), np.int32)


def qformer_text(tokenizer: Tokenizer, caption: str, max_length: int = 32) -> np.ndarray:
    """int32[max_length]: [CLS] caption_text [SEP] [PAD]..., cut before [SEP] when too long, as by BERT's tokenizer."""
    ids = tokenizer.encode(caption_text(caption))[: max_length - 2]
    row = [tokenizer.id(CLS), *ids, tokenizer.id(SEP)]
    return np.array(row + [tokenizer.id(PAD)] * (max_length - len(row)), np.int32)


@dataclasses.dataclass(frozen=True)
class _Branch:
    qa_id: str
    prompt: list[int]
    target: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.target)


def pack(
    questions: Iterable[QA],
    tokenizer: Tokenizer,
    *,
    bin_length: int,
    too_long: list[str],
    order: str = "shuffle",
    seed: int = 0,
) -> Iterator[dict]:
    """Bins (records of token_features) of all questions; images in order of first appearance.

    Per image the branches are shuffled by hash, so bins mix formats, and put into the first bin with room. Ids of
    questions that do not fit beside the prefix are appended to `too_long`, for the caller to report: none is cut.
    `order` is the option order of schema.shown_options. Raises DataError when not even the prefix fits.
    """
    prefix = prefix_tokens(tokenizer)
    if len(prefix) >= bin_length:
        raise DataError(f"bin_length {bin_length} does not exceed the prefix of {len(prefix)} tokens: raise it")
    prefix_positions = rope_positions(prefix, tokenizer.id(prompts.IMAGE_PAD))
    encode = functools.lru_cache(maxsize=4096)(tokenizer.encode)  # template questions repeat
    by_image: dict[str, list[QA]] = {}
    for qa in questions:
        by_image.setdefault(qa.image_id, []).append(qa)
    for image_id, group in by_image.items():
        room = bin_length - len(prefix)
        bins: list[list[_Branch]] = []
        for qa in sorted(group, key=lambda qa: stable_hash("branch", seed, qa.id)):
            prompt, target = prompts.branch_texts(qa, shown_options(qa, order))
            branch = _Branch(qa.id, encode(prompt), encode(target))
            if branch.length > room:
                too_long.append(qa.id)
                continue
            fitting = (used for used in bins if sum(b.length for b in used) + branch.length <= room)
            chosen = next(fitting, None)
            if chosen is None:
                bins.append(chosen := [])
            chosen.append(branch)
        for number, branches in enumerate(bins):
            yield {"bin_id": f"{image_id}#{number:02d}", "image_id": image_id} | _bin(
                prefix, prefix_positions, branches, bin_length, tokenizer.id(PAD)
            )


def _bin(
    prefix: list[int], prefix_positions: np.ndarray, branches: Sequence[_Branch], bin_length: int, pad: int
) -> dict:
    """Arrays of one bin; every branch's positions restart where the prefix ended."""
    tokens = np.full(bin_length, pad, np.int32)
    targets = np.full(bin_length, NO_TARGET, np.int32)
    segments = np.full(bin_length, PADDING_SEGMENT, np.int32)
    positions = np.zeros((3, bin_length), np.int32)
    at = len(prefix)
    tokens[:at], segments[:at], positions[:, :at] = prefix, PREFIX_SEGMENT, prefix_positions
    start = int(prefix_positions.max()) + 1
    for segment, branch in enumerate(branches, start=1):
        stop, answer = at + branch.length, at + len(branch.prompt)
        tokens[at:stop] = branch.prompt + branch.target
        targets[answer - 1 : stop - 1] = branch.target
        segments[at:stop] = segment
        positions[:, at:stop] = start + np.arange(branch.length)
        at = stop
    return {
        "qa_ids": [branch.qa_id for branch in branches],
        "tokens": tokens,
        "targets": targets,
        "segments": segments,
        "positions": positions,
    }
