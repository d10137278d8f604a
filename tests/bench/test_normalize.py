"""Normalisation: what must stay apart, what must fall together, and that doing it twice changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pbs_jax.bench.normalize import robust, unwrap
from pbs_jax.bench.records import load_questions


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("3 to 5 lobes", "3\u20135 lobes"),
        ("three to five", "3-5"),
        ("Pelger-Huet", "Pelger\u2013Huët"),
        ("neutro\u0301filo", "neutrófilo"),
        ("hyper\u2011segmented", "hyper-segmented"),
        ("\u201cround\u201d", '"round"'),
        ("≥ 20 %", ">=20%"),
        ("1,000 cells", "1000 cells"),
        ("İ", "i"),
        ("two nuclei", "2 nuclei"),
        ("a\u00a0b.", "A B"),
    ],
)
def test_these_fall_together(a: str, b: str) -> None:
    assert robust(a) == robust(b) != ""


@pytest.mark.parametrize(
    ("a", "b"),
    [("2×10⁹/L", "2×109/L"), ("10⁹", "109"), ("-5", "5"), ("2%", "2"), ("3.5", "35"), ("CD34+", "CD34"), ("<5", ">5")],
)
def test_these_stay_apart(a: str, b: str) -> None:
    assert robust(a) != robust(b)


def test_it_is_idempotent(shared: Path) -> None:
    items = load_questions(shared / "data/pbsbench/cell_ood_test.jsonl").items
    rng = random.Random(0)
    noise = ["".join(rng.choices("ab 1235,.-–%><=^⁹+_to\n'", k=rng.randint(1, 14))) for _ in range(5000)]
    for text in [*(qa.answer for qa in items), *(qa.question for qa in items), *noise]:
        assert robust(robust(text)) == robust(text), text


def test_wrappers_are_removed() -> None:
    assert unwrap("<think>so\nB</think> **D**") == "D"
    assert unwrap(r"\(\boxed{\text{B}}\)") == "B"
    assert unwrap("Ｂ\u200b") == "B"
    assert unwrap("10⁹/L") == "10^9/L"
