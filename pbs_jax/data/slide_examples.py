"""Random-access examples of phases 2 and 4: a cell with the patch it lies in, a slide as a masked bag of its patches.

Plain sequences as in `examples`. A slide with more patches than the budget is sampled once, by its id: spatially even,
better-focused patches more often, so that training, bench and every epoch see the same patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load, save

from data_prep.io import open_dataset, read_manifest
from data_prep.schema import DataError, stable_hash
from data_prep.tokens import NO_TARGET, Tokenizer, caption_slot
from pbs_jax.data.examples import Example, FeatureTable, QuestionBins
from pbs_jax.data.rows import PADDING, PER_ANSWER

KINDS = ("phase2", "backbone")


class CellPatches(Sequence[Example]):
    """Phase 2. cell bfloat16[1+N, D] and patch bfloat16[T, D] backbone tokens, int32[] numbers `patch_no`, `slide_no`.

    One example a cell; patches without cells never occur (paper 3.4.2). Raises DataError for a cell of no patch, and
    for features of two backbones.
    """

    def __init__(self, root: Path, split: str, cells: FeatureTable, patches: FeatureTable) -> None:
        if cells.backbone_sha256 != patches.backbone_sha256:
            raise DataError("cell_features and patch_features are of two backbones: run `pbs data features` for both")
        records = list(open_dataset(root / "cells", split))
        lost = [record["cell_id"] for record in records if not record["patch_id"]]
        if lost:
            raise DataError(f"cell {lost[0]} of {root}/cells lies in no patch: phase 2 needs cells found on slides")
        self._pairs = [(record["cell_id"], record["patch_id"], record["slide_id"]) for record in records]
        self._cells, self._patches = cells, patches
        self._patch_no = {id: k for k, id in enumerate(dict.fromkeys(patch for _, patch, _ in self._pairs))}
        self._slide_no = {id: k for k, id in enumerate(dict.fromkeys(slide for *_, slide in self._pairs))}

    def __len__(self) -> int:
        return len(self._pairs)

    def image_id(self, index: int) -> str:
        return self._pairs[index][0]

    def spread(self, count: int) -> list[Example]:
        """At most so many pairs, evenly over the split: what a measurement that holds all of them reads."""
        return [self[i] for i in np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(int))]

    def __getitem__(self, index: Any) -> Any:
        cell, patch, slide = self._pairs[index]
        return {
            "index": np.asarray(index, np.int32),
            "cell": self._cells[cell],
            "patch": self._patches[patch],
            "patch_no": np.asarray(self._patch_no[patch], np.int32),
            "slide_no": np.asarray(self._slide_no[slide], np.int32),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class SlideBag:
    """A slide's patches: features bfloat16[N, D], mask bool[N] (False = padding), coords int32[N, 2], qc float32[N]."""

    features: np.ndarray
    mask: np.ndarray
    coords: np.ndarray
    qc: np.ndarray

    def encode(self) -> bytes:
        """features and mask as bytes: what the bench shows to a slide model in place of a picture."""
        return save({"features": self.features.view(np.uint16), "mask": self.mask})


def decode_bag(encoded: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(features bfloat16[N, D], mask bool[N]) of `SlideBag.encode`."""
    tensors = load(encoded)
    return tensors["features"].view(ml_dtypes.bfloat16), tensors["mask"]


class SlideBags:
    """The bags of a `slide_features` dataset by slide id, all padded to the same N <= max_patches.

    made_from: kind ("phase2" or "backbone") and the hashes of the weights that made the features.
    """

    def __init__(self, folder: Path, splits: Sequence[str], max_patches: int, seed: int = 0) -> None:
        self._sources = [open_dataset(folder / "slide_features", split) for split in splits]
        self._where = {id: (s, i) for s, source in enumerate(self._sources) for i, id in enumerate(source.ids)}
        self.ids = tuple(self._where)
        self._name, self._seed = f"{folder}/slide_features", seed
        manifest = read_manifest(folder / "slide_features")
        self.content_id: str = manifest["content_id"]
        self.made_from: dict[str, str] = {
            name: manifest["config"][name] for name in ("kind", "backbone_sha256", "phase2_sha256")
        }
        self.dim: int = manifest["features"]["tokens"]["shape"][-1]
        self.patches = min(max_patches, manifest["details"]["most_patches"])

    def __getitem__(self, slide_id: str) -> SlideBag:
        if slide_id not in self._where:
            raise DataError(f"{self._name} has no features of {slide_id}: run `pbs data features` on the same slides")
        source, row = self._where[slide_id]
        record = self._sources[source][row]
        chosen = sample_patches(record["coords"], record["qc"], self.patches, stable_hash(self._seed, slide_id))
        short = self.patches - len(chosen)
        return SlideBag(
            np.pad(record["tokens"][chosen], ((0, short), (0, 0))),
            np.arange(self.patches) < len(chosen),
            np.pad(record["coords"][chosen], ((0, short), (0, 0))),
            np.pad(record["qc"][chosen], (0, short)),
        )


def open_bags(
    folder: Path, split: str, made_from: Mapping[str, str], max_patches: int, patches: int | None = None
) -> SlideBags:
    """A split's bags for a model that learnt from at most `max_patches` features `made_from`; patches: show no more than so many.

    Raises DataError when other weights made these.
    """
    bags = SlideBags(folder, (split,), min(patches or max_patches, max_patches))
    for name, value in bags.made_from.items():
        if value != made_from[name]:
            raise DataError(
                f"{folder}/slide_features has {name} {value[:12] or 'none'}, the model learnt from "
                f"{made_from[name][:12] or 'none'}: run `pbs data features` with the model's own phases"
            )
    return bags


class SlideQuestions(Sequence[Example]):
    """Phase 4. A packed bin of questions about one slide (see `QuestionBins`), with its bag: visual bfloat16[N, D], mask bool[N]."""

    def __init__(self, root: Path, split: str, bags: SlideBags, slot: tuple[int, int] | None = None) -> None:
        self._bins = QuestionBins(root, split, dataset="slide_qa_tokens", slot=slot)
        self._bags = bags
        self.content_id = self._bins.content_id

    def __len__(self) -> int:
        return len(self._bins)

    def image_id(self, index: int) -> str:
        return self._bins.image_id(index)

    def __getitem__(self, index: Any) -> Any:
        bag = self._bags[self._bins.image_id(index)]
        return self._bins[index] | {"visual": bag.features, "mask": bag.mask}


class CaptionedSlides(QuestionBins):
    """Phase 0b on slides: bins of root/slide_qa_tokens whose slot holds the slide's caption, the answer to its open question.

    The caption says the differential and the pattern; morphology questions, which it does not answer, are not learnt
    from. Raises DataError for another tokenizer than the slide questions were written with.
    """

    def __init__(self, root: Path, split: str, tokenizer: Tokenizer) -> None:
        bins = open_dataset(root / "slide_qa_tokens", split)
        if bins.manifest["inputs"]["tokenizer"] != tokenizer.sha256:
            raise DataError(f"{root}/slide_qa_tokens is of another tokenizer: write it again with --tokenizer")
        questions = list(open_dataset(root / "slide_qa", split))
        captions = {
            qa["image_id"]: caption_slot(tokenizer, qa["answer"], where=qa["image_id"])
            for qa in questions
            if qa["question_type"] == "open"
        }
        unanswered = {qa["id"] for qa in questions if qa["task"] == "morphology"}
        records = []
        for record in bins:
            branches = [k for k, id in enumerate(record["qa_ids"], start=1) if id in unanswered]
            targets = np.where(np.isin(record["segments"], branches), NO_TARGET, record["targets"])
            if (targets != NO_TARGET).any():
                records.append(record | {"targets": targets})
        self._set(records, captions)
        self.content_id = bins.content_id


class Joined(Sequence[Example]):
    """Two sources of question bins one after the other, with room for the answers of the fuller one."""

    def __init__(self, first: QuestionBins, second: QuestionBins) -> None:
        lengths = [len(part[0]["tokens"]) for part in (first, second)]
        if lengths[0] != lengths[1]:
            raise DataError(
                f"cell and slide bins have {lengths[0]} and {lengths[1]} tokens: write both with one --bin-length"
            )
        self._first, self._second = first, second
        self._answers = max(len(part[0]["answers"]) for part in (first, second))
        self.content_id = f"{first.content_id}+{second.content_id}"

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def image_id(self, index: int) -> str:
        inside = index - len(self._first)
        return self._second.image_id(inside) if inside >= 0 else self._first.image_id(index)

    def __getitem__(self, index: Any) -> Any:
        inside = index - len(self._first)
        example = self._second[inside] if inside >= 0 else self._first[index]
        short = self._answers - len(example["answers"])
        padded = {name: np.pad(example[name], (0, short), constant_values=PADDING.get(name, 0)) for name in PER_ANSWER}
        return example | padded | {"index": np.asarray(index, np.int32)}


def sample_patches(coords: np.ndarray, qc: np.ndarray, budget: int, seed: int) -> np.ndarray:
    """int64[min(P, budget)], ascending: which of P patches to read.

    coords: int[P, 2] level-0 pixels; qc: float[P] scores in 0..1. Systematic sampling along a Z-order curve: every
    region gets its share, a patch's chance is proportional to its score (capped at 1), the seed sets the phase.
    """
    count = len(coords)
    if count <= budget:
        return np.arange(count)
    order = np.argsort(_z_order(coords), kind="stable")
    weight = np.maximum(qc[order].astype(np.float64), 1e-6)
    chance = np.minimum(1.0, weight * budget / weight.sum())
    while not np.isclose(chance.sum(), budget):  # what capped patches cannot use goes to the others
        free = chance < 1.0
        chance[free] = np.minimum(1.0, chance[free] * (budget - (~free).sum()) / chance[free].sum())
    start = np.random.default_rng(seed).random()
    passed = np.floor(np.cumsum(chance) - start + 1e-9)  # a tick at start, start + 1, ...
    return np.sort(order[np.diff(passed, prepend=np.floor(-start)) > 0])


def _z_order(coords: np.ndarray) -> np.ndarray:
    """Morton codes of coords counted in units of their smallest step."""
    steps = [np.unique(coords[:, axis], return_inverse=True)[1].astype(np.int64) for axis in (0, 1)]
    code = np.zeros(len(coords), np.int64)
    for bit in range(20):
        for axis in (0, 1):
            code |= (steps[axis] >> bit & 1) << (2 * bit + axis)
    return code
