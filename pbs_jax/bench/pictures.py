"""What a model is shown: a cell, the patches of a slide, nothing, a grey picture, or another image of the split.

Slides show a fixed number of patches (paper Table 5: 15, 30, 50), drawn by hash of the patch ids alone: every model, run
and machine sees the same list in the same order, and a longer list begins with the shorter one.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.io import open_dataset, read_manifest
from data_prep.schema import CROP_SIDE, QA, DataError, stable_hash

if TYPE_CHECKING:
    from pbs_jax.bench.slide_rows import EncodedBags

MODALITIES = ("image", "blind", "blank", "mismatched")
PATCHES = 30  # the paper's number for models that take many pictures


@dataclasses.dataclass
class Pictures:
    """`pictures(qa)` gives what the question shows, encoded. `shown`: {image_id: the ids of the records shown for it}.

    `dataset_id` is the content id of the pictures' dataset: other pixels under the same ids are another run.
    """

    shown: Mapping[str, Sequence[str]]
    dataset_id: str
    _places: Mapping[str, tuple[Any, int]]  # id -> (records by number, number)
    _blank: bytes | None = None
    _last: tuple[str, tuple[bytes, ...]] = ("", ())

    def __call__(self, qa: QA) -> tuple[bytes, ...]:
        ids = self.shown.get(qa.image_id, ())
        if self._blank is not None:
            return (self._blank,) * len(ids)
        if self._last[0] != qa.image_id:  # questions come image by image
            self._last = qa.image_id, tuple(self._read(id) for id in ids)
        return self._last[1]

    def _read(self, id: str) -> bytes:
        source, position = self._places[id]
        return bytes(source[position]["image"])


def load_pictures(
    data: Path, modality: str, asked: Sequence[QA], patches: int = PATCHES, bags: EncodedBags | None = None
) -> Pictures:
    """The pictures of the questions `asked`, all cells or all slides, from data/cells or data/patches (any split).

    bags: for a model that reads slide features: shown in place of patches, one a slide.

    `mismatched` gives every question of an image the same wrong image, drawn by hash; never its own. `blank` shows as
    many grey pictures as `image` would show real ones. Raises DataError for an unknown modality, levels mixed, or an
    image that `data` lacks.
    """
    if modality not in MODALITIES:
        raise DataError(f'modality "{modality}" is unknown: use {", ".join(MODALITIES)}')
    if modality == "blind":
        return Pictures({}, "", {})
    images = dict.fromkeys(qa.image_id for qa in asked)
    levels = {qa.level for qa in asked}
    if len(levels) > 1:
        raise DataError("cell and slide questions are asked in runs of their own: give one of the two as --data")
    slides = levels == {"slide"}
    places: Mapping[str, tuple[Any, int]]
    shown: Mapping[str, Sequence[str]]
    directory = data / ("slide_features" if bags else "patches" if slides else "cells")
    if bags:
        if modality == "blank":
            raise DataError(
                "slide features have no blank picture: use --modality blind, or --features of background slides"
            )
        content_id, places = bags.content_id, bags.places
    else:
        manifest = read_manifest(directory)
        content_id = manifest["content_id"]
        sources = [open_dataset(directory, split) for split in manifest["splits"]]
        places = {id: (source, k) for source in sources for k, id in enumerate(source.ids)}
    shown = choose_patches(places, images, patches) if slides and not bags else {id: (id,) for id in images}
    if missing := [id for id, ids in shown.items() if not ids or ids[0] not in places]:
        raise DataError(
            f"{directory} has no picture of {missing[0]} ({len(missing)} of {len(images)} images asked about)"
        )
    if modality == "mismatched":
        ring = sorted(shown, key=lambda image_id: stable_hash("mismatched", image_id))
        if len(ring) < 2:
            raise DataError("mismatched pictures need questions about two images at least")
        shown = {own: shown[other] for own, other in zip(ring, ring[1:] + ring[:1], strict=True)}
    return Pictures(shown, content_id, places, _grey() if modality == "blank" else None)


def choose_patches(
    patch_ids: Mapping[str, object] | Sequence[str], slides: Mapping[str, object], count: int
) -> dict[str, list[str]]:
    """{slide_id: at most `count` of its patch ids}, by hash; patch ids are "<slide_id>:<x>_<y>"."""
    found: dict[str, list[str]] = {slide: [] for slide in slides}
    for patch_id in patch_ids:
        if (slide := patch_id.rpartition(":")[0]) in found:
            found[slide].append(patch_id)
    return {
        slide: sorted(ids, key=lambda id: (stable_hash("shown patch", id), id))[:count] for slide, ids in found.items()
    }


def _grey() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (CROP_SIDE, CROP_SIDE), (128, 128, 128)).save(out, "PNG")
    return out.getvalue()
