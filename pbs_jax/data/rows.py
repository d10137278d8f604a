"""How questions lie in a row: one image a row (as stored), several images a row, or one question a row.

Several images a row leave little padding and still compile once; one question a row is the official form, against which
the others are measured. All three give the same loss.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from data_prep.schema import DataError

Example = dict[str, np.ndarray]
ROUND = 16  # row lengths and lists of keys are multiples of this
QUERY_BLOCK = 32  # tokens that share a list of keys
PER_TOKEN = ("tokens", "targets", "segments")
PER_ANSWER = ("answers", "shares", "firsts")
PADDING = {"targets": -1, "segments": -1, "groups": 0, "answers": -1}
SHARED = -1  # group of the tokens that every image of a row sees


def arrange(examples: Sequence[Example], config: Any) -> Sequence[Example]:
    """Rows as config.images_per_row says: 1 as stored, more = several images a row, 0 = one question a row. Raises DataError below 0."""
    images = config.images_per_row
    if images < 0:
        raise DataError(f"config.images_per_row={images}: use 0 (one question a row), 1, or more")
    if images == 0:
        return split_questions(examples)
    import jax  # answering in PyTorch comes by here, without it

    # Measured on CPUs alone; elsewhere dense products cost little beside gathering keys and scattering their gradients.
    list_keys = with_keys if jax.default_backend() == "cpu" else lambda rows: rows
    return list_keys(PackedRows(examples, images) if images > 1 else examples)


class PackedRows(Sequence[Example]):
    """Rows of up to `images` examples each, all of one length, the shortest that holds them (a multiple of ROUND).

    examples: of `QuestionBins`. What stands before the image (the system turn) depends on no image and stands once in a
    row. `groups` int32[L] says which image a token belongs to, SHARED for those; what an example has per image (visual,
    index, ...) gains a leading axis [images], zero where a row has fewer, and `real` bool[images] says which.
    The longest example goes first into the emptiest row, so that rows end up nearly alike.
    """

    def __init__(self, examples: Sequence[Example], images: int) -> None:
        self._examples, self._images = examples, images
        self._before = before_image(examples[0])
        own = [int((example["segments"] >= 0).sum()) - self._before for example in examples]
        self.plan, self.length = plan_rows(own, images, self._before)
        scored = [int((example["answers"] >= 0).sum()) for example in examples]
        self._answers = max(sum(scored[i] for i in row) for row in self.plan)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: Any) -> Any:
        chosen = [self._examples[i] for i in self.plan[index]]
        return _join(chosen, self._images, self.length, self._answers, self._before)


class KeyLists(Sequence[Example]):
    """`rows` with `keys` int32[N, S]: for every QUERY_BLOCK tokens the places that one of them sees, padded by -1."""

    def __init__(self, rows: Sequence[Example]) -> None:
        self._rows = rows
        most = max(len(keys) for row in rows for keys in key_lists(row))
        self.size = -(-most // ROUND) * ROUND

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        lists = key_lists(row)
        keys = np.full((len(lists), self.size), -1, np.int32)
        for block, places in enumerate(lists):
            keys[block, : len(places)] = places
        return row | {"keys": keys}


def with_keys(rows: Sequence[Example]) -> Sequence[Example]:
    """Rows with the keys of their blocks, or as they are where a block sees more than half of its row."""
    listed = KeyLists(rows)
    return listed if 2 * listed.size <= len(rows[0]["tokens"]) else rows


def key_lists(row: Example) -> list[np.ndarray]:
    """For each block of QUERY_BLOCK tokens the places, ascending, that at least one of them sees (`sees`)."""
    segments = row["segments"]
    tokens = [np.arange(len(segments)), segments, row.get("groups", np.zeros_like(segments))]
    starts = range(0, len(segments), QUERY_BLOCK)
    blocks = [[x[start : start + QUERY_BLOCK, None] for x in tokens] for start in starts]
    return [np.flatnonzero(sees(block, [x[: block[0][-1, 0] + 1] for x in tokens]).any(axis=0)) for block in blocks]


def sees(query: Sequence[Any], key: Sequence[Any]) -> Any:
    """Whether tokens see others: (place, segment, group) of each, arrays of NumPy or JAX that broadcast.

    A token sees what is not later in the prefix (segment 0) and in its own branch, of its own image and of what all images
    share. Padding sees itself, so that softmax stays finite.
    """
    (at, segment, group), (key_at, key_segment, key_group) = query, key
    branch = ((key_segment == 0) | (key_segment == segment)) & (key_segment >= 0) & (segment >= 0)
    image = (key_group == group) | (key_group == SHARED)
    return (key_at <= at) & branch & image | (key_at == at)


def before_image(example: Example) -> int:
    """How many tokens stand before the image: its tokens are the first to share a position on the first axis."""
    return int(np.argmax(np.diff(example["positions"][0]) == 0))


def plan_rows(lengths: Sequence[int], images: int, shared: int = 0) -> tuple[list[list[int]], int]:
    """(example numbers of each row, row length) for examples of these lengths beside `shared` tokens of every row.

    A few rows more than needed let the longest examples share theirs with fewer: whatever takes the fewest tokens.
    """
    fewest = -(-len(lengths) // images)
    plans = (_balanced(lengths, images, count, shared) for count in range(fewest, fewest + fewest // 10 + 2))
    return min(plans, key=lambda plan: len(plan[0]) * plan[1])


def _balanced(lengths: Sequence[int], images: int, count: int, shared: int) -> tuple[list[list[int]], int]:
    rows: list[list[int]] = [[] for _ in range(count)]
    open_rows = [(0, row) for row in range(count)]  # a heap of (tokens, row) with room for one more
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        used, row = heapq.heappop(open_rows)
        rows[row].append(i)
        longest = max(longest, used + lengths[i])
        if len(rows[row]) < images:
            heapq.heappush(open_rows, (used + lengths[i], row))
    return rows, -(-(longest + shared) // ROUND) * ROUND


def split_questions(examples: Sequence[Example]) -> list[Example]:
    """One question a row: the prefix and one branch, padded to the longest row; the official form."""
    parts = []
    for example in examples:
        segments = example["segments"]
        for branch in range(1, segments.max() + 1):
            keep = (segments == 0) | (segments == branch)
            at = np.cumsum(keep) - 1
            mine = (example["answers"] >= 0) & (segments[example["answers"]] == branch)
            part = {name: example[name][keep] for name in PER_TOKEN}
            part |= {name: example[name][mine] for name in PER_ANSWER}
            part["answers"] = at[part["answers"]].astype(np.int32)
            part["segments"] = np.minimum(part["segments"], 1)
            others = {name: value for name, value in example.items() if name not in (*part, "positions")}
            parts.append({**others, **part, "positions": example["positions"][:, keep]})
    length = -(-max(len(part["tokens"]) for part in parts) // ROUND) * ROUND
    answers = max(len(part["answers"]) for part in parts)
    return [_padded(part, length, answers) for part in parts]


def _join(examples: Sequence[Example], images: int, length: int, answers: int, before: int) -> Example:
    """Examples one after another in a row; segment numbers go on, so that branches stay apart."""
    out: dict[str, list[np.ndarray]] = {}
    start = 0
    for group, example in enumerate(examples):
        real = example["segments"] >= 0
        if group:
            real[:before] = False
        scored = example["answers"] >= 0
        part = {name: example[name][real] for name in PER_TOKEN}
        part |= {name: example[name][scored] for name in PER_ANSWER}
        part["positions"] = example["positions"][:, real]
        part["groups"] = np.full(int(real.sum()), group, np.int32)
        if not group:
            part["groups"][:before] = SHARED
        skipped = before if group else 0
        part["answers"] = part["answers"] + np.int32(start - skipped)
        start += int(real.sum())
        for name, value in part.items():
            out.setdefault(name, []).append(value)
    row: Any = {name: np.concatenate(values, axis=-1) for name, values in out.items()}
    row = _padded(row, length, answers)
    for name in examples[0].keys() - row.keys():
        stacked = np.stack([example[name] for example in examples])
        row[name] = np.pad(stacked, ((0, images - len(examples)), *((0, 0),) * (stacked.ndim - 1)))
    row["real"] = np.arange(images) < len(examples)
    return row


def _padded(row: Example, length: int, answers: int) -> Example:
    def pad(name: str, value: np.ndarray) -> np.ndarray:
        size = answers if name in PER_ANSWER else length
        widths = ((0, 0),) * (value.ndim - 1) + ((0, size - value.shape[-1]),)
        return np.pad(value, widths, constant_values=PADDING.get(name, 0))

    ours = (*PER_TOKEN, *PER_ANSWER, "positions", "groups")
    return {name: pad(name, value) if name in ours else value for name, value in row.items()}
