"""Random-access examples per phase: records of the written datasets, joined by id, as fixed-shape numpy arrays.

Every source is a plain sequence (`len`, `[i]`), so Grain can shuffle and shard it and a reader can look at one example.
Each example carries `index`, its position in the source, so that an error can name it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data_prep.io import RecordSource, open_dataset
from data_prep.schema import ATTRIBUTES, WHITE_CELL_CLASSES, DataError
from data_prep.tokens import with_slot

Example = dict[str, np.ndarray]


class Preloaded(Sequence[Example]):
    """A source held in memory: worth it for anything of a few GB that is read for many epochs.

    limit: at most so many examples, evenly spread over the source (0 = all).
    """

    def __init__(self, source: Sequence[Example], limit: int = 0) -> None:
        stride = -(-len(source) // limit) if limit else 1
        self._examples = [source[i] for i in range(0, len(source), stride)]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: Any) -> Any:
        return self._examples[index]


def decode_image(encoded: bytes, side: int) -> np.ndarray:
    """uint8[side, side, 3] of an encoded picture; PIL bilinear with antialias, as the official transform."""
    image: Image.Image = Image.open(io.BytesIO(encoded))
    image = image if image.mode == "RGB" else image.convert("RGB")
    return np.asarray(image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BILINEAR))


class CellImages(Sequence[Example]):
    """Phase 0a. Cells of the five classes: image uint8[S,S,3], label int32[], attributes int32[11] (-1 = unknown)."""

    def __init__(self, root: Path, split: str, side: int) -> None:
        self._cells = open_dataset(root / "cells", split)
        self._side = side
        labels = [record["label"] for record in self._cells]
        self._rows = [i for i, label in enumerate(labels) if label in WHITE_CELL_CLASSES]
        self.skipped = len(labels) - len(self._rows)
        if not self._rows:
            raise DataError(f"{root}/cells has no {split} cell of the five white-cell classes: nothing to train on")

    def __len__(self) -> int:
        return len(self._rows)

    def image_id(self, index: int) -> str:
        return self._cells.ids[self._rows[index]]

    def __getitem__(self, index: Any) -> Any:
        record = self._cells[self._rows[index]]
        known = json.loads(record["attributes"])
        values = [options.index(known[name]) if name in known else -1 for name, options in ATTRIBUTES.items()]
        return {
            "index": np.asarray(index, np.int32),
            "image": decode_image(record["image"], self._side),
            "label": np.asarray(WHITE_CELL_CLASSES.index(record["label"]), np.int32),
            "attributes": np.asarray(values, np.int32),
        }


class FeatureTable:
    """Cached backbone tokens by cell id: bfloat16[1+N, D]."""

    def __init__(self, folder: Path, splits: Sequence[str], dataset: str = "cell_features") -> None:
        self._sources = [open_dataset(folder / dataset, split) for split in splits]
        self._where = {id: (s, i) for s, source in enumerate(self._sources) for i, id in enumerate(source.ids)}
        self._name = f"{folder}/{dataset}"
        self.content_id = self._sources[0].content_id
        self.backbone_sha256: str = self._sources[0].manifest["config"]["backbone_sha256"]

    def __contains__(self, cell_id: str) -> bool:
        return cell_id in self._where

    def __getitem__(self, cell_id: str) -> np.ndarray:
        if cell_id not in self._where:
            raise DataError(f"{self._name} has no features of {cell_id}: run `pbs data features` on the same cells")
        source, row = self._where[cell_id]
        record = self._sources[source][row]
        return record["tokens"]


class CellCaptions(Sequence[Example]):
    """Phase 1. features bfloat16[1+N, D], text int32[T] ([CLS] caption [SEP] padding)."""

    def __init__(self, root: Path, split: str, features: FeatureTable, tokenizer: Any, length: int) -> None:
        from data_prep.tokens import qformer_text

        cells = open_dataset(root / "cells", split)
        self._features = features
        captioned = [record for record in cells if record["caption"]]
        self._ids = [record["cell_id"] for record in captioned]
        self._texts = [np.asarray(qformer_text(tokenizer, record["caption"], length), np.int32) for record in captioned]

    def __len__(self) -> int:
        return len(self._ids)

    def image_id(self, index: int) -> str:
        return self._ids[index]

    def __getitem__(self, index: Any) -> Any:
        features = self._features[self._ids[index]]
        return {"index": np.asarray(index, np.int32), "features": features, "text": self._texts[index]}


class QuestionBins(Sequence[Example]):
    """Phases 0b and 3. One packed bin: tokens, targets, segments int32[L], positions int32[3, L], and

    answers int32[A]: the supervised positions first, padded by -1 (A = the most that any bin of the dataset has);
    shares float32[A]: one over the length of the answer that the position belongs to; firsts bool[A]: an answer's first token;
    slot: (its token, how many of them) for another length than the bins were written with.
    visual: with captions int32[Q] the caption's token ids for the slot, with features bfloat16[1+N, D] of the image.
    """

    def __init__(
        self,
        root: Path,
        split: str,
        *,
        captions: Any = None,
        features: FeatureTable | None = None,
        dataset: str = "cell_qa_tokens",
        slot: tuple[int, int] | None = None,
    ) -> None:
        bins = open_dataset(root / dataset, split)
        slots: dict[str, np.ndarray] = {}
        if captions is not None:
            from data_prep.tokens import caption_slot

            for cell in open_dataset(root / "cells", split):
                if cell["caption"]:
                    slots[cell["cell_id"]] = np.asarray(
                        caption_slot(captions, cell["caption"], where=cell["cell_id"]), np.int32
                    )
        self._slot = slot
        self._set(bins, slots if captions is not None else features)
        self.content_id: str = bins.content_id

    _slot: tuple[int, int] | None = None

    def _set(self, bins: Sequence[Any] | RecordSource, visual: Mapping[str, np.ndarray] | FeatureTable | None) -> None:
        self._bins, self._visual = bins, visual
        self._answers = max(int((np.asarray(record["targets"]) >= 0).sum()) for record in bins)

    def __len__(self) -> int:
        return len(self._bins)

    def image_id(self, index: int) -> str:
        """The cell or slide that a bin's questions are about."""
        return str(self._bins[index]["image_id"])

    def __getitem__(self, index: Any) -> Any:
        record = with_slot(self._bins[index], *self._slot) if self._slot else self._bins[index]
        targets = np.asarray(record["targets"], np.int32)
        supervised = np.flatnonzero(targets >= 0)
        branches = np.asarray(record["segments"])[supervised]
        count = len(supervised)
        answers, shares = np.full(self._answers, -1, np.int32), np.zeros(self._answers, np.float32)
        firsts = np.zeros(self._answers, bool)
        answers[:count] = supervised
        shares[:count] = 1.0 / np.bincount(branches)[branches]
        firsts[:count] = np.diff(branches, prepend=-1) != 0
        example = {
            "index": np.asarray(index, np.int32),
            "tokens": np.asarray(record["tokens"], np.int32),
            "targets": targets,
            "segments": np.asarray(record["segments"], np.int32),
            "positions": np.asarray(record["positions"], np.int32),
            "answers": answers,
            "shares": shares,
            "firsts": firsts,
        }
        if self._visual is not None:
            example["visual"] = self._visual[record["image_id"]]
        return example


class Drill(QuestionBins):
    """Phase 0b's first lesson: drawn facts in the slot and questions about them (`data_prep.drill`).

    config: drill.{count, bin_length, slot_facts, kinds}; `seed` draws.
    """

    def __init__(self, tokenizer: Any, config: Any, count: int, seed: int) -> None:
        from data_prep.drill import drill

        bins, slots = drill(
            tokenizer,
            count=count,
            bin_length=config.bin_length,
            slot_facts=tuple(config.slot_facts),
            kinds=dict(config.kinds),
            seed=seed,
        )
        self._set(bins, {record["image_id"]: slot for record, slot in zip(bins, slots, strict=True)})
        self.content_id = ""
