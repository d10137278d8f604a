"""Reading answers: the 50 cases in both profiles, faults that users of other harnesses met, the official reader."""

from __future__ import annotations

import re
import unicodedata

import pytest

from data_prep.schema import DataError
from pbs_jax.bench.extract import extract
from pbs_jax.bench.metrics import score_answer
from tests.bench.cases import CHOICE, DEBATABLE, FILL, OPEN, O


def _type(options: tuple[str, ...]) -> str:
    return "multiple_choice" if options else "true_false"


@pytest.mark.parametrize(("number", "options", "prediction", "gold", "robust", "official"), CHOICE)
def test_closed_cases(
    number: int, options: tuple[str, ...], prediction: str, gold: str, robust: int | None, official: int
) -> None:
    paper = score_answer("paper", _type(options), prediction, gold, options)
    assert paper.columns["right"] == official
    found = score_answer("robust", _type(options), prediction, gold, options)
    assert found.columns["right"] == (robust or 0)
    assert found.columns["invalid"] == (robust is None), found.extraction


@pytest.mark.parametrize(
    ("number", "prediction", "gold", "robust", "official"),
    [pytest.param(*case, id=f"{case[0]}{' debatable' if case[0] in DEBATABLE else ''}") for case in FILL],
)
def test_fill_blank_cases(
    number: int, prediction: str, gold: str, robust: tuple[int, int], official: tuple[int, int]
) -> None:
    paper = score_answer("paper", "fill_blank", prediction, gold).columns
    assert (paper["exact"], paper["partial"]) == official
    found = score_answer("robust", "fill_blank", prediction, gold).columns
    assert (found["exact"], found["partial"]) == robust


@pytest.mark.parametrize(("number", "prediction", "gold", "expected"), OPEN)
@pytest.mark.parametrize("profile", ["paper", "robust"])
def test_open_cases(profile: str, number: int, prediction: str, gold: str, expected: tuple[float, float]) -> None:
    found = score_answer(profile, "open", prediction, gold).columns
    assert (found["bleu1"], found["rouge_l"]) == pytest.approx(expected, abs=1e-12)
    assert found["invalid"] == (prediction == "")


def test_all_fifty_cases_are_here() -> None:
    assert sorted(case[0] for case in [*CHOICE, *FILL, *OPEN]) == list(range(1, 51))


FOUR = ("first thing", "second thing", "third thing", "fourth thing")


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("Answer: **D**", "D"),
        ("(D)", "D"),
        ("d.", "D"),
        ("D) fourth thing", "D"),
        (r"\boxed{D}", "D"),
        (r"ANSWER: $\text{D}$", "D"),
        ("The answer is\n\nD", "D"),
        ("Based on the image, a cell ... D", "D"),
        ("None of the above", None),
        ("I don't know", None),
        ("D\u200b", "D"),
        ("B. Note that A is a common distractor.", "B"),
        ("(B). Eliminated: (A),(C),(D)", "B"),
        ("Not A, so C", "C"),
        ("A and C", None),
        ("A or B?", None),
        ("The answer is a third thing", "C"),
        ("The answer is a round cell", None),
        ("I choose B because it is lobed", "B"),
        ("The correct option is (b)", "B"),
        ("B is correct.", "B"),
        ("It shows vitamin B deficiency", None),
        ("The answer is A. No, wait: the answer is C.", "C"),
        ("It is not the first thing but the second thing", "B"),
        ("first thing or second thing", None),
        ("<think>A? B?</think>C", "C"),
        ("<think>It must be A", None),
        ("F", None),
        (" \f", None),
    ],
)
def test_choices_are_read_and_never_guessed(prediction: str, letter: str | None) -> None:
    found = extract("robust", "multiple_choice", prediction, FOUR)
    assert found.value == (FOUR["ABCD".index(letter)] if letter else None), found.rule


def test_a_long_option_hides_the_short_one_inside_it() -> None:
    options = ("Lymphocyte", "Reactive lymphocyte", "Monocyte")
    assert extract("robust", "multiple_choice", "This is a reactive lymphocyte.", options).value == options[1]
    assert extract("robust", "multiple_choice", "This is a lymphocyte.", options).value == options[0]


@pytest.mark.parametrize(
    ("prediction", "value"),
    [
        ("No abnormal granules are visible, so the statement is true.", "True"),
        ("The statement is not correct.", "False"),
        ("This isn't true", "False"),
        ("It cannot be false", "True"),
        ("The answer is yes", "True"),
        ("True, not false", "True"),
        ("It is true that the claim is false.", None),
        ("F", "False"),
        ("The nucleus", None),
        ("It may be true or it may be incorrect", None),
        ("<think>true", None),
    ],
)
def test_truth_is_read_with_its_negations(prediction: str, value: str | None) -> None:
    assert extract("robust", "true_false", prediction).value == value


@pytest.mark.parametrize("style", ["{}", "{}.", "{})", "({})", "[{}]", "{}:", " {} ", "{}. and more", "({}) and more"])
def test_official_reader_takes_these_letters(style: str) -> None:
    for letter in "BbDd":
        gold = O["abcd".index(letter.lower())]
        assert score_answer("paper", "multiple_choice", style.format(letter), gold, O).columns["right"] == 1


@pytest.mark.parametrize(
    "prediction",
    ["B.Foo", "B - Foo", "B, x", "B\nfoo", "**B**", "Answer: B", "The answer is B", "option B", "(B", "B]", "E", "[B)"],
)
def test_official_reader_leaves_these(prediction: str) -> None:
    assert score_answer("paper", "multiple_choice", prediction, "Bilobed", O).columns["right"] == 0


def test_paper_reading_agrees_with_an_independent_one() -> None:
    """Every short string over a telling alphabet, against a parser written from official_code.md 5.2."""

    def normal(text: str) -> str:
        folded = unicodedata.normalize("NFKC", text).casefold()
        return " ".join("".join(c if c.isalnum() or c == "_" or c.isspace() else " " for c in folded).split())

    def read(reply: str, options: tuple[str, ...]) -> str:
        text = reply.strip()
        label, rest = text[:1], text[1:]
        if len(text) >= 3 and text[0] + text[2] in ("()", "[]"):
            label, rest = text[1], text[3:]
        elif len(text) >= 2 and text[1] in ".):":
            rest = text[2:]
        elif len(text) != 1:
            return text
        if not re.fullmatch("[A-Za-z]", label) or (rest and not rest[0].isspace()):
            return text
        index = ord(label.upper()) - ord("A")
        return options[index] if index < len(options) else text

    alphabet = ["a", "B", "E", ".", ")", "(", "[", "]", ":", " ", "\n", "x"]
    texts = [""]
    for _ in range(4):
        texts = [t + c for t in texts for c in alphabet] + texts[:1]
        for text in texts:
            expected = normal(read(text, O)) == normal("Bilobed")
            assert score_answer("paper", "multiple_choice", text, "Bilobed", O).columns["right"] == expected, text


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(DataError, match='profile "lenient" is unknown'):
        extract("lenient", "open", "x")
