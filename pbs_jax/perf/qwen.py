"""Token ids of the Qwen family from its rank file, for counting: a user's run takes tokenizer.json from the model's folder.

A rank file has one "base64-token rank" line each; a text is cut by Qwen's pattern and each piece's bytes are merged in
order of rank, which is how the byte-pair vocabulary was made.
"""

from __future__ import annotations

import base64
import functools
import itertools
from pathlib import Path

import regex

from data_prep import prompts
from data_prep.schema import DataError
from data_prep.tokens import PAD

PATTERN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen2.5's ids; it pads with <|endoftext|>.
SPECIALS = {
    "<|endoftext|>": 151643,
    prompts.IM_START: 151644,
    prompts.IM_END: 151645,
    prompts.VISION_START: 151652,
    prompts.VISION_END: 151653,
    prompts.IMAGE_PAD: 151655,
}
SPLIT = regex.compile("(" + "|".join(map(regex.escape, SPECIALS)) + ")")


class RankTokenizer:
    """`encode` and `id` as `data_prep.tokens.Tokenizer` has them. Raises DataError when the file is missing."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(f"{path} is missing: name the folder that holds qwen.tiktoken")
        lines = path.read_bytes().splitlines()
        self._ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        self._piece = functools.lru_cache(maxsize=None)(self._merge)

    def id(self, token: str) -> int:
        return SPECIALS["<|endoftext|>" if token == PAD else token]

    def encode(self, text: str) -> list[int]:
        """Ids; special tokens written in the text become their ids."""
        ids: list[int] = []
        for part in SPLIT.split(text):
            ids += (
                [SPECIALS[part]]
                if part in SPECIALS
                else [i for piece in PATTERN.findall(part) for i in self._piece(piece)]
            )
        return ids

    def _merge(self, piece: str) -> tuple[int, ...]:
        parts = [bytes([byte]) for byte in piece.encode()]
        while len(parts) > 1:
            ranks = [self._ranks.get(left + right) for left, right in itertools.pairwise(parts)]
            known = [(rank, at) for at, rank in enumerate(ranks) if rank is not None]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self._ranks[part] for part in parts)
