"""`classifier` (paper section 9.2): a feed-forward head on the frozen backbone's class token, normed, and patch mean.

Two targets: "subtype", the five white-cell classes, and "white_cell", white cells against platelets, erythroblasts and
artifacts. Adam with cosine and early stopping on the validation split's AUC, as in the paper. `data_prep.subtype` names
cells by what is trained here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec
from sklearn.metrics import f1_score, roc_auc_score

from data_prep.io import open_dataset, read_manifest
from data_prep.schema import ARTIFACT, NO_WHITE_CELL, NOT_WHITE, WHITE_CELL, WHITE_CELL_CLASSES, DataError
from data_prep.stain_match import Density, density_of
from pbs_jax.data.examples import CellImages, Example, FeatureTable
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.layers import LayerNorm
from pbs_jax.models.sizes import get_size
from pbs_jax.sharding.mesh import fetch
from pbs_jax.sharding.rules import HEAD_RULES
from pbs_jax.train import handover
from pbs_jax.train.phase import Phase, batches, definition, parameters
from pbs_jax.train.state import Params, tree_sha256

TARGETS = {"subtype": WHITE_CELL_CLASSES, "white_cell": (NO_WHITE_CELL, WHITE_CELL)}
NORM_RULES = ((r"scale|bias", PartitionSpec()),)
NORM_EPS = 1e-6
STAINED = 256  # training cells, evenly drawn, that say how all are stained
# Raw types of the out-of-domain sets (`data_prep.sources.external`) that are no white cells, and that may be any cell.
OTHER_BODIES = (*NOT_WHITE, "artifact", "giant thrombocyte", "thrombocyte aggregation")
ANY_CELL = ("smudge cell", "smudge cells", "unidentified", "young unidentified")


def label_of(record: dict[str, Any], target: str) -> int | None:
    """Class number of a cell record, None when the target has no class for it (for "white_cell": of no known type)."""
    white = record["label"] in WHITE_CELL_CLASSES
    if target == "subtype":
        return WHITE_CELL_CLASSES.index(record["label"]) if white else None
    if record["label"] == ARTIFACT or record["comments"] in OTHER_BODIES:
        return 0
    return 1 if white or record["comments"] not in ("", *ANY_CELL) else None


def forward(dim: int, classes: int, hidden: int) -> Callable[[Params, Params, jax.Array], jax.Array]:
    """A function head, the backbone's last norm, tokens before it [B, 1+N, dim] -> logits float32[B, classes]."""
    head = definition(_head(dim, classes, hidden))
    norm = definition(lambda rngs: LayerNorm(dim, NORM_EPS))

    def logits(head_params: Params, norm_params: Params, tokens: jax.Array) -> jax.Array:
        return nnx.merge(head, head_params)(nnx.merge(norm, norm_params)(tokens.astype(jnp.float32)))["label"]

    return logits


def _head(dim: int, classes: int, hidden: int) -> Callable[[nnx.Rngs], ClassifierHead]:
    return lambda rngs: ClassifierHead(dim, {"label": classes}, rngs=rngs, hidden=hidden)


class LabelledFeatures(Sequence[Example]):
    """features bfloat16[1+N, D] and label int32[] of a split's cells that have a class. Raises DataError without any."""

    def __init__(self, root: Path, split: str, features: FeatureTable, target: str) -> None:
        self._features = features
        labelled = [(r["cell_id"], label_of(r, target)) for r in open_dataset(root / "cells", split)]
        self._rows = [(cell_id, label) for cell_id, label in labelled if label is not None]
        missing = set(range(len(TARGETS[target]))) - {label for _, label in self._rows}
        if missing:
            names = ", ".join(TARGETS[target][k] for k in sorted(missing))
            raise DataError(f"{root}/cells has no {split} cell of {names}: config.target={target} needs every class")

    def __len__(self) -> int:
        return len(self._rows)

    def image_id(self, index: int) -> str:
        return self._rows[index][0]

    def __getitem__(self, index: Any) -> Any:
        cell_id, label = self._rows[index]
        return {
            "index": np.asarray(index, np.int32),
            "features": self._features[cell_id],
            "label": np.asarray(label, np.int32),
        }


def build(config: Any) -> Phase:
    """config: size, seed, data.root, data.features, batch_size, target, hidden, init_from.backbone."""
    if config.target not in TARGETS:
        raise DataError(f'config.target "{config.target}" is unknown: use {" or ".join(TARGETS)}')
    root, classes = Path(config.data.root), TARGETS[config.target]
    features = FeatureTable(Path(config.data.features or root), ("train", "val"))
    backbone = handover.load(config.init_from.backbone, ["backbone"])["backbone"]
    if tree_sha256(backbone) != features.backbone_sha256:
        raise DataError(
            f"the cell_features are of another backbone than {config.init_from.backbone}: run `pbs data features`"
        )
    dim = backbone["norm"]["scale"].shape[0]
    _, head = parameters(_head(dim, len(classes), config.hidden), config.seed)
    classify = forward(dim, len(classes), config.hidden)

    def logits(trainable: Params, frozen: Params, batch: dict[str, jax.Array]) -> jax.Array:
        return classify(trainable["head"], frozen["backbone_norm"], batch["features"])

    def loss(trainable: Params, frozen: Params, batch: dict[str, jax.Array], key: jax.Array | None) -> Any:
        predicted = logits(trainable, frozen, batch)
        value = optax.softmax_cross_entropy_with_integer_labels(predicted, batch["label"]).mean()
        return value, {"accuracy": (predicted.argmax(-1) == batch["label"]).mean()}

    train, held_out = (LabelledFeatures(root, split, features, config.target) for split in ("train", "val"))
    val = batches(held_out, config.batch_size)
    predict = jax.jit(lambda trainable, frozen, batch: jax.nn.softmax(logits(trainable, frozen, batch)))

    def evaluate(trainable: Params, frozen: Params) -> dict[str, float]:
        found = [fetch(predict(trainable, frozen, batch))[real] for batch, real in val]
        return scores(np.concatenate(found), np.concatenate([batch["label"][real] for batch, real in val]))

    density = _density(root, get_size(config.size).vit.image_size)
    return Phase(
        name="classifier",
        trainable={"head": head},
        frozen={"backbone_norm": backbone["norm"]},
        rules={"head": HEAD_RULES, "backbone_norm": NORM_RULES},
        loss=loss,
        examples=train,
        evaluate=evaluate,
        facts={
            "size": config.size,
            "target": config.target,
            "classes": list(classes),
            "hidden": config.hidden,
            "backbone": str(Path(config.init_from.backbone)),
            "backbone_sha256": features.backbone_sha256,
            "datasets": {"cells": read_manifest(root / "cells")["content_id"], "cell_features": features.content_id},
            **({"density": dataclasses.asdict(density)} if density else {}),
        },
        example_id=train.image_id,
    )


def _density(root: Path, side: int) -> Density | None:
    cells = CellImages(root, "train", side)
    return density_of(cells[index]["image"] for index in range(0, len(cells), -(-len(cells) // STAINED)))


def scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """accuracy, macro F1 and AUC (one against the rest, macro) of probabilities [n, k] against labels int[n]."""
    two = probabilities.shape[1] == 2
    auc = roc_auc_score(labels, probabilities[:, 1] if two else probabilities, multi_class="ovr")
    chosen = probabilities.argmax(-1)
    return {
        "accuracy": float((chosen == labels).mean()),
        "macro_f1": float(f1_score(labels, chosen, average="macro")),
        "auc": float(auc),
    }
