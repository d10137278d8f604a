"""Answers out of free-text replies, by profile. What can't be read is invalid: counted in its own column, never
guessed.

`paper` is the official scorer's reading, defects included (reference/official_code.md 5.2). `robust` reads what a
careful human would: an explicit statement first, then a leading or closing letter, then an option named at word
boundaries; letter and text that disagree, or two different letters, are invalid (reference/benchmark.md C,
reference/cases.md C49, C50).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence

from data_prep.schema import DataError
from pbs_jax.bench import normalize

PROFILES = ("paper", "robust")


@dataclasses.dataclass(frozen=True, slots=True)
class Extraction:
    """`value` is "True"/"False", an option's text or the reply; None is invalid. `rule` names the reading."""

    value: str | None
    rule: str


def extract(profile: str, question_type: str, prediction: str, options: Sequence[str] = ()) -> Extraction:
    """Reads one reply. `options` in the order shown. Raises DataError for an unknown profile."""
    if profile not in PROFILES:
        raise DataError(f'scoring profile "{profile}" is unknown: use {" or ".join(PROFILES)}')
    paper = profile == "paper"
    match question_type:
        case "true_false":
            return _paper_true_false(prediction) if paper else _robust_true_false(prediction)
        case "multiple_choice":
            return _paper_choice(prediction, options) if paper else _robust_choice(prediction, tuple(options))
    text = prediction if paper else normalize.unwrap(prediction)
    return Extraction(text, "text") if getattr(normalize, profile)(text) else Extraction(None, "empty")


# --- paper
# ---------------------------------------------------------------------------------------------------------------------

_PAPER_LABEL = re.compile(r"(?:\(([A-Z])\)|\[([A-Z])\]|([A-Z])[.):])(?:\s|\Z)|([A-Z])\s*\Z", re.IGNORECASE)


def paper_choice_text(prediction: str, options: Sequence[str]) -> str:
    """The reply with a leading letter replaced by its option; whatever else it is, as it stands."""
    reply = prediction.strip()
    if label := _PAPER_LABEL.match(reply):
        letter = next(group for group in label.groups() if group)
        index = ord(letter.upper()) - ord("A")
        if 0 <= index < len(options):  # case folding lets letters such as U+017F through
            return options[index]
    return reply


def _paper_true_false(prediction: str) -> Extraction:
    word = normalize.paper(prediction).split(" ")[0]
    return Extraction(word.capitalize(), "first word") if word in ("true", "false") else Extraction(None, "first word")


def _paper_choice(prediction: str, options: Sequence[str]) -> Extraction:
    text = paper_choice_text(prediction, options)
    chosen = _option_by_text(normalize.paper, text, options)
    return Extraction(chosen, "letter or text")


def _option_by_text(norm: Callable[[str], str], text: str, options: Sequence[str]) -> str | None:
    key = norm(text)
    return next((option for option in options if norm(option) == key), None) if key else None


# --- robust: true or false
# -----------------------------------------------------------------------------------------------------

_ECHO = re.compile(r"\(?\b(?:true\s*(?:/|or)\s*false|yes\s*(?:/|or)\s*no)\b\)?\s*[:?.]*", re.IGNORECASE)
_POLAR = {"true": True, "correct": True, "false": False, "incorrect": False, "untrue": False}
_LEADING = _POLAR | {"yes": True, "right": True, "t": True, "no": False, "wrong": False, "f": False}
_NEGATIONS = frozenset(
    [
        "not",
        "no",
        "never",
        "without",
        "cannot",
        "cant",
        "isnt",
        "arent",
        "wasnt",
        "doesnt",
        "dont",
        "didnt",
        "neither",
        "nor",
        "lacks",
        "lacking",
        "absent",
    ]
)
_CLAUSE_BREAKS = frozenset([normalize.STOP, "but", "rather", "instead", "however"])
_STATED = frozenset(["answer", "statement", "claim", "this", "it", "that", "is"])


def _robust_true_false(prediction: str) -> Extraction:
    text = _ECHO.sub(" ", normalize.unwrap(prediction))
    found = normalize.clauses(text)
    words = [token for token in found if token != normalize.STOP]
    if not words:
        return Extraction(None, "empty")
    # "No, ..." answers; "No granules are seen" doesn't.
    first = next(k for k, token in enumerate(found) if token != normalize.STOP)
    if found[first] in _LEADING and (found[first] in _POLAR or found[first + 1 : first + 2] in ((), (normalize.STOP,))):
        return Extraction(str(_LEADING[found[first]]), "leading word")
    said = [
        (k, _LEADING[token] != _negated(found, k))
        for k, token in enumerate(found)
        if token in _POLAR or (token in ("yes", "no") and "answer" in found[max(0, k - 3) : k])
    ]
    stated = {value for k, value in said if _STATED & set(found[max(0, k - 3) : k])}
    if len(stated) == 1:
        return Extraction(str(stated.pop()), "statement")
    if len({value for _, value in said}) == 1:
        return Extraction(str(said[0][1]), "only polarity")
    return Extraction(None, "both polarities" if said else "no polarity")


def _negated(found: Sequence[str], k: int, window: int = 3) -> bool:
    """Whether a negation stands within `window` tokens before position k in the same clause."""
    for token in reversed(found[max(0, k - window) : k]):
        if token in _CLAUSE_BREAKS:
            return False
        if token in _NEGATIONS:
            return True
    return False


# --- robust: multiple choice
# ---------------------------------------------------------------------------------------------------

_EXPLICIT = re.compile(
    r"(?i:\b(?:answer|choice|option|choose|select|pick|go with)\b(?:\s+(?:is|would be|should be|must be))?\s*[:=]?\s*"
    r"(?:option\s+|choice\s+|letter\s+)?)"
    r"(?:[(\[]\s*([A-Za-z])\s*[)\]]|(A)(?![\w'-])(?!\s+[a-z])|([B-Z])(?![\w'-])|([b-z])(?![\w'-])|(a)(?=\s*(?:[.):,]|\Z)))"
)
_SAID_RIGHT = re.compile(r"(?<![\w'-])[(\[]?([A-Z])[)\]]?\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b")
_LABEL = re.compile(r"(?:[(\[]([A-Za-z])[)\]]|([A-Za-z])[.):](?=\s|\Z)|([A-Z])\s*(?:[,;]|-(?=\s)|\n)|([A-Za-z])\s*\Z)")
_LISTED = re.compile(r"(?:\A|[;,\n])\s*[(\[]?([A-Z])[)\].:]\s+\w")
_LETTER = re.compile(r"(?<![\w'-])([A-Z])(?![\w'-])(?!\s+(?!and\b|or\b|is\b)[a-z])")
_LAST_LETTER = re.compile(r"(?<![\w'-])[(\[]?([A-Z])[)\]]?\s*[.!]?\s*\Z")
_DENIED_LETTER = re.compile(r"\b(?:not|isn't|neither|nor|eliminate|exclude)\s+[(\[]?([A-Z])\b", re.IGNORECASE)
_ARTICLES = ("the", "a", "an")


def _robust_choice(prediction: str, options: tuple[str, ...]) -> Extraction:
    text = normalize.unwrap(prediction)
    if len(text) == 1 and text.isalpha() and text.isascii() and text not in options:
        return _by_letter(text, options, "letter")
    if not normalize.tokens(text):
        return Extraction(None, "empty")
    if (option := _option_by_text(normalize.robust, text, options)) is not None:
        return Extraction(option, "option text")
    stated = [letter for match in _EXPLICIT.finditer(text) for letter in match.groups() if letter]
    stated += [match[1] for match in _SAID_RIGHT.finditer(text)]
    if stated:
        return _by_letter(stated[-1], options, "statement")
    if label := _LABEL.match(text):
        return _leading_letter(text, label, options)
    letters = set(_LETTER.findall(text)) - {letter.upper() for letter in _DENIED_LETTER.findall(text)}
    if closing := _LAST_LETTER.search(text):
        if letters - {closing[1]}:
            return Extraction(None, "several letters")
        if closing[1] in letters:
            return _by_letter(closing[1], options, "closing letter")
    named = _named_options(text, options)
    if len(named) == 1:
        return Extraction(options[named.pop()], "named option")
    return Extraction(None, "several options" if named else "no option")


def _by_letter(letter: str, options: Sequence[str], rule: str) -> Extraction:
    index = ord(letter.upper()) - ord("A")
    return Extraction(options[index], rule) if index < len(options) else Extraction(None, "letter not offered")


def _leading_letter(text: str, label: re.Match[str], options: tuple[str, ...]) -> Extraction:
    letter = next(group for group in label.groups() if group).upper()
    rest = text[label.end() :]
    listed = {found.upper() for found in _LISTED.findall(text)} | {letter}
    # "A, B" and "A: no; B: yes" choose nothing; "B. Eliminated: (A), (C)" does.
    if len(listed) > 1 or (label.group().rstrip()[-1] in ",;" and _LETTER.match(rest.strip())):
        return Extraction(None, "several letters")
    choice = _by_letter(letter, options, "leading letter")
    words = normalize.tokens(rest)
    words = words[1:] if words[:1] and words[0] in _ARTICLES else words
    begins = [option for option in options if (key := _key(option)) and words[: len(key)] == key]
    if choice.value is not None and begins and choice.value not in begins:
        return Extraction(None, "letter and text disagree")
    return choice


@functools.lru_cache(maxsize=1 << 14)
def _key(option: str) -> tuple[str, ...]:
    return normalize.tokens(option)


def _named_options(text: str, options: tuple[str, ...]) -> set[int]:
    """Options affirmed in the reply: whole tokens; longest first, as a long mention hides the short ones inside it."""
    found = list(normalize.clauses(text))
    named = set()
    for k in sorted(range(len(options)), key=lambda k: -len(_key(options[k]))):
        for start, stop in mentions(found, _key(options[k])):
            if not _negated(found, start):
                named.add(k)
            found[start:stop] = [""] * (stop - start)
    return named


def mentions(found: Sequence[str], key: Sequence[str]) -> list[tuple[int, int]]:
    """[start, stop) of the token sequence `key` in a reply's clauses, whatever punctuation stands inside it."""
    places = [k for k, token in enumerate(found) if token != normalize.STOP]
    words, wanted, size = [found[k] for k in places], list(key), len(key)
    if not size or wanted[0] not in words:
        return []
    starts = [k for k in range(len(words) - size + 1) if words[k : k + size] == wanted]
    return [(places[k], places[k + size - 1] + 1) for k in starts]


def affirmed(found: Sequence[str], key: Sequence[str]) -> bool:
    """Whether `key` is mentioned at token boundaries outside a negation."""
    return any(not _negated(found, start) for start, _ in mentions(found, key))
