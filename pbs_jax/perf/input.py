"""`pbs perf input`: cells/s of our input pipeline against a torch DataLoader, on the same cells, on this machine.

The peer reads PNG files, resizes with PIL and normalises on the host, as the released code does. Ours reads the written
dataset through Grain and hands uint8 to the device, which normalises; or reads cached features, which is what phases 1 to
4 train on.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from grain.experimental import ElasticIterator
from grain.sharding import ShardOptions
from PIL import Image

from data_prep.io import JPEG, TEXT, array, write_dataset
from data_prep.progress import progress
from data_prep.schema import DataError
from pbs_jax.data.augment import MEAN, STD
from pbs_jax.data.examples import FeatureTable, Preloaded, decode_image
from pbs_jax.data.order import reading_threads
from pbs_jax.perf.timing import alternate

SIDE, BATCH = 224, 32
FEATURES = ((257, 1024), (32, 768))


def report(cells: Path, count: int, rounds: int, growth: bool = False) -> str:
    """cells: a folder with pictures below it (e.g. data/cells/pbc_barcelona); `count` are read, again from the first where it
    holds fewer. growth: ours are measured over ten epochs of a tenth of them too, in the same rounds."""
    there = sorted(path for path in cells.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if len(there) < BATCH:
        raise DataError(f"{cells} holds {len(there)} pictures: at least {BATCH} are needed")
    if growth and count < 10 * BATCH:
        raise DataError(
            f"--growth reads a tenth of --count {count}: a batch of {BATCH} does not fit, so --count {10 * BATCH}"
        )
    pictures = list(itertools.islice(itertools.cycle(there), max(count, BATCH)))
    with tempfile.TemporaryDirectory() as folder:
        return _report(pictures, Path(folder), rounds, growth)


def _report(pictures: Sequence[Path], folder: Path, rounds: int, growth: bool) -> str:
    files = {picture: folder / "png" / f"{k}.png" for k, picture in enumerate(dict.fromkeys(pictures))}
    (folder / "png").mkdir()
    for source, target in progress(files.items(), desc="writing PNG"):
        Image.open(source).convert("RGB").resize((360, 360)).save(target)
    read = [files[picture] for picture in pictures]
    sides: dict[str, Callable[[], float]] = {
        f"torch DataLoader, {workers} workers": torch_loader(read, workers) for workers in (0, 2)
    }
    ours, sizes = {"ours, cells": our_cells(read, folder)}, {}
    for tokens, dim in FEATURES:
        for where, examples in our_features(len(read), tokens, dim, folder).items():
            name = f"ours, features {tokens} x {dim}, {where}"
            ours[name], sizes[name] = examples, 2 * tokens * dim
    sides |= {name: _reading(examples, len(read)) for name, examples in ours.items()}
    if growth:
        tenth = slice(0, len(read) // 10)
        sides |= {f"{name}, a tenth": _reading(examples.slice(tenth), len(read)) for name, examples in ours.items()}
    found = alternate(sides, rounds, twice=True)
    best = max(rate["wall"] for name, rate in found.items() if name.startswith("torch"))
    alone = found["torch DataLoader, 0 workers"]["cpu"]
    lines = [f"input of {len(read)} cells, batches of {BATCH}, {rounds} alternating rounds, medians:"]
    for name in [name for name in found if not name.endswith(", a tenth")]:
        rate = found[name]
        volume = f", {rate['wall'] * sizes[name] / 1e6:,.0f} MB/s" if name in sizes else ""
        line = f"  {name:<34} {rate['wall']:>9,.0f} cells/s ({rate['wall'] / best:.1f}x the better loader{volume})"
        if "2 workers" not in name:  # whose work is done in other processes
            line += f"; {rate['cpu']:,.0f} a CPU-second ({rate['cpu'] / alone:.1f}x the loader without workers)"
        if tenth_of := found.get(f"{name}, a tenth"):
            line += f"; a cell takes {tenth_of['wall'] / rate['wall']:.2f} times what one of a tenth of them takes"
        lines.append(line)
    return "\n".join(lines)


def torch_loader(files: Sequence[Path], workers: int) -> Callable[[], float]:
    """An epoch of a torch DataLoader: PNG, PIL resize to 224, normalise, float32 CHW."""
    import torch

    mean, std = (np.asarray(value, np.float32) for value in (MEAN, STD))

    class Pngs(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> Any:
            image = Image.open(files[index]).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            return torch.from_numpy(((np.asarray(image, np.float32) / 255.0 - mean) / std).transpose(2, 0, 1).copy())

    loader = torch.utils.data.DataLoader(Pngs(), batch_size=BATCH, shuffle=True, num_workers=workers)
    return lambda: float(sum(len(batch) for batch in loader))


def our_cells(files: Sequence[Path], folder: Path) -> grain.MapDataset[Any]:
    """224 px JPEGs, as `pbs data run` writes them."""
    import io

    from data_prep.io import open_dataset

    def records() -> Iterator[dict[str, Any]]:
        jpegs: dict[Path, bytes] = {}
        for k, path in enumerate(files):
            if path not in jpegs:
                encoded = io.BytesIO()
                Image.open(path).resize((SIDE, SIDE)).save(encoded, "JPEG", quality=95, subsampling=0)
                jpegs[path] = encoded.getvalue()
            yield {"cell_id": f"{k:06d}", "split": "train", "image": jpegs[path]}

    write_dataset(
        folder,
        "cells",
        {"cell_id": TEXT, "split": TEXT, "image": JPEG},
        records(),
        id_feature="cell_id",
        config={},
        inputs={},
    )
    source = open_dataset(folder / "cells", "train")
    return grain.MapDataset.source(source).map(lambda record: {"image": decode_image(record["image"], SIDE)})


def our_features(count: int, tokens: int, dim: int, folder: Path) -> dict[str, grain.MapDataset[Any]]:
    """Cached features bfloat16[tokens, dim]: from their shards (the first epoch), and held in memory as the phases hold them
    (`Preloaded`)."""
    import ml_dtypes

    values = np.random.default_rng(0).standard_normal((tokens, dim)).astype(ml_dtypes.bfloat16)
    name = f"features_{tokens}x{dim}"
    records = ({"cell_id": f"{k:06d}", "split": "train", "tokens": values} for k in range(count))
    features = {"cell_id": TEXT, "split": TEXT, "tokens": array("bfloat16", tokens, dim)}
    write_dataset(folder, name, features, records, id_feature="cell_id", config={"backbone_sha256": ""}, inputs={})
    table = FeatureTable(folder, ("train",), name)
    source = [f"{k:06d}" for k in range(count)]
    return {
        "shards": grain.MapDataset.source(source).map(lambda cell: {"features": table[cell]}),
        "memory": grain.MapDataset.source(Preloaded([{"features": table[cell]} for cell in source])),
    }


def _reading(examples: grain.MapDataset[Any], count: int) -> Callable[[], float]:
    """Whole batches of `count` examples, shuffled anew each epoch and time, through the training iterator."""
    turn = [0]
    steps = count // BATCH

    def run() -> float:
        turn[0] += 1
        stream = examples.seed(turn[0]).shuffle().repeat()
        options = grain.ReadOptions(num_threads=reading_threads(), prefetch_buffer_size=64)
        batches = iter(ElasticIterator(stream, BATCH, ShardOptions(0, 1), read_options=options))
        return float(sum(len(next(iter(next(batches).values()))) for _ in range(steps)))

    return run
