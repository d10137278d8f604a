"""Which image a question is asked about, so that its text alone cannot win: the rules of the cell and slide templates.

Images are chosen for statements and for (option set, gold), never the other way round: each statement is true for half
of its images, each option of a set is gold equally often. Scarce values give fewer questions, not unbalanced ones.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from data_prep.schema import QA, question_id, stable_hash

Values = tuple[str, ...]
type Pools[T] = Mapping[Values, Sequence[T]]  # values of one or more facts -> the images that have them


class Placed(Protocol):
    """A cell or a slide: what of it every question repeats."""

    @property
    def domain(self) -> str: ...
    @property
    def split(self) -> str: ...


def template_question(
    space: str,
    image: Placed,
    image_id: str,
    kind: str,
    task: str,
    question: str,
    answer: str,
    options: Iterable[str] = (),
    level: str = "cell",
    **provenance: Any,
) -> QA:
    """A question as every template writes it: options sorted, and an id from what is asked, never from the answer."""
    shown = tuple(sorted(options))
    return QA(
        id=question_id(space, image_id, kind, question, *shown),
        image_id=image_id,
        level=level,
        domain=image.domain,
        split=image.split,
        task=task,
        question_type=kind,
        question=question,
        answer=answer,
        options=shown,
        provenance={"writer": "template", **provenance},
    )


class Load[T]:
    """How often each image was chosen, in all and per subject, so that choices spread evenly; ties break by hash."""

    def __init__(self, seed: int, id: Callable[[T], str]) -> None:
        self.seed = seed
        self.id = id
        self.counts: Counter[tuple[str, ...]] = Counter()

    def take(self, pool: Sequence[T], count: int, subject: str, salt: str) -> list[T]:
        """The `count` images of the pool least often chosen for the subject, then least often in all."""

        def key(image: T) -> tuple[int, int, int]:
            id = self.id(image)
            return self.counts[id, subject], self.counts[id,], stable_hash(self.seed, subject, salt, id)

        chosen = sorted(pool, key=key)[:count]
        for image in chosen:
            self.counts[self.id(image), subject] += 1
            self.counts[self.id(image),] += 1
        return chosen


def statements[T](
    pools: Mapping[str, Pools[T]], total: float, weight: Callable[[str], float], load: Load[T]
) -> Iterator[tuple[str, str, T]]:
    """(fact, stated value, image), about `total` in all and by the facts' weights.

    Every statement is true for half of its images; the others spread evenly over the fact's other values.
    """
    stated = [(fact, value) for fact, pool in pools.items() if len(pool) > 1 for value in pool]
    weights = {s: weight(s[0]) for s in stated}
    for fact, (value,) in sorted(stated, key=lambda s: (len(pools[s[0]][s[1]]), s)):
        true = pools[fact][value,]
        others = [pool for other, pool in pools[fact].items() if other != (value,)]
        quota = math.ceil(total * weights[fact, (value,)] / sum(weights.values()) / 2)
        half = min(quota, len(true), sum(map(len, others)))
        counts = [half, *spread(half, [len(pool) for pool in others])]
        for pool, count in zip([true, *others], counts, strict=True):
            for image in load.take(pool, count, fact, value):
                yield fact, value, image


def choices[T](
    pools: Mapping[Values, Pools[T]],
    total: float,
    options: int,
    text: Callable[[Sequence[str], Sequence[str]], str],
    load: Load[T],
) -> Iterator[tuple[Values, dict[Values, str], Values, T]]:
    """(facts, values -> option text, gold values, image), shared evenly among facts, then option sets, then golds.

    Only values that occur in these images are options, else the absent ones could be ruled out from the text.
    """
    sets = {facts: _option_sets(pools[facts], options) for facts in pools}
    capacity = {facts: [len(s) * min(len(pools[facts][v]) for v in s) for s in sets[facts]] for facts in pools}
    quotas = spread(math.ceil(total), [sum(capacity[facts]) for facts in pools])
    for facts, quota in sorted(zip(pools, quotas, strict=True), key=lambda pair: (sum(capacity[pair[0]]), pair)):
        subject = "+".join(facts)
        for values, share in zip(sets[facts], spread(quota, capacity[facts]), strict=True):
            texts = {value: text(facts, value) for value in values}
            for gold in values:
                salt = "|".join([*texts.values(), texts[gold]])
                for image in load.take(pools[facts][gold], math.ceil(share / len(values)), subject, salt):
                    yield facts, texts, gold, image


def _option_sets(pool: Pools, options: int) -> list[tuple[Values, ...]]:
    """Every set of `options` occurring values; all when fewer occur; none below three (true/false asks those)."""
    return list(itertools.combinations(pool, min(options, len(pool)))) if len(pool) >= 3 else []


def by_values[T](images: Sequence[T], recorded: Callable[[T], Sequence[str | None]]) -> dict[Values, list[T]]:
    """Images by their recorded values, in sorted order of values; images that lack one are left out."""
    pools: dict[Values, list[T]] = {}
    for image in images:
        found = recorded(image)
        values = tuple(value for value in found if value is not None)
        if len(values) == len(found):
            pools.setdefault(values, []).append(image)
    return dict(sorted(pools.items()))


def spread(total: int, capacities: Sequence[int]) -> list[int]:
    """Shares of `total` as even as the capacities allow, in their order; less than `total` only when all are full."""
    shares = [0] * len(capacities)
    for done, k in enumerate(sorted(range(len(capacities)), key=capacities.__getitem__)):
        shares[k] = min(capacities[k], round(total / (len(capacities) - done)))
        total -= shares[k]
    return shares
