"""What must be said beside a number: what the release's splits share, and which model wrote the questions it answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from data_prep.schema import QA
from pbs_jax.bench.paper import CLOSED_LOOP, WRITER

RELEASED = ("S-BIAD440", "AML-Cytomorphology_LMU", "APL", "WBC_LISC")
CLOSED_LOOP_NOTE = f"{CLOSED_LOOP} This model wrote the questions and gold answers: a closed loop."
SEEN = "(seen by backbone)"
_SNAPSHOT = re.compile(r"[-@](?:20\d\d|v\d|\d{4,}).*")


def released(qa: QA) -> bool:
    """Whether the question is one of the released files'."""
    return str(qa.source.get("dataset", "")) in RELEASED and not qa.provenance


def by_track(asked: Sequence[QA]) -> dict[str, tuple[str, ...]]:
    """Notes that stand under every table of a track; tracks of other questions than the released have none."""
    tests = [qa for qa in asked if qa.split == "test" and released(qa)]
    tracks = {f"{qa.level}_{qa.domain}" for qa in tests}
    slides = {str(qa.source.get("slide_id")) for qa in tests if (qa.level, qa.domain) == ("cell", "id")}
    notes = {
        "cell_id": (
            f"Released cell questions, in domain: all {len(slides)} test slides also feed training; only crops are held out.",
            "They are not the paper's questions: 98 % of the true/false golds are True here, about 61 % in the paper "
            "(inferred from its Table 8).",
        ),
        "cell_ood": (
            "Released cell questions, out of domain: 97 % of those that are not true/false name a cell type; eosinophils "
            "and the class Others, which the paper's Table 7 lists, are not among them.",
        ),
        "slide_id": (
            "Released slide questions: at least 18 of the 23 test slides are seen in phase 3, through their cells.",
            "The gold of the cell differential is a classifier's estimate, not a count by experts.",
        ),
    }
    return {track: notes[track] for track in sorted(tracks) if track in notes}


def writers(asked: Iterable[QA]) -> set[str]:
    """Models that wrote the questions: the release's, and those that provenance names."""
    found = set()
    for qa in asked:
        if qa.provenance:
            found.add(str(qa.provenance.get("model") or ""))
        elif released(qa):
            found.add(WRITER)
    return {_bare(name) for name in found} - {""}


def wrote_them(card: Mapping[str, Any], name: str, asked: Iterable[QA]) -> bool:
    """Whether the model that a run.json describes, in any snapshot, is one of the questions' writers."""
    model = card.get("model", {})
    known = [name, *(str(model.get(key) or "") for key in ("model", "source", "repository", "baseline"))]
    return bool({_bare(text) for text in known} & writers(asked))


def seen_by_backbone(card: Mapping[str, Any], asked: Iterable[QA]) -> tuple[str, ...]:
    """The questions' image sets that the backbone of the model in a run.json was pre-trained on."""
    seen = card.get("model", {}).get("seen_by_backbone", ())
    return tuple(sorted({str(qa.source.get("dataset", "")) for qa in asked} & set(seen)))


def seen_note(seen: Sequence[str]) -> tuple[str, ...]:
    return (f"{SEEN}: the backbone was pre-trained on {', '.join(seen)}; not unseen images.",) if seen else ()


def _bare(name: str) -> str:
    """gpt-4o of "openai/GPT-4o-2024-11-20"."""
    return _SNAPSHOT.sub("", name.casefold().rpartition("/")[2])
