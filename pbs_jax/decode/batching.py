"""How questions are asked, in JAX and in PyTorch alike: which go together, and what a closed question may be answered.

Free of jax and torch, for both answerers.
"""

from __future__ import annotations

from collections.abc import Sequence

from data_prep.prompts import letter


def batch_rows(prompts: Sequence[Sequence[int]], kinds: Sequence[str], size: int) -> list[list[int]]:
    """Row numbers in batches of one question type and of alike lengths: little padding, few decoding steps."""
    batches = []
    for kind in sorted(set(kinds)):
        rows = sorted((i for i, own in enumerate(kinds) if own == kind), key=lambda i: len(prompts[i]))
        batches += [rows[start : start + size] for start in range(0, len(rows), size)]
    return batches


def batch_by_limit(prompts: Sequence[Sequence[int]], limits: Sequence[int], size: int) -> list[list[int]]:
    """Row numbers in batches of whatever types, the longest answers (`limits`, in tokens) together, then alike prompts: for
    a decoder whose finished rows leave the batch."""
    rows = sorted(range(len(prompts)), key=lambda i: (-limits[i], len(prompts[i])))
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def first_words(kind: str, options: int) -> tuple[str, ...]:
    """The allowed answers of a closed question with so many options; none for an open or fill-in-the-blank one."""
    match kind:
        case "true_false":
            return ("true", "false")
        case "multiple_choice":
            return tuple(map(letter, range(options)))
    return ()
