"""Text normalisation of the two scoring profiles.

`paper` follows the official scorer to the letter (reference/official_code.md 5.1). `robust` keeps what carries
meaning in haematology (signs, decimals, per cent, superscripts, ranges) and folds what doesn't (dash shapes, accents,
number words, case, wrappers).
"""

from __future__ import annotations

import functools
import re
import unicodedata

_PAPER_DROP = re.compile(r"[^\w\s]")

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT_RUN = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_ACCENTS = re.compile(r"[\u0300-\u036f]")
_DASHES = re.compile(r"[\u2010-\u2015\u2212]")
_QUOTES = re.compile(r"[\u2018\u2019\u201b`]")
_NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b")
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:\^[+-]?\d+)?(?![\w^])"
_TOKEN = re.compile(
    rf"(?P<number>(?:[<>]=?\s*)?(?:(?<![\w)%])-)?{_NUMBER}(?:(?:-|\s+-\s+){_NUMBER})?(?:\s*%)?)"
    r"|(?P<word>(?:[^\W_])+(?:\^[+-]?\d+)?\+?)"
    r"|(?P<stop>[,;:.!?\n])"
)
_RANGE_START, _RANGE_END = re.compile(r"(?:[<>]=?)?-?[\d.^]+"), re.compile(r"[\d.^]+%?")

_REASONING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE)
_LATEX = re.compile(r"\\(?:boxed|text|textbf|mathbf|mathrm|mathit)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\*+|__|`+|\$+|\\[()\[\]]|^\s*#+\s+|^\s*>\s+", re.MULTILINE)

STOP = ","  # the token that stands for a clause boundary


@functools.lru_cache(maxsize=1 << 16)
def paper(text: str) -> str:
    """NFKC, casefold, everything but letters, digits, underscore and white space to a space, spaces collapsed."""
    return " ".join(_PAPER_DROP.sub(" ", unicodedata.normalize("NFKC", text).casefold()).split())


@functools.lru_cache(maxsize=1 << 12)
def unwrap(text: str) -> str:
    """Reply without reasoning tags, markdown, LaTeX wrappers, invisible characters; full-width letters made plain."""
    text = _drop_invisible(_REASONING.sub(" ", text))
    while (inner := _LATEX.sub(r"\1", text)) != text:
        text = inner
    text = _MARKS.sub("", _raise_powers(text))
    return _DASHES.sub("-", unicodedata.normalize("NFKC", text)).strip()


@functools.lru_cache(maxsize=1 << 16)
def clauses(text: str) -> tuple[str, ...]:
    """Robust tokens with STOP at clause boundaries: what negation is judged on."""
    out = []
    for match in _TOKEN.finditer(_fold(text)):
        token = match.group()
        if match.lastgroup == "number":
            token = "".join(token.replace(",", "").split())
        elif match.lastgroup == "stop":
            token = STOP
        out.append(token)
    return tuple(_join_ranges(out))


@functools.lru_cache(maxsize=1 << 16)
def tokens(text: str) -> tuple[str, ...]:
    """Robust tokens: letters of every script, numbers whole ("3-5", ">=20%", "10^9"), no punctuation."""
    return tuple(_join_ranges([token for token in clauses(text) if token != STOP]))


@functools.lru_cache(maxsize=1 << 16)
def robust(text: str) -> str:
    """Robust tokens joined by a space; idempotent."""
    return " ".join(tokens(text))


def _join_ranges(found: list[str]) -> list[str]:
    """ "3 to 5" as the one token "3-5"."""
    out: list[str] = []
    for token in found:
        if len(out) > 1 and out[-1] == "to" and _RANGE_START.fullmatch(out[-2]) and _RANGE_END.fullmatch(token):
            out[-2:] = [f"{out[-2]}-{token}"]
        else:
            out.append(token)
    return out


def _raise_powers(text: str) -> str:
    """Superscripts as ^n, so that compatibility folding can't turn 10⁹ into 109."""
    return _SUPERSCRIPT_RUN.sub(lambda match: "^" + match.group().translate(_SUPERSCRIPTS), text)


def _drop_invisible(text: str) -> str:
    """Without format characters (zero-width spaces, joiners, byte order marks)."""
    return text if text.isascii() else "".join(c for c in text if unicodedata.category(c) != "Cf")


def _fold(text: str) -> str:
    text = _raise_powers(text).casefold()
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text)))
        text = _DASHES.sub("-", _QUOTES.sub("'", text)).replace("≥", ">=").replace("≤", "<=").replace("×", "x")
        text = _drop_invisible(text)
    return _NUMBER_WORD.sub(lambda match: str(_NUMBER_WORDS.index(match.group())), text.replace("'", ""))
