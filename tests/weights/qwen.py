"""Qwen2.5's tokenizer from its rank file: as a tokenizer.json, as the model's own folder has it, and by the book."""

from __future__ import annotations

import base64
import functools
import unicodedata
from pathlib import Path

import regex
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

SPECIALS = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|object_ref_start|>": 151646,
    "<|object_ref_end|>": 151647, "<|box_start|>": 151648, "<|box_end|>": 151649, "<|quad_start|>": 151650,
    "<|quad_end|>": 151651, "<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655, "<|video_pad|>": 151656,
}  # fmt: skip
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def ranks(path: Path) -> dict[bytes, int]:
    return {
        base64.b64decode(token): int(rank) for token, rank in (line.split() for line in path.read_bytes().splitlines())
    }


def merge(piece: bytes, table: dict[bytes, int], below: int | None = None) -> list[bytes]:
    """Byte pairs joined, the lowest rank first; `below`: only by ranks below it."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        found = [table.get(parts[i] + parts[i + 1]) for i in range(len(parts) - 1)]
        known = [(rank, i) for i, rank in enumerate(found) if rank is not None and (below is None or rank < below)]
        if not known:
            break
        i = min(known)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def by_the_book(text: str, table: dict[bytes, int]) -> list[int]:
    """Ids by the rank file's definition: special tokens, NFC, the splitting pattern, byte-pair ranks."""
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, SPECIALS)) + ")", text):
        if part in SPECIALS:
            ids.append(SPECIALS[part])
            continue
        for word in regex.findall(PATTERN, unicodedata.normalize("NFC", part)):
            ids += [table[piece] for piece in merge(word.encode(), table)]
    return ids


def write_tokenizer(path: Path, folder: Path) -> Path:
    """folder/tokenizer.json of the rank file. A token's last merge is that of the two parts that lower ranks leave."""
    table, letters = ranks(path), _letters()
    vocabulary = {"".join(letters[b] for b in token): rank for token, rank in table.items()}
    merges = []
    for token, rank in table.items():
        if len(token) > 1:
            left, right = merge(token, table, below=rank)
            merges.append(tuple("".join(letters[b] for b in part) for part in (left, right)))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def _letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + k) for k, b in enumerate(rest)}
