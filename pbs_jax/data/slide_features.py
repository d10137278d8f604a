"""Frozen features of slides' patches: `pbs data features --kind patch|slide|backbone`.

patch     `patch_features`, backbone tokens of every patch with cells: what phase 2 reads
slide     `slide_features`, one row a patch: phase-2 tokens averaged over the 32 latents (paper 3.4.3); phase 4 reads them
backbone  the same without phase 2: backbone tokens averaged, the row that phase 2 must beat

Finished slides are kept as unit files, so that a killed run goes on where it was. Everything is keyed by the weights'
sha256 and the patches' content id: features of others are another dataset. The latter two take a patch's backbone tokens
from `patch_features` where they lie there. `pbs_jax.data.features` writes those of cells by the same functions.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from data_prep.io import TEXT, Features, Unit, array, finalise, open_dataset, read_manifest, write_unit
from data_prep.progress import progress
from data_prep.schema import DataError, stable_hash
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import FeatureTable, decode_image
from pbs_jax.models.perceiver import PerceiverResampler
from pbs_jax.models.sizes import backbone_shape, get_size, told_queries, with_queries
from pbs_jax.models.vit import ViT
from pbs_jax.sharding.mesh import batch_sharding, make_mesh
from pbs_jax.train import handover
from pbs_jax.train.phase import definition
from pbs_jax.train.state import tree_sha256

Rows = Iterable[dict[str, Any]]  # read as they are consumed: a slide may have more patches than memory
Records = Callable[[str, str, Rows], Iterator[dict[str, Any]]]  # of a unit: (split, name, rows) -> what is written
PATCHES_AT_ONCE = 64  # given to the pooling; the backbone takes as many windows on each device
SLIDE_FEATURES: dict[str, Any] = {
    "slide_id": TEXT,
    "split": TEXT,
    "coords": array("int32", -1, 2),
    "qc": array("float32", -1),
}


class PatchEncoder:
    """The backbone of a finished phase 0a as a function of patches, or with windows=1 of cells.

    One window is the official way: the whole patch, resized. Several keep cells at the size at which nano's backbone
    learnt them; each window then gives its class token and its mean patch token, which is what that backbone's own head
    read. `config` is what decides the tokens; `devices`, by default all of this host, share the work.
    """

    def __init__(self, workdir: Path, windows: int | None = None, devices: Sequence[jax.Device] | None = None) -> None:
        facts = handover.read(workdir, ("backbone",))["facts"]
        size = get_size(facts["size"])
        vit = backbone_shape(facts, size.vit)
        self.size = size = dataclasses.replace(size, vit=vit, patch_windows=windows or size.patch_windows)
        self._devices = devices or jax.local_devices()
        one = SingleDeviceSharding(self._devices[0])
        params = handover.load(workdir, ["backbone"], one)["backbone"]
        self._on_one: tuple[Sharding, Any] = one, params
        self._graph = definition(lambda rngs: ViT(size.vit, rngs=rngs))
        self.config = {
            "backbone_sha256": tree_sha256(params),
            "image_size": size.vit.image_size,
            "windows": size.patch_windows,
            "tokens": self.tokens,
        }
        self._forward = jax.jit(self._encode)

    def __call__(self, patches: Rows) -> Iterator[np.ndarray]:
        """bfloat16[T, D] tokens before the last norm of each patch record.

        A device is always given as many, the last ones padded: the tokens do not depend on how many devices there are.
        """
        windows, side = self.size.patch_windows, self.size.vit.image_size
        batch = max(PATCHES_AT_ONCE // windows**2, 1)
        for part in itertools.batched(patches, batch * len(self._devices)):
            # What one device can hold is not padded to all of them: most small slides are.
            layout, params = self._on_one if len(part) <= batch else self._on_all
            count = batch * layout.num_devices
            pixels = np.stack([decode_image(row["image"], windows * side) for row in part])
            padded = np.pad(pixels, ((0, count - len(part)), (0, 0), (0, 0), (0, 0)))
            yield from np.asarray(self._forward(params, jax.device_put(padded, layout)))[: len(part)]

    @functools.cached_property
    def _on_all(self) -> tuple[Sharding, Any]:
        mesh = make_mesh(devices=self._devices)
        return batch_sharding(mesh), jax.device_put(self._on_one[1], NamedSharding(mesh, PartitionSpec()))

    @property
    def tokens(self) -> int:
        """257 for the whole patch at 224 px, 32 for nano's 16 windows."""
        side = self.size.vit.image_size // self.size.vit.patch_size
        return 1 + side**2 if self.size.patch_windows == 1 else 2 * self.size.patch_windows**2

    def places(self, weights: np.ndarray) -> np.ndarray:
        """Weights of a patch's tokens [P, T] -> [P, G, G] of the places that they stand for, a patch's sum 1."""
        places = weights[:, 1:] if self.size.patch_windows == 1 else weights.reshape(len(weights), -1, 2).sum(-1)
        grid = math.isqrt(places.shape[1])
        return (places / places.sum(1, keepdims=True)).reshape(-1, grid, grid)

    def _encode(self, params: Any, pixels: jax.Array) -> jax.Array:
        """uint8[B, S, S, 3], S = windows x image size -> bfloat16[B, T, D]."""
        windows, vit = self.size.patch_windows, self.size.vit
        batch, side = pixels.shape[0], vit.image_size
        cut = pixels.reshape(batch, windows, side, windows, side, 3).swapaxes(2, 3).reshape(-1, side, side, 3)
        tokens = nnx.merge(self._graph, params)(normalise(cut))["x_prenorm"]
        if windows > 1:
            tokens = jnp.concatenate([tokens[:, :1], tokens[:, 1:].mean(1, keepdims=True)], axis=1)
        return tokens.reshape(batch, -1, tokens.shape[-1]).astype(jnp.bfloat16)


class SlideEncoder:
    """A patch's backbone tokens as one row: phase 2's latents averaged (paper 3.4.3), or without it the tokens themselves.

    alignment: workdir of a finished phase 2. `patches` encodes, `perceiver` is phase 2's (definition, parameters), `config`
    what decides the rows of `dim` numbers. Raises DataError when phase 2 was trained on another backbone.
    """

    def __init__(self, backbone: Path, alignment: Path | None = None) -> None:
        self.patches = PatchEncoder(backbone)
        self.config = self.patches.config | {"kind": "backbone", "phase2_sha256": ""}
        self.dim = self.patches.size.vit.dim
        self.perceiver: tuple[Any, Any] | None = None
        if alignment is not None:
            facts = handover.read(alignment, ("cell_patch_alignment",))["facts"]
            if facts["backbone_sha256"] != self.config["backbone_sha256"]:
                raise DataError(f"{alignment} was trained on another backbone than {backbone}")
            shape = with_queries(self.patches.size, told_queries(facts)).patch_perceiver
            params = handover.load(alignment, ["patch_perceiver"])["patch_perceiver"]
            self.perceiver = definition(lambda rngs: PerceiverResampler(shape, rngs=rngs)), params
            self.config |= {"kind": "phase2", "phase2_sha256": tree_sha256(params)}
            self.dim = shape.dim
        self._pool = jax.jit(self._pooled)

    def pool(self, tokens: Iterable[np.ndarray]) -> np.ndarray:
        """Tokens bfloat16[T, D] of each patch -> bfloat16[P, dim]; the values do not depend on how many patches there are."""
        rows = []
        for part in itertools.batched(tokens, PATCHES_AT_ONCE):  # one compiled shape for all slides
            stacked = np.pad(np.stack(part), ((0, PATCHES_AT_ONCE - len(part)), (0, 0), (0, 0)))
            rows.append(np.asarray(self._pool(self.perceiver and self.perceiver[1], stacked))[: len(part)])
        return np.concatenate(rows)

    def _pooled(self, params: Any, tokens: jax.Array) -> jax.Array:
        tokens = tokens.astype(jnp.float32)
        if self.perceiver is not None:
            tokens = nnx.merge(self.perceiver[0], params)(tokens)
        return tokens.mean(1).astype(jnp.bfloat16)


def write_patch_features(root: Path, backbone: Path, out: Path) -> str:
    """out/patch_features: bfloat16[T, D] backbone tokens of the patches of root/patches that hold a cell of root/cells.

    backbone: workdir of a finished phase 0a. Returns the content id; a finished dataset of the same inputs is kept.
    """
    encoder = PatchEncoder(backbone)
    cells = read_manifest(root / "cells")
    held = {record["patch_id"] for split in cells["splits"] for record in open_dataset(root / "cells", split)}
    inputs = {"patches": read_manifest(root / "patches")["content_id"], "cells": cells["content_id"]}
    features, records = token_records(encoder, "patch_id")
    return write_in_units(root / "patches", out, "patch_features", features, records, encoder.config, inputs, keep=held)


def token_records(encoder: PatchEncoder, id_feature: str) -> tuple[Features, Records]:
    """(features, records) of a dataset of the tokens of each row."""

    def records(split: str, name: str, rows: Rows) -> Iterator[dict[str, Any]]:
        here, ahead = itertools.tee(rows)
        for row, tokens in zip(here, encoder(ahead), strict=True):
            yield {id_feature: row[id_feature], "split": split, "tokens": tokens}

    tokens = array("bfloat16", encoder.tokens, encoder.size.vit.dim)
    return {id_feature: TEXT, "split": TEXT, "tokens": tokens}, records


def write_slide_features(root: Path, encoder: SlideEncoder, out: Path) -> str:
    """out/slide_features: per slide of root/patches tokens bfloat16[P, D], coords int32[P, 2] (left, top), qc float32[P].

    Returns the content id; a finished dataset of the same inputs is kept.
    """
    inputs = {"patches": read_manifest(root / "patches")["content_id"]}
    stored = _stored([root, out], encoder.patches.config, inputs["patches"])

    def records(split: str, slide_id: str, rows: Rows) -> Iterator[dict[str, Any]]:
        coords: list[tuple[int, int]] = []
        qc: list[float] = []

        def tokens() -> Iterator[np.ndarray]:
            here, ahead = itertools.tee(rows)
            missing = encoder.patches(row for row in ahead if row["patch_id"] not in stored)
            for row in here:
                coords.append((row["x"], row["y"]))
                qc.append(row["qc_score"])
                yield stored[row["patch_id"]] if row["patch_id"] in stored else next(missing)

        yield {
            "slide_id": slide_id,
            "split": split,
            "tokens": encoder.pool(tokens()),
            "coords": np.array(coords, np.int32),
            "qc": np.array(qc, np.float32),
        }

    features = SLIDE_FEATURES | {"tokens": array("bfloat16", -1, encoder.dim)}
    return write_in_units(root / "patches", out, "slide_features", features, records, encoder.config, inputs)


def _stored(
    folders: Sequence[Path], config: Mapping[str, Any], patches_id: str
) -> FeatureTable | dict[str, np.ndarray]:
    """Backbone tokens that were written already, of the same weights and patches; empty where there are none."""
    for folder in folders:
        if any((folder / "patch_features").glob("*/manifest.json")):
            manifest = read_manifest(folder / "patch_features")
            if manifest["config"] == config and manifest["inputs"]["patches"] == patches_id:
                return FeatureTable(folder, tuple(manifest["splits"]), "patch_features")
    return {}


def write_in_units(
    dataset: Path,
    out: Path,
    name: str,
    features: Features,
    records: Records,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    *,
    keep: set[str] | None = None,
    per_unit: int = 0,
) -> str:
    """One unit file a slide of `dataset`, or `per_unit` records of it, then OUT/name; `keep`: only these ids.

    Finished units are not made again, nor is a finished dataset of the same config and inputs. Returns the content id.
    """
    if any((out / name).glob("*/manifest.json")):
        done = read_manifest(out / name)
        if done["config"] == config and done["inputs"] == inputs:
            print(f"{out}/{name} is up to date ({done['content_id'][:12]})", file=sys.stderr)
            return str(done["content_id"])
    id_feature = next(iter(features))
    key = hashlib.sha256(repr((sorted(config.items()), sorted(inputs.items()))).encode()).hexdigest()
    work = out / name / f".units.{key[:16]}"
    units, most = [], 0
    for split in read_manifest(dataset)["splits"]:
        source = open_dataset(dataset, split)
        ids = [id for id in source.ids if keep is None or id in keep]
        # Ids are in order, and "slide:" begins those of a slide: its patches follow each other.
        groups: Iterable[tuple[str, Iterable[str]]] = itertools.groupby(ids, lambda id: id.rpartition(":")[0])
        if per_unit:
            groups = ((f"{per_unit} from {part[0]}", part) for part in itertools.batched(ids, per_unit))
        told = progress(ids, len(ids), f"{name} {split}, {dataset.name}")
        for group, members in groups:
            count = len(list(members))
            most = max(most, count)
            unit = work / f"{stable_hash(split, group):016x}.unit"
            own = itertools.islice(told, count)
            if unit.exists():
                there = list(own)
                names = [group] if id_feature == "slide_id" else there
                units.append(Unit(unit, tuple((split, id) for id in names)))
            else:
                rows = (source[source.position(id)] for id in own)
                units.append(write_unit(unit, features, records(split, group, rows), id_feature))
        next(told, None)  # ends the bar
    facts: dict[str, Any] = {} if per_unit else {"split_level": "slide", "details": {"most_patches": most}}
    content_id = finalise(out, name, features, units, id_feature=id_feature, config=config, inputs=inputs, **facts)
    shutil.rmtree(work)
    return content_id
