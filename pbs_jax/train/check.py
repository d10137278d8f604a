"""What is wrong with a config, all of it at once, from files alone: no device is touched and no model is built."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.io import read_manifest
from data_prep.prompts import SLOT_LENGTH
from data_prep.schema import DataError
from pbs_jax.train.phases import NAMES

FILE = "handover.json"
REMOTE = "gs://"  # what launch/tpu_worker.sh copies to its machine
QUERYING = ("cell_representation", "slide_qa")  # those whose queries fill the slot
TOKENS = {"language_model": "cell_qa_tokens", "cell_qa": "cell_qa_tokens", "slide_qa": "slide_qa_tokens"}
REMATS = ("none", "dots", "full")  # from the least recomputation to the least memory
ACCUMULATED = ("language_model", "cell_qa", "slide_qa")  # those whose Phase has a `weight`

NO_ROOT = "config.data.root is empty: name the folder that `pbs data run --out` wrote"
NO_INIT = "config.init_from.{field} is empty: name the workdir of a finished {phase} phase"


@dataclasses.dataclass(frozen=True)
class Needs:
    """Datasets under data.root, feature datasets, and which finished phase each init_from field must be, or may be."""

    data: tuple[str, ...]
    features: tuple[str, ...] = ()
    init: tuple[tuple[str, str], ...] = ()
    may: tuple[tuple[str, str], ...] = ()


NEEDS = {
    "backbone": Needs(("cells",)),
    "language_model": Needs(("cells", "cell_qa_tokens", "tokenizer")),
    "cell_representation": Needs(("cells", "tokenizer"), ("cell_features",)),
    "cell_patch_alignment": Needs(
        ("cells", "tokenizer"),
        ("cell_features", "patch_features"),
        (("backbone", "backbone"), ("qformer", "cell_representation")),
    ),
    "cell_qa": Needs(
        ("cell_qa_tokens", "tokenizer"),
        ("cell_features",),
        (("backbone", "backbone"), ("qformer", "cell_representation"), ("language_model", "language_model")),
    ),
    "slide_qa": Needs(
        ("slide_qa_tokens", "tokenizer"),
        ("slide_features",),
        (("language_model", "language_model"),),
        (("projector", "cell_qa"),),
    ),
    "classifier": Needs(("cells",), ("cell_features",), (("backbone", "backbone"),)),
}


def require_usable(config: Any) -> None:
    """Raises one DataError that lists every problem of the config."""
    _raise(list(problems(config)))


def require_usable_elsewhere(config: Any, name: str, mounted: bool) -> None:
    """The same for a new machine, which has this package and nothing else of this one's files.

    name: what --config names. mounted: folders are mounted there first, so that absolute paths may be right.
    """
    _raise(list(_problems_elsewhere(config, name, mounted)))


def _raise(found: Sequence[str]) -> None:
    if len(found) == 1:
        raise DataError(found[0])
    if found:
        raise DataError(
            f"the config has {len(found)} problems:" + "".join(f"\n  {i}. {p}" for i, p in enumerate(found, 1))
        )


def problems(config: Any) -> Iterator[str]:
    """One sentence a problem, each with the field to change."""
    if config.phase not in NAMES:
        yield f'config.phase "{config.phase}" is unknown: use one of {", ".join(NAMES)}'
        return
    yield from _numbers(config)
    needs = NEEDS.get(config.phase, Needs(()))
    yield from _datasets(config, needs)
    given = tuple((field, phase) for field, phase in needs.may if config.init_from[field])
    for field, phase in needs.init + given:
        yield from _init(config, field, phase)
    yield from _batch(config)
    yield from _shapes(config)


def _problems_elsewhere(config: Any, name: str, mounted: bool) -> Iterator[str]:
    if not name.isidentifier():
        yield f"--config={name} is a file of this machine: put it into configs/ and name it without .py"
    yield from _numbers(config)
    if not config.data.root:
        yield NO_ROOT
    for field, phase in NEEDS.get(config.phase, Needs(())).init:
        if not config.init_from[field]:
            yield NO_INIT.format(field=field, phase=phase)
    fields = {f"data.{field}": config.data[field] for field in ("root", "features", "slides")}
    fields |= {f"init_from.{field}": config.init_from[field] for field in config.init_from} | {"words": config.words}
    for field, address in fields.items():
        if address and not address.startswith(REMOTE) and not (mounted and address.startswith("/")):
            yield (
                f"config.{field}={address} is not on the new machine: copy it to a bucket (`gcloud storage rsync "
                f"--recursive`) and give its {REMOTE} address, or mount it there (--before) and give its absolute path"
            )


def _numbers(config: Any) -> Iterator[str]:
    for name in ("batch_size", "accumulate", "log_every", "save_every", "keep"):
        if config[name] < 1:
            yield f"config.{name}={config[name]}: use 1 or more"
    if config.steps < 1 and config.epochs < 1:
        yield f"config.steps={config.steps} and config.epochs={config.epochs}: set one of them"
    early = config.early_stopping
    if early.metric and (early.patience < 1 or not config.eval_every):
        yield (
            f"config.early_stopping.patience={early.patience} and config.eval_every={config.eval_every}: stopping early needs "
            "1 or more of the first and evaluations (eval_every not 0)"
        )
    for name, known in _choices(config.phase).items():
        if config[name] not in known:
            yield f'config.{name} "{config[name]}" is unknown: use {" or ".join(name or "nothing" for name in known)}'
    if config.accumulate > 1 and config.phase not in ACCUMULATED:
        yield (
            f"config.accumulate={config.accumulate}: the loss of phase {config.phase} is no mean over answers, so that its "
            f"gradient is no sum over parts of a batch: use 1 (more is for {', '.join(ACCUMULATED)})"
        )
    if config.images_per_row < 0:
        yield f"config.images_per_row={config.images_per_row}: use 0 (one question a row), 1, or more"
    if config.queries < 0 or (config.queries and config.phase not in QUERYING):
        yield f"config.queries={config.queries}: 0 or more, of phases {' and '.join(QUERYING)}; 2 and 3 take phase 1's"
    if config.optimizer.name not in ("adamw", "muon"):
        yield f'config.optimizer.name "{config.optimizer.name}" is unknown: use adamw or muon'
    if not 0.0 <= config.optimizer.warmup_fraction < 1.0:
        yield f"config.optimizer.warmup_fraction={config.optimizer.warmup_fraction}: use a share below 1"
    sizes = [config.mesh[name] for name in ("data", "fsdp")]
    known = math.prod(size for size in sizes if size > 0) * max(config.accumulate, 1)
    if config.batch_size >= 1 and config.batch_size % known:
        yield (
            f"config.batch_size={config.batch_size} is not divisible by the mesh's data x fsdp x accumulate = {known}: "
            "use a multiple, or another config.mesh"
        )


def _choices(phase: str) -> dict[str, Collection[str]]:
    """Words that a field of the config may be, from where they are read."""
    fields: dict[str, Collection[str]] = {
        "weighting": ("token", "answer"),
        "remat": ("", *REMATS),
        "attention": ("", "cudnn"),
    }
    match phase:
        case "language_model":
            fields["lesson"] = ("drill", "all")
        case "cell_patch_alignment":
            from pbs_jax.models.alignment import LOSSES
            from pbs_jax.train import phase2_cell_patch_alignment

            fields |= {"target": phase2_cell_patch_alignment.TARGETS, "alignment": LOSSES}
        case "classifier":
            from pbs_jax.train import classifier

            fields["target"] = classifier.TARGETS
    return fields


def _batch(config: Any) -> Iterator[str]:
    """A batch that the train split cannot fill; where its examples are no records, only the built phase can tell."""
    drawn = config.phase == "language_model" and (config.lesson == "drill" or config.data.slides)
    if not config.data.root or drawn or (config.phase in ("cell_qa", "slide_qa") and config.images_per_row == 0):
        return
    dataset = Path(config.data.root) / TOKENS.get(config.phase, "cells")
    if _unreadable(dataset):  # said elsewhere
        return
    count = read_manifest(dataset)["splits"].get("train", 0)
    if config.batch_size > count:
        yield (
            f"config.batch_size={config.batch_size} is more than the {count} records of the train split of {dataset}: use "
            "a smaller one, or more data"
        )


def _datasets(config: Any, needs: Needs) -> Iterator[str]:
    if not config.data.root:
        yield NO_ROOT
        return
    root = Path(config.data.root)
    for name in needs.data:
        if name != "tokenizer":
            yield from _unreadable(root / name)
        elif not (root / name / "tokenizer.json").is_file():
            yield f"{root}/tokenizer/tokenizer.json is missing: `pbs data run` writes it"
    for name in needs.features:
        for problem in _unreadable(Path(config.data.features or root) / name):
            yield problem.replace("`pbs data run` with this --out first", "`pbs data features`")


def _unreadable(dataset: Path) -> list[str]:
    try:
        read_manifest(dataset)
    except DataError as error:
        return [str(error)]
    return []


def _init(config: Any, field: str, phase: str) -> Iterator[str]:
    workdir = config.init_from[field]
    if not workdir:
        yield NO_INIT.format(field=field, phase=phase)
        return
    content = _handover(workdir)
    if content is None:
        yield f"{Path(workdir) / FILE} is missing: that phase is not finished; run `pbs train` there first"
    elif content["phase"] != phase:
        yield f"{Path(workdir) / FILE} is of phase {content['phase']}, expected {phase}"


def _shapes(config: Any) -> Iterator[str]:
    """Lengths and widths that must agree between data, earlier phases and the size."""
    from pbs_jax.models.sizes import get_size

    try:
        size = get_size(config.size)
    except DataError as error:
        yield str(error)
        return
    if config.phase in TOKENS:
        length = _shape(Path(config.data.root), TOKENS[config.phase], "tokens")
        if length and length[0] <= SLOT_LENGTH:
            yield (
                f"{config.data.root}/{TOKENS[config.phase]} has rows of {length[0]} tokens, no more than the {SLOT_LENGTH} "
                "visual tokens: write it with a larger --bin-length"
            )
    features = Path(config.data.features or config.data.root)
    widths = {
        "cell_representation": "cell_features",
        "cell_qa": "cell_features",
        "cell_patch_alignment": "patch_features",
    }
    if config.phase in widths:
        width = _shape(features, widths[config.phase], "tokens")
        if width and width[-1] != size.qformer.encoder_width:
            yield (
                f"{features}/{widths[config.phase]} is {width[-1]} wide, the Q-Former of size {config.size} reads "
                f"{size.qformer.encoder_width}: use the features of that size's backbone"
            )
    if config.phase == "slide_qa":
        width = _shape(features, "slide_features", "tokens")
        made_by = _kind(features / "slide_features")
        if width and made_by == "phase2" and width[-1] != size.qformer.dim:
            yield (
                f"{features}/slide_features is {width[-1]} wide, the patch Perceiver of size {config.size} gives "
                f"{size.qformer.dim}: make them with that size's phase 2"
            )
    trees = {"qformer": ("qformer", "query_tokens", size.qformer.dim)}
    trees |= {"language_model": ("language_model", "norm/scale", size.decoder.dim)}
    trees |= {"projector": ("projector", "linear/kernel", size.decoder.dim)}
    for field, (tree, leaf, expected) in trees.items():
        content = _handover(config.init_from[field]) if config.init_from[field] else None
        found = (content or {}).get("trees", {}).get(tree, {}).get(leaf)
        if found and found[0][-1] != expected:
            yield (
                f"config.init_from.{field}={config.init_from[field]} has width {found[0][-1]}, size {config.size} has "
                f"{expected}: it was trained at another size"
            )


def _shape(folder: Path, dataset: str, feature: str) -> list[int]:
    """Shape of a dataset's feature; [] where there is none (said elsewhere)."""
    try:
        return list(read_manifest(folder / dataset)["features"][feature]["shape"])
    except (DataError, KeyError):
        return []


def _kind(dataset: Path) -> str:
    try:
        return str(read_manifest(dataset)["config"].get("kind", ""))
    except DataError:
        return ""


def _handover(workdir: str) -> dict[str, Any] | None:
    path = Path(workdir) / FILE
    return json.loads(path.read_text()) if path.is_file() else None
