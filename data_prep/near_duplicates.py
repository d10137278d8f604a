"""Questions that ask the same again: within an image by rapidfuzz, across images by MinHash (paper 6: near-duplicates
are removed).

Across images the same wording is wanted as long as the answer follows the image; a wording that has one answer
wherever it is asked teaches the text, so only its first few stay.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rapidfuzz import fuzz

from data_prep.schema import QA, stable_hash

SAME_QUESTION = 90  # rapidfuzz ratio of the sorted content words
SAME_OPTIONS = 0.75  # Jaccard
SAME_TEXT = 0.85  # Jaccard of 5-grams
CONSTANT = 0.95  # share of one answer from which a wording counts as answered by its text
KEPT = 20  # questions of such a wording that stay
_BANDS, _ROWS = 16, 4  # finds pairs of Jaccard 0.85 with probability 0.9999
_STOP = frozenset(
    re.findall(
        r"\w+",
        "a an the is are of in on this that what which how does do its it was were be been can seen shown visible observed "
        "cell cells image picture true false and or with for to by as have has",
    )
)
_FILLERS = frozenset(
    ("most", "likely", "best", "main", "key", "clearly", "white", "blood", "following", "particular", "here")
)
_OPPOSED = frozenset(("", "a", "un", "non", "ab", "in", "ir", "hyper", "hypo", "multi", "bi", "mono", "macro", "micro"))


def within_images(questions: Sequence[QA]) -> dict[str, str]:
    """Id -> "like <id>" for every question that repeats an earlier one of its image and type."""
    found: dict[str, str] = {}
    kept: dict[tuple[str, str], list[tuple[QA, str]]] = {}
    for qa in questions:
        text = content_words(qa.question)
        earlier = kept.setdefault((qa.image_id, qa.question_type), [])
        like = next((other for other, words in earlier if _same(qa, text, other, words)), None)
        if like is None:
            earlier.append((qa, text))
        else:
            found[qa.id] = f"asks the same as {like.id}"
    return found


@functools.lru_cache(maxsize=50_000)
def content_words(text: str) -> str:
    """Sorted stems of the words that carry meaning; in their own order where something is compared ("more ... than")."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"['’]s\b", "", text.lower()))
    stems = dict.fromkeys(_stem(word) for word in words if word not in _STOP)
    return " ".join(stems if "than" in stems else sorted(stems))


def _stem(word: str) -> str:
    word = word.replace("colour", "color").replace("nuclear", "nucleus").replace("nuclei", "nucleus")
    for ending in ("ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 4 and not word.endswith(("ss", "us")):
            return word.removesuffix(ending)
    return word


def _same(qa: QA, words: str, other: QA, others: str) -> bool:
    if fuzz.ratio(words, others) < SAME_QUESTION or _opposed(words, others):
        return False
    here, there = (set(map(str.casefold, item.options)) for item in (qa, other))
    return not here or len(here & there) / len(here | there) >= SAME_OPTIONS


def _opposed(a: str, b: str) -> bool:
    """Whether the texts differ in a word that makes another question: one without a like in the other text, a number,
    or a prefix that turns the meaning (hyper- and hyposegmented)."""
    only_a, only_b = set(a.split()) - set(b.split()) - _FILLERS, set(b.split()) - set(a.split()) - _FILLERS
    for words, others in ((only_a, only_b), (only_b, only_a)):
        if any(word.isdigit() or not any(fuzz.ratio(word, o) >= 75 for o in others) for word in words):
            return True
    return any(_prefixes(x, y) for x in only_a for y in only_b)


def _prefixes(x: str, y: str) -> bool:
    length = 0
    while length < min(len(x), len(y)) and x[-1 - length] == y[-1 - length]:
        length += 1
    heads = {x[: len(x) - length], y[: len(y) - length]}
    return length >= 4 and len(heads) == 2 and heads <= _OPPOSED


def across_images(questions: Sequence[QA]) -> dict[str, str]:
    """Id -> why, for the surplus of wordings that have one answer over many images."""
    texts = sorted({_wording(qa) for qa in questions})
    cluster = dict(zip(texts, clusters(texts), strict=True))
    groups: dict[tuple[int, str], list[QA]] = {}
    for qa in questions:
        groups.setdefault((cluster[_wording(qa)], qa.question_type), []).append(qa)
    found = {}
    for group in groups.values():
        answer, count = Counter(qa.answer.casefold() for qa in group).most_common(1)[0]
        if len(group) > KEPT and count >= CONSTANT * len(group):
            same = sorted(
                (qa for qa in group if qa.answer.casefold() == answer), key=lambda qa: stable_hash("recurs", qa.id)
            )
            for qa in same[KEPT:]:
                found[qa.id] = f'one of {len(group)} like it, {count} of which have the answer "{qa.answer}"'
    return found


def _wording(qa: QA) -> str:
    return " ".join((qa.question, *sorted(qa.options))).lower()


def clusters(texts: Sequence[str]) -> list[int]:
    """A cluster number per text: texts joined by pairs of 5-gram Jaccard >= SAME_TEXT, found by MinHash bands."""
    grams = [_grams(text) for text in texts]
    root = list(range(len(texts)))

    def find(k: int) -> int:
        while root[k] != k:
            root[k] = root[root[k]]
            k = root[k]
        return k

    for a, b in _candidates(grams):
        if find(a) != find(b):
            shared = len(np.intersect1d(grams[a], grams[b], assume_unique=True))
            if shared >= SAME_TEXT * (len(grams[a]) + len(grams[b]) - shared):
                root[find(b)] = find(a)
    return [find(k) for k in range(len(texts))]


def _grams(text: str) -> np.ndarray:
    """uint64[n] distinct hashes of the 5-grams (of the whole text when it is shorter)."""
    found = {zlib.crc32(text[k : k + 5].encode()) for k in range(max(len(text) - 4, 1))}
    return np.fromiter(sorted(found), np.uint64, len(found))


def _candidates(grams: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Pairs (earlier, later) that agree in a band of their MinHash signatures."""
    rng = np.random.default_rng(0)
    prime = np.uint64(4294967311)
    scale, shift = rng.integers(1, 2**31, (2, _BANDS * _ROWS, 1), dtype=np.uint64)
    buckets: dict[tuple[int, bytes], int] = {}
    for k, gram in enumerate(grams):
        signature = ((gram * scale + shift) % prime).min(axis=1)
        for band in range(_BANDS):
            at = band, signature[band * _ROWS : (band + 1) * _ROWS].tobytes()
            first = buckets.setdefault(at, k)
            if first != k:
                yield first, k
