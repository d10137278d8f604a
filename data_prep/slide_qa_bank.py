"""Facts of a slide and the words for them: what the slide templates may ask, and when the truth is clear enough to ask.

A fact is a name with one of a few values, read from the slide's white cells; where a value hangs on a cell more or less
(a share near an edge, two classes almost equally common) the fact is absent and nobody is asked about it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from data_prep import qa_bank
from data_prep.qa_bank import Wording
from data_prep.schema import WHITE_CELL_CLASSES
from data_prep.slide_table import PATTERNS

FEWEST_CELLS = 10  # with fewer a share means little
CLEAR = 5.0  # points between two classes' shares
NEAR = 1.0  # points: shares nearer to an edge of a range or of rounding are not asked about
EDGES = (5, 15, 35)  # percent; they lie between tens, so that a share to the nearest ten tells the range
RANGES = ("below 5 percent", "5 to 15 percent", "15 to 35 percent", "above 35 percent")
CLEAR_ATTRIBUTE = 10.0  # points by which an attribute's most common value must lead
ATTRIBUTE_NAMES = {
    "cell_size": "cell size",
    "cell_shape": "cell shape",
    "nucleus_shape": "nucleus shape",
    "nuclear_cytoplasmic_ratio": "nuclear-cytoplasmic ratio",
    "chromatin_density": "chromatin density",
    "cytoplasm_texture": "cytoplasm texture",
    "cytoplasm_colour": "cytoplasm color",
    "granule_type": "granule type",
    "granule_colour": "granule color",
    "granularity": "granularity",
}
PAIRS = tuple(itertools.combinations(WHITE_CELL_CLASSES, 2))
DOMINANT, SECOND, PATTERN, DIAGNOSIS = "dominant", "second", "pattern", "diagnosis"
DESCRIBE = "Describe the white blood cell differential of this slide."


@dataclasses.dataclass(frozen=True, slots=True)
class SlideCells:
    """What is known of a slide's white cells. `source`: "truth" (what was pasted or drawn) or "model" (the pipeline's
    counts). `attributes`: one mapping per cell that has any. `pattern`, `diagnosis` "": none."""

    slide_id: str
    split: str
    counts: Mapping[str, int]
    source: str
    pattern: str = ""
    attributes: Sequence[Mapping[str, str]] = ()
    domain: str = "id"
    diagnosis: str = ""

    @property
    def total(self) -> int:
        return sum(self.counts.get(name, 0) for name in WHITE_CELL_CLASSES)

    def share(self, name: str) -> float:
        """Percent of the white cells of the five classes."""
        return 100 * self.counts.get(name, 0) / self.total


def _differential(blank: str, statement: str, choice: str = "", statements: Mapping[str, str] | None = None) -> Wording:
    blanks, choices = (blank,) if blank else (), (choice,) if choice else ()
    return Wording("cell_differential", blanks, statement, choices, statements=statements or {})


def _wordings() -> dict[str, Wording]:
    words = {
        DOMINANT: _differential(
            "Which white blood cell type is most common on this slide?",
            "{}s are the most common white blood cells on this slide.",
            "Which of these white blood cell types is most common on this slide?",
        ),
        SECOND: _differential(
            "Which white blood cell type is second most common on this slide?",
            "{}s are the second most common white blood cells on this slide.",
            "Which of these white blood cell types is second most common on this slide?",
        ),
        # A pattern is a name that this project gives to a differential, so knowing it is knowledge; `abnormality` and
        # `diagnosis` would say that a patient has something, and nothing of that kind is meant.
        PATTERN: Wording(
            "knowledge",
            ("Which differential pattern does this slide show?",),
            "This slide shows differential pattern {}.",
            ("Which of these differential patterns does this slide show?",),
            option="pattern {}",
        ),
    }
    for first, second in PAIRS:
        sentences = {
            first: f"{first}s are more common than {second}s.",
            second: f"{second}s are more common than {first}s.",
        }
        question = f"Which are more common, {first}s or {second}s?"
        words[f"more {first} {second}"] = _differential(question, "", statements=sentences)
    for name in WHITE_CELL_CLASSES:
        words[f"range {name}"] = _differential(
            "", f"The share of {name}s is {{}}.", f"In which range is the share of {name}s?"
        )
        words[f"count {name}"] = _differential(
            f"Of 100 white blood cells, how many are {name}s, to the nearest ten?", ""
        )
    for attribute, name in ATTRIBUTE_NAMES.items():
        words[f"most {attribute}"] = Wording(
            "morphology",
            (f"What is the most common {name} on this slide?",),
            f"The most common {name} on this slide is {{}}.",
            (f"Which {name} is most common on this slide?",),
            answers=qa_bank.WORDINGS[attribute].answers,
        )
    # A recorded diagnosis is never stated: a question about it must not name it.
    words[DIAGNOSIS] = Wording(
        "diagnosis",
        ("Which condition fits this blood smear?",),
        "",
        ("Which of these conditions fits this blood smear best?",),
    )
    return words


WORDINGS = _wordings()
# By kind of question: true/false needs a statement, multiple choice a question and (in `balance`) three values.
STATED = tuple(fact for fact, words in WORDINGS.items() if words.statement or words.statements)
BLANKS = tuple(fact for fact, words in WORDINGS.items() if words.blanks)
CHOICES = tuple(fact for fact, words in WORDINGS.items() if words.choices)


def facts(slide: SlideCells) -> dict[str, str]:
    """Fact -> value of all that is clear about a slide; empty with fewer than FEWEST_CELLS white cells."""
    if slide.total < FEWEST_CELLS:
        return {}
    shares = {name: slide.share(name) for name in WHITE_CELL_CLASSES}
    ranked = sorted(WHITE_CELL_CLASSES, key=lambda name: -shares[name])
    found = {PATTERN: slide.pattern} if slide.pattern else {}
    found |= {DIAGNOSIS: slide.diagnosis} if slide.diagnosis else {}
    if shares[ranked[0]] - shares[ranked[1]] >= CLEAR:
        found[DOMINANT] = ranked[0]
        if shares[ranked[1]] - shares[ranked[2]] >= CLEAR:
            found[SECOND] = ranked[1]
    for first, second in PAIRS:
        if abs(shares[first] - shares[second]) >= CLEAR and tens(shares[first]) != tens(shares[second]):
            found[f"more {first} {second}"] = max(first, second, key=shares.__getitem__)
    for name, share in shares.items():
        if abs((share + 5) % 10 - 5) <= 5 - NEAR:
            found[f"count {name}"] = str(tens(share))
            found[f"range {name}"] = RANGES[sum(share > edge for edge in EDGES)]
    return found | _common_attributes(slide)


def tens(share: float) -> int:
    """A share in percent to the nearest ten (halves up)."""
    return int((share + 5) // 10) * 10


def _common_attributes(slide: SlideCells) -> dict[str, str]:
    found = {}
    for attribute in ATTRIBUTE_NAMES:
        values = Counter(cell[attribute] for cell in slide.attributes if cell.get(attribute))
        if values.total() < FEWEST_CELLS:
            continue
        (value, most), (_, next_most) = [*values.most_common(2), ("", 0)][:2]
        if 100 * (most - next_most) / values.total() >= CLEAR_ATTRIBUTE:
            found[f"most {attribute}"] = value
    return found


def answer(fact: str, value: str) -> str:
    """Canonical fill-in answer."""
    return WORDINGS[fact].answers.get(value, value)


def statement(fact: str, value: str) -> str:
    """A sentence that is true exactly for slides with this value."""
    words = WORDINGS[fact]
    return words.statements.get(value) or words.statement.format(answer(fact, value))


def option(facts: Sequence[str], values: Sequence[str]) -> str:
    """The values as a multiple-choice option."""
    return " and ".join(
        WORDINGS[fact].option.format(answer(fact, value)) for fact, value in zip(facts, values, strict=True)
    )


def vocabulary() -> Iterator[str]:
    """Every wording but the diagnosis' (its words are the table's), for a tokenizer that is to know the slide's too."""
    yield DESCRIBE
    for fact, words in WORDINGS.items():
        if fact == DIAGNOSIS:
            continue
        yield from (*words.blanks, *words.choices)
        for value in (*WHITE_CELL_CLASSES, *RANGES, *PATTERNS[1:]):
            if fact in STATED:
                yield statement(fact, value)
