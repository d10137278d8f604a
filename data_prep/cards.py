"""Cards that go with data sets and models: what they are, how they were made, and the limits that a user must know.

The limits are those that the paper states for its own data and model (sections 3.1, 8), in our words, and those that we
measured on the released files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import io
from data_prep.html import RESEARCH_NOTICE

DATA_LIMITS = (
    (
        "Cohort",
        "The paper's slides come from one public collection of people with anemia, myelodysplastic syndrome or neither. "
        "Other diseases are missing, age, sex and origin are not known, and other scanners, stains and laboratories may "
        "look different. Nothing here says how well a model does outside such a cohort.",
    ),
    (
        "Noisy labels",
        "Cell types were named by people, who differ, and for most cells by a classifier trained on a small reviewed "
        "part. Only samples were checked. Some labels are wrong, and rare types more often than common ones.",
    ),
    (
        "Surrogate differential",
        "The share of each cell type on a slide is what a classifier counted, not what an expert counted. An answer that "
        "agrees with it agrees with the classifier: scores on such questions are relative to it.",
    ),
    (
        "Closed loop",
        "Where a language model wrote the captions, questions and answers, other models are tested on its style and its "
        "mistakes, and models of its family may be favored. It was told the cell type or the diagnosis while writing; "
        "the test shows the image only, so the two do not see the same.",
    ),
    (
        "Hallucination",
        "A language model may have described what is not in the picture. Rules and samples catch a part of it. A claim "
        "that only a look at the picture can refute stays in.",
    ),
)
MODEL_LIMITS = (
    (
        "Hallucination",
        "The model can state findings that the picture does not show, with the same confidence as right ones. It inherits "
        "this from its language model, from training text that was partly machine-written, and from fitting a small set.",
    ),
    (
        "Cohort",
        "It has learned from a narrow collection of slides or from single-cell pictures of healthy donors, and says "
        "something about any picture, also of kinds that it has never seen.",
    ),
    (
        "Noisy and surrogate labels",
        "Its training answers hold wrong cell types and differentials that a classifier estimated; it repeats their "
        "errors, and tests made in the same way do not show them.",
    ),
    (
        "Closed loop",
        "Training and test questions come from the same writer, template or model. High scores show that its style was "
        "learned as well.",
    ),
)
INTENDED = (
    "Intended use: studies of how such models are trained and tested, and teaching. Not intended: any decision about a "
    "patient, and pictures of another stain, scanner or kind than its training data's."
)
RELEASED_NOTE = (
    "As released, the right option stands first in about nine of ten cell choices and about 98 % of the cell statements "
    "are true; an answer that ignores the picture scores accordingly. Shuffle options, and report balanced accuracy."
)
TEMPLATE_NOTE = (
    "Written by templates from recorded labels and attributes: balanced and reproducible, and narrower in language than "
    "what people or language models write."
)


def data_card(name: str, summary: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Markdown card of a question set. `summary`: the content of instruct.json, or `job_summary`."""
    known = {"template": TEMPLATE_NOTE, "release": RELEASED_NOTE}
    made = known.get(str(summary.get("provider")), "Written by a language model and screened by rules; see below.")
    figures = [f"- {key}: {_inline(value)}" for key, value in summary.items()]
    return _card(name, "Question set", [made, *notes], figures, DATA_LIMITS)


def job_summary(root: Path) -> dict[str, Any]:
    """Figures of a data job's folder from its manifests; empty where it holds no dataset."""
    names = [name for name in ("slides", "cells", "cell_qa", "slide_qa") if (root / name / io.VERSION).is_dir()]
    found: dict[str, Any] = {}
    for name in names:
        manifest = io.read_manifest(root / name)
        released = manifest["config"].get("source") == "released"
        found["provider"] = "release" if released else found.get("provider", "template")
        found[name] = {
            "content id": manifest["content_id"][:16], **manifest["identity"], "by split": manifest["splits"],
            "split by": manifest["split"]["level"], "licences": "; ".join(manifest["licences"]) or "none stated",
        }  # fmt: skip
    return found


def model_card(name: str, facts: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Markdown card of a trained model. `facts`: phase, size, data ids and the like, as its handover.json has them."""
    return _card(name, "Model", notes, [f"- {key}: {_inline(value)}" for key, value in facts.items()], MODEL_LIMITS)


def run_card(workdir: Path) -> str:
    """`model_card` of a finished phase: what it is, its validation at the step handed over, what it was trained on and under
    which licences."""
    content = json.loads((workdir / "handover.json").read_text())
    facts: dict[str, Any] = {"phase": content["phase"], "step": content["step"]}
    facts |= {key: value for key, value in content["facts"].items() if key in ("size", "datasets") or "sha256" in key}
    log = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    found = {key: value for line in lines if line["step"] == content["step"] for key, value in line.items()}
    if measured := {key.removeprefix("val/"): value for key, value in found.items() if key.startswith("val/")}:
        facts["validation"] = measured
    root = content["config"].get("data", {}).get("root", "")
    for part, summary in (job_summary(Path(root)) if root else {}).items():
        facts[f"training data, {part}"] = summary
    return model_card(workdir.resolve().name, facts, (INTENDED,))


def _card(name: str, kind: str, notes: Sequence[str], figures: Sequence[str], limits: Sequence[tuple[str, str]]) -> str:
    parts = [f"# {name}", f"{kind} for peripheral blood smears. {RESEARCH_NOTICE}", *notes]
    parts += ["## Figures", "\n".join(figures), "## Limits"]
    parts += [f"**{title}.** {text}" for title, text in limits]
    return "\n\n".join(parts) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(part)}" for key, part in value.items()) or "none"
    return str(value)
