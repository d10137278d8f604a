"""Which white cells lie on which mosaic: five patterns of a differential, drawn so that every split has all of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_prep.mosaic_fields import Stain
from data_prep.mosaic_sources import Measured
from data_prep.schema import WHITE_CELL_CLASSES, DataError, stable_hash

# Mean shares of the classes in WHITE_CELL_CLASSES order: each pattern has its own dominant class and a second one.
PATTERNS: dict[str, tuple[float, ...]] = {
    "A": (0.52, 0.24, 0.08, 0.08, 0.08),
    "B": (0.24, 0.52, 0.08, 0.08, 0.08),
    "C": (0.08, 0.24, 0.52, 0.08, 0.08),
    "D": (0.24, 0.08, 0.08, 0.52, 0.08),
    "E": (0.08, 0.08, 0.24, 0.08, 0.52),
}
CONCENTRATION = 30.0  # of the Dirichlet: a share of 0.5 varies by 0.09 from slide to slide
CELLS = (20, 40)  # white cells per slide, inclusive
FIELDS_PER_SLIDE = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One slide before it is drawn. `stain` comes from a picture of the split, chosen without regard to its class."""

    slide_id: str
    split: str
    pattern: str
    cells: tuple[Measured, ...]
    fields: tuple[Path, ...]
    stain: Stain


def plan(
    pools: Mapping[str, Sequence[Measured]],
    fields: Mapping[str, Sequence[Path]],
    *,
    slides: int,
    held_out: int,
    val: int,
    seed: int,
) -> list[Plan]:
    """All slides, patterns equally often in every split, the cells of a class used equally often.

    Raises DataError when a split has fewer cells of a class than one slide needs.
    """
    names = [f"mosaic-{number:04d}" for number in range(slides)]
    ordered = sorted(names, key=lambda name: stable_hash("split", seed, name))
    ends = {"test": held_out, "val": held_out + val, "train": slides}
    plans = []
    start = 0
    for name, end in ends.items():
        by_class = {label: [cell for cell in pools[name] if cell.source.label == label] for label in WHITE_CELL_CLASSES}
        supply = {label: _in_turn(cells, seed) for label, cells in by_class.items()}
        donors = [cell.stain for cell in pools[name] if cell.stain.red.min() > 0.05]
        for number, slide_id in enumerate(ordered[start:end]):
            pattern = list(PATTERNS)[number % len(PATTERNS)]
            counts = draw_counts(pattern, np.random.default_rng(stable_hash("counts", seed, slide_id)))
            if lacking := [label for label, n in counts.items() if n > len(by_class[label])]:
                raise DataError(f"split {name} has too few usable cells of {', '.join(lacking)} for slide {slide_id}")
            cells = tuple(itertools.chain(*(itertools.islice(supply[label], n) for label, n in counts.items())))
            ranks = {path: stable_hash("fields", seed, slide_id, path.name) for path in fields[name]}
            chosen = sorted(ranks, key=ranks.__getitem__)
            stain = donors[stable_hash("stain", seed, slide_id) % len(donors)]
            plans.append(Plan(slide_id, name, pattern, cells, tuple(chosen[:FIELDS_PER_SLIDE]), stain))
        start = end
    return sorted(plans, key=lambda p: p.slide_id)


def _in_turn(cells: Sequence[Measured], seed: int) -> Iterator[Measured]:
    """The cells round after round, so that none is used twice before all were used once."""
    yield from itertools.cycle(sorted(cells, key=lambda cell: stable_hash("turn", seed, cell.source.cell_id)))


def draw_counts(pattern: str, rng: np.random.Generator) -> dict[str, int]:
    """Number of white cells of each class: Dirichlet shares around the pattern's, then a multinomial."""
    total = int(rng.integers(CELLS[0], CELLS[1] + 1))
    shares = rng.dirichlet(CONCENTRATION * np.array(PATTERNS[pattern]))
    return dict(zip(WHITE_CELL_CLASSES, map(int, rng.multinomial(total, shares)), strict=True))
