"""Checkpoints that answer, and a picture made ready for them: visual tokens read once, then any number of questions.

Which checkpoint answers: a slide goes to phase 4 where one is given; else each white cell goes to phase 3 and the answer is
what most of them say.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.base import FULL
from data_prep import picture as pictures
from data_prep.io import read_manifest
from data_prep.picture import Picture, Preparation
from data_prep.schema import QA, QUESTION_TYPES, DataError, check_options, question_id
from pbs_jax.ask import evidence
from pbs_jax.data.slide_features import SlideEncoder, write_slide_features
from pbs_jax.decode.answer import Answerer, load_answerer
from pbs_jax.decode.generate import GREEDY, Prefix
from pbs_jax.decode.sampling import Sampling
from pbs_jax.decode.slide_answer import SlideAnswerer, load_slide_answerer
from pbs_jax.train import handover
from pbs_jax.train.state import tree_sha256

BATCH = 8  # rows of the language model: few questions at a time
MOST_CELLS = 64  # of a field or slide that phase 3 is asked about, evenly over all
ENDINGS = {"\nAnswer with only true or false.": "true_false", "\nAnswer in no more than 10 words.": "fill_blank"}
STAND_IN = (
    "stand-in model of size {size}: supervised on cell labels, it answers from the closed list of its training questions; "
    "it is not PBS-VL"
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One question's answer. `votes`: how many cells said what (empty for one cell or a slide model); `cells`: each asked
    cell's own answer by cell id; `remark`: what the classifier or the cells that it counted say instead."""

    question: str
    question_type: str
    options: tuple[str, ...]
    text: str
    votes: dict[str, int] = dataclasses.field(default_factory=dict)
    cells: dict[str, str] = dataclasses.field(default_factory=dict)
    remark: str = ""

    @property
    def chosen(self) -> str:
        """The option behind a letter; "" where none was chosen."""
        lettered = dict(zip(string.ascii_uppercase, self.options, strict=False))
        return lettered.get(self.text, "")

    @property
    def sentence(self) -> str:
        """For people: the option's text beside its letter, and how many cells agree."""
        text = f"{self.text}. {self.chosen}" if self.chosen else self.text or "(no answer)"
        total = sum(self.votes.values())
        return f"{text} ({self.votes[self.text]} of {total} cells)" if total > 1 else text


@dataclasses.dataclass(frozen=True)
class Models:
    """The loaded checkpoints: `cell` a phase 3, `slide` a phase 4, `classify` the head of phase 0a."""

    cell: Answerer | None
    slide: SlideAnswerer | None
    backbone: Path | None
    alignment: Path | None
    classify: pictures.Classify | None
    prepare: Preparation
    size: str
    name: str

    @property
    def phase2(self) -> Path | None:
        """The phase 2 that the slide model's features come through; None = it reads the backbone's own."""
        return self.alignment if self.slide is not None and self.slide.features["kind"] == "phase2" else None

    @functools.cached_property
    def encoder(self) -> SlideEncoder:
        """Of a slide's patches: loaded and compiled once for all slides."""
        assert self.backbone is not None
        return SlideEncoder(self.backbone, self.phase2)

    @property
    def served(self) -> str:
        """The model's name in /v1/models."""
        return f"pbs-{self.size}"

    @property
    def remark(self) -> str:
        """What must be said with every answer of a small model; "" for one of published weights."""
        return "" if self.size in FULL else STAND_IN.format(size=self.size)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A picture that questions can be asked about. `asked`: the cells that phase 3 answers for; `bag`: a slide's patches, and
    the `models` that read them."""

    picture: Picture
    answerer: Answerer
    prefix: Prefix
    asked: list[int]
    bag: Any = None
    models: Models | None = None

    @property
    def level(self) -> str:
        return "slide" if self.bag is not None else "cell"


def load_models(checkpoints: Sequence[Path], int8: bool | None = None) -> Models:
    """Finished phases 3 and 4, and what they need: phase 4's patches come through a phase 2, cells are named by a phase 0a.

    Each workdir says itself which phase it is; a phase 3 or 2 names its backbone. int8: of `load_answerer`. Raises DataError.
    """
    found: dict[str, Path] = {}
    for workdir in checkpoints:
        phase = handover.read(workdir, ("cell_qa", "slide_qa", "cell_patch_alignment", "backbone"))["phase"]
        if phase in found:
            raise DataError(f"--checkpoint {found[phase]} and {workdir} are both of phase {phase}: give one")
        found[phase] = workdir
    answering = [found[phase] for phase in ("cell_qa", "slide_qa") if phase in found]
    if not answering:
        raise DataError(f"--checkpoint {', '.join(map(str, checkpoints))}: none is of phase cell_qa or slide_qa")
    contents = {phase: handover.read(workdir) for phase, workdir in found.items()}
    named = [contents[p]["facts"].get("backbone") for p in ("cell_qa", "cell_patch_alignment") if p in contents]
    backbone = found.get("backbone") or next((Path(path) for path in named if path), None)
    cell = load_answerer(found["cell_qa"], BATCH, int8=int8) if "cell_qa" in found else None
    slide = load_slide_answerer(found["slide_qa"], BATCH, int8=int8) if "slide_qa" in found else None
    if slide is not None and slide.features["kind"] == "phase2" and "cell_patch_alignment" not in found:
        raise DataError(f"{found['slide_qa']} reads phase-2 features: give that phase 2 as another --checkpoint")
    if slide is not None and backbone is None:
        raise DataError(f"{found['slide_qa']} names no backbone: give its phase 0a as another --checkpoint")
    if slide is not None:
        _same_features(found["slide_qa"], slide.features, backbone, found.get("cell_patch_alignment"))
    classify = None
    if backbone is not None and "head" in handover.read(backbone)["trees"]:
        classify = pictures.classifier(backbone)
    first = contents["cell_qa" if cell else "slide_qa"]
    return Models(
        cell,
        slide,
        backbone,
        found.get("cell_patch_alignment"),
        classify,
        _preparation(Path(contents["cell_qa"]["config"]["data"]["root"])) if cell else Preparation(),
        first["facts"]["size"],
        " + ".join(f"{handover.read(w)['phase']} {w.name} step {handover.read(w)['step']}" for w in answering),
    )


def _same_features(workdir: Path, learnt: dict[str, Any], backbone: Path | None, alignment: Path | None) -> None:
    """Raises DataError unless the features that phase 4 learnt from came through these weights: before a slide is worked on."""
    for hashed, path, tree, phase in (
        ("backbone_sha256", backbone, "backbone", "0a"),
        ("phase2_sha256", alignment, "patch_perceiver", "2"),
    ):
        if learnt[hashed] and path and tree_sha256(handover.load(path, [tree])[tree]) != learnt[hashed]:
            raise DataError(
                f"{path} is not the phase {phase} of the features that {workdir} learnt from: give that one"
            )


def _preparation(root: Path) -> Preparation:
    """How the crops of a checkpoint's training data were made. Raises DataError when that cannot be said or redone."""
    manifest = read_manifest(root / "cells")
    geometry, colour = manifest["details"].get("geometry"), manifest["config"].get("color_enhance")
    if not geometry or colour is None:
        raise DataError(f"{root}/cells does not say its crop geometry and colour: make it anew with `pbs data run`")
    return Preparation(geometry, float(colour))


def ready(picture: Picture, models: Models) -> Ready:
    """Encodes the picture and lets the language model read it. Raises DataError when no checkpoint fits its kind."""
    if picture.kind == "slide" and models.slide is not None:
        bag = _bag(picture, models)
        return Ready(picture, models.slide, models.slide.read(models.slide.encode([bag.encode()])), [], bag, models)
    if models.cell is None:
        raise DataError(
            f"{picture.name} is a {picture.kind}: a phase-4 checkpoint reads slides; give a phase 3 as well"
        )
    asked = np.unique(np.linspace(0, len(picture.cells) - 1, min(MOST_CELLS, len(picture.cells))).astype(int)).tolist()
    visual = models.cell.encode([picture.cells[k].image for k in asked])
    return Ready(picture, models.cell, models.cell.read(visual), asked)


def _bag(picture: Picture, models: Models) -> Any:
    assert models.slide is not None and picture.folder is not None
    write_slide_features(picture.folder, models.encoder, picture.folder)
    bags = models.slide.open_bags(picture.folder, "test")
    return bags[bags.ids[0]]


def as_question(text: str, options: Sequence[str] = (), kind: str = "auto", level: str = "cell") -> QA:
    """A QA without a known answer. kind "auto": options make it multiple choice, a leading "(True/False)" true/false, a
    leading "describe" or "explain" open, anything else fill in the blank. Raises DataError for what cannot be asked."""
    text = text.strip()
    if not text or len(text) > 1000:
        raise DataError(f"a question has 1 to 1000 characters, this one {len(text)}")
    try:
        "".join((text, *options)).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"a question or option is no Unicode text ({error}): write it again") from error
    if options:
        check_options(options, options[0], f'question "{text}"')
        if len(options) > 26:
            raise DataError(f'question "{text}" has {len(options)} options: give at most 26')
    if kind == "auto":
        spoken = re.match(r"(describe|explain|summari[sz]e)\b", text, re.IGNORECASE)
        told = re.match(r"\(?true\s*/\s*false\)?", text, re.IGNORECASE)
        kind = "multiple_choice" if options else "true_false" if told else "open" if spoken else "fill_blank"
    if kind not in QUESTION_TYPES:
        raise DataError(f'question type "{kind}" is unknown: use auto, {", ".join(QUESTION_TYPES)}')
    if kind == "multiple_choice" and not options:
        raise DataError(f'question "{text}" is multiple choice without options')
    return QA(question_id("asked", text, *options), "", level, "id", "test", "", kind, text, "", tuple(options))


def released_question(text: str) -> QA:
    """A question from its prompt: the paper prompt set's endings say its type and its options (data_prep.prompts)."""
    stem, mark, listed = text.strip().partition("\nOptions:\n")
    if mark and (options := re.findall(r"^[A-Z]\. (.+)$", listed, re.MULTILINE)):
        return as_question(stem, options)
    for ending, kind in ENDINGS.items():
        if text.strip().endswith(ending):
            return as_question(text.strip().removesuffix(ending), kind=kind)
    return as_question(text)


def ask(
    ready: Ready,
    qa: QA,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    tell: Callable[[str], None] | None = None,
) -> Answer:
    """The answer to one question about a picture; closed questions get one of the allowed answers.

    tell: called with the answer so far while it is written; never where one is chosen or cells vote. What it is told begins
    with what it was told before, and the answer with all of it.
    """
    owners = list(range(len(ready.asked) or 1))
    mode = "letter_likelihood" if sampling.greedy else "generate"
    count = len(owners)
    written = qa.question_type in ("fill_blank", "open") and count == 1
    # Half a character shows as a replacement until its other bytes are there.
    tell_whole = (lambda text: tell(text.rstrip("\ufffd").rstrip())) if tell and written else None
    replies = ready.answerer.answer_about(
        ready.prefix, owners, [qa] * count, [qa.options] * count, mode, sampling=sampling, stop=stop, tell=tell_whole
    )
    if count == 1:
        answer = Answer(qa.question, qa.question_type, qa.options, replies[0])
        asserted = answer.text.capitalize() if qa.question_type == "true_false" else answer.chosen or answer.text
        said = dataclasses.replace(qa, level=ready.level, answer=asserted)
        return dataclasses.replace(answer, remark=ready.picture.speaks_against(said))
    votes = dict(Counter(replies).most_common())
    ids = [ready.picture.cells[k].cell_id for k in ready.asked]
    text = next(iter(votes))
    return Answer(qa.question, qa.question_type, qa.options, text, votes, dict(zip(ids, replies, strict=True)))


def looked_at(ready: Ready, cell: int = 0) -> evidence.Evidence:
    """Where the model looked: for a slide model its places, else one cell's tokens (`cell` is its place in the picture)."""
    if ready.bag is not None:
        assert isinstance(ready.answerer, SlideAnswerer)
        return evidence.of_slide(slide_attention(ready), ready.picture)
    return evidence.of_cell(ready.answerer, ready.picture.cells[cell])


def slide_attention(ready: Ready) -> evidence.SlideAttention:
    """Of a slide model over the patches of a slide and within them."""
    models, folder = ready.models, ready.picture.folder
    assert models is not None and models.slide is not None and folder is not None
    return evidence.slide_attention(models.slide, ready.bag, folder, models.encoder)
