"""Splits that keep a patient (else a slide, else a picture) and its near-duplicates on one side, and the leak gate.

Rules, stated once:
- A given split (the authors') is kept. Of a near-duplicate cluster that lies in several splits only the members of the
  most held-out one (test, then val) stay; the others are rejected and counted.
- The same picture under two labels is rejected, all copies.
- Cells without a given split go where their group goes: to the given split of a near-duplicate, else by a hash of the
  group, so that appended data never move what is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_prep.crops import decode_rgb
from data_prep.io import open_dataset, read_manifest
from data_prep.progress import progress
from data_prep.schema import SPLITS, DataError, stable_hash
from data_prep.sources import Reject

SHARES = {"train": 0.6, "val": 0.1, "test": 0.3}  # as WBCAtt
HASH_SIDE = 16
NEAR = 30  # bits of 256; in PBC the one true near-duplicate pair has 15, the next pair of different cells 49


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """What the split needs to know of a cell: `sha256` and `dhash` (packed bits, hex) are those of its crop."""

    id: str
    label: str
    split: str
    sha256: str
    dhash: str
    patient_id: str = ""
    slide_id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """`splits`: id -> split of what stays. `level`: what they keep apart. `leakage`: what the given ones do not."""

    splits: Mapping[str, str]
    rejects: Sequence[Reject]
    level: str
    leakage: Sequence[str]


def difference_hash(image: Image.Image) -> str:
    """256 bits in hex: is each cell of a 16 x 17 grey grid brighter than its left neighbour? Stable under resizing,
    recompression and small shifts."""
    grey = np.asarray(image.convert("L").resize((HASH_SIDE + 1, HASH_SIDE), Image.Resampling.BOX), np.int16)
    return np.packbits(grey[:, 1:] > grey[:, :-1]).tobytes().hex()


class _Groups:
    """Union-find over positions."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def root(self, k: int) -> int:
        while self.parent[k] != k:
            self.parent[k] = self.parent[self.parent[k]]
            k = self.parent[k]
        return k

    def join(self, a: int, b: int) -> None:
        a, b = self.root(a), self.root(b)
        self.parent[max(a, b)] = min(a, b)

    def join_equal(self, keys: Iterable[str]) -> None:
        """Joins positions with the same key; "" (unknown) joins nothing."""
        first: dict[str, int] = {}
        for k, key in enumerate(keys):
            if key:
                self.join(first.setdefault(key, k), k)

    def members(self) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for k in range(len(self.parent)):
            groups.setdefault(self.root(k), []).append(k)
        return list(groups.values())


def near_pairs(hashes: Sequence[str], limit: int = NEAR) -> list[tuple[int, int]]:
    """Pairs of positions whose hashes differ in at most `limit` bits. Quadratic: 30,000 take about 15 s."""
    if not hashes:
        return []
    packed = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8).reshape(len(hashes), -1)
    signs = np.unpackbits(packed, axis=1).astype(np.float32) * 2 - 1
    bits, pairs = signs.shape[1], []
    for start in range(0, len(signs), 1024):
        agreement = signs[start : start + 1024] @ signs[start:].T
        rows, columns = np.nonzero(agreement >= bits - 2 * limit)
        pairs += [(int(r) + start, int(c) + start) for r, c in zip(rows, columns, strict=True) if c > r]
    return pairs


def _duplicates(items: Sequence[Item]) -> _Groups:
    groups = _Groups(len(items))
    groups.join_equal(item.sha256 for item in items)
    for a, b in near_pairs([item.dhash for item in items]):
        groups.join(a, b)
    return groups


def _held_out(splits: Iterable[str]) -> str:
    """The most held-out of the splits: test, then val, then train; "" if none is given."""
    return max((split for split in splits if split), key=SPLITS.index, default="")


def split_level(items: Iterable[Item]) -> str:
    items = list(items)
    if all(item.patient_id for item in items):
        return "patient"
    return "slide" if all(item.slide_id for item in items) else "image"


def assign(items: Sequence[Item], seed: int = 0) -> Assignment:
    """Splits for all items by the rules above. Raises DataError for a given split that is none of SPLITS."""
    for item in items:
        if item.split and item.split not in SPLITS:
            raise DataError(f'{item.id}: split "{item.split}" is not one of {", ".join(SPLITS)}')
    items = sorted(items, key=lambda item: item.id)
    rejects: dict[int, Reject] = {}
    for cluster in _duplicates(items).members():
        _resolve_cluster(items, cluster, rejects)
    kept = [item for k, item in enumerate(items) if k not in rejects]
    leakage = _group_leakage(kept)
    groups = _duplicates(kept)
    groups.join_equal(item.patient_id for item in kept)
    groups.join_equal(item.slide_id for item in kept)
    splits: dict[str, str] = {}
    for members in groups.members():
        given = _held_out(kept[k].split for k in members)
        first = kept[members[0]]
        key = first.patient_id or first.slide_id or first.id
        for k in members:
            splits[kept[k].id] = kept[k].split or given or by_hash(seed, key)
    return Assignment(splits, list(rejects.values()), "image" if leakage else split_level(kept), leakage)


def by_hash(seed: int, key: str) -> str:
    share, total = stable_hash("split", seed, key) / 2**64, 0.0
    for split, part in SHARES.items():
        total += part
        if share < total:
            return split
    return "test"


def _resolve_cluster(items: Sequence[Item], cluster: Sequence[int], rejects: dict[int, Reject]) -> None:
    by_content: dict[str, set[str]] = {}
    for k in cluster:
        by_content.setdefault(items[k].sha256, set()).add(items[k].label)
    target = _held_out(items[k].split for k in cluster)
    keeper = next(items[k].id for k in cluster if items[k].split == target)
    for k in cluster:
        item = items[k]
        if len(labels := by_content[item.sha256]) > 1:
            detail = f"{item.id} is the same picture under the labels {', '.join(sorted(labels))}"
            rejects[k] = Reject(item.id, "same picture, two labels", detail)
        elif item.split and item.split != target:
            detail = f"{item.id} ({item.split}) is a near-duplicate of {keeper} ({target}), which stays"
            rejects[k] = Reject(item.id, "near-duplicate in a held-out split", detail)


def _group_leakage(items: Sequence[Item]) -> list[str]:
    """One sentence per kind of group (patient, slide) that lies in more than one given split."""
    sentences = []
    for kind in ("patient_id", "slide_id"):
        places: dict[str, set[str]] = {}
        for item in items:
            if item.split and (key := getattr(item, kind)):
                places.setdefault(key, set()).add(item.split)
        if shared := sorted(key for key, splits in places.items() if len(splits) > 1):
            sentences.append(f"the given split has {len(shared)} {kind} values in several splits, e.g. {shared[0]}")
    return sentences


def leaks(out: Path) -> list[str]:
    """Leaks in the written datasets under OUT, one sentence each: groups or near-duplicates of `cells` in two splits,
    questions or bins whose cell or slide lies in another split or nowhere. Reads the shards, not the plan."""
    kept_apart = read_manifest(out / "cells")["split"]["level"]
    place: dict[str, str] = {}
    items = []
    for split in read_manifest(out / "cells")["splits"]:
        source = open_dataset(out / "cells", split)
        for record in progress(source, len(source), f"leak check, {split}"):
            place[record["cell_id"]] = split
            groups = (record["patient_id"], record["slide_id"])
            dhash = difference_hash(decode_rgb(record["image"]))
            items.append(Item(record["cell_id"], record["label"], split, "", dhash, *groups))
    found = [
        f"{items[a].id} ({items[a].split}) and {items[b].id} ({items[b].split}) are near-duplicates in two splits"
        for a, b in near_pairs([item.dhash for item in items])
        if items[a].split != items[b].split
    ]
    found += [sentence for sentence in _group_leakage(items) if kept_apart != "image"]
    places = {"cell": place, "slide": _slide_places(out)}
    for name in ("cell_qa", "cell_qa_tokens", "slide_qa", "slide_qa_tokens"):
        if not (out / name).is_dir():
            continue
        level = name.partition("_")[0]
        for split in read_manifest(out / name)["splits"]:
            asked = {record["image_id"] for record in open_dataset(out / name, split)}
            wrong = sorted(id for id in asked if places[level].get(id) != split)
            found += [f"{name} {split}: {level} {id} is in split {places[level].get(id, '(none)')}" for id in wrong[:5]]
    return found


def _slide_places(out: Path) -> dict[str, str]:
    """Slide id -> split of OUT/slides, where there is one."""
    if not (out / "slides").is_dir():
        return {}
    return {
        id: split for split in read_manifest(out / "slides")["splits"] for id in open_dataset(out / "slides", split).ids
    }
