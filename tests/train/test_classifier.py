"""Heads on frozen features (paper 9.2): which cell is which class, and what they score."""

from __future__ import annotations

import numpy as np
import pytest

from pbs_jax.train.classifier import label_of, scores


@pytest.mark.parametrize(
    ("label", "comments", "subtype", "white"),
    [
        ("Monocyte", "", 2, 1),
        ("Others", "ImmatureGranulocyte", None, 1),
        ("Others", "Platelet", None, 0),
        ("Others", "Erythroblast", None, 0),
        ("Artifact", "", None, 0),
        ("Others", "", None, None),  # a cell of no known type is of neither class
    ],
)
def test_labels(label: str, comments: str, subtype: int | None, white: int | None) -> None:
    record = {"label": label, "comments": comments}
    assert (label_of(record, "subtype"), label_of(record, "white_cell")) == (subtype, white)


def test_scores_of_a_known_table() -> None:
    """Four cells of two classes, one wrong: AUC counts the pairs in the right order."""
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3], [0.2, 0.8]])
    found = scores(probabilities, np.array([0, 0, 1, 1]))
    assert found["accuracy"] == 0.75 and found["auc"] == 0.75
    assert found["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
