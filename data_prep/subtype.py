"""Names cells by a finished classifier: the head of phase 0a, or a `classifier` of the two stages of paper 3.1.2, which
stands on a backbone. The only step of slide preparation that needs jax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.schema import WHITE_CELL_CLASSES, DataError

if TYPE_CHECKING:
    import jax

    from pbs_jax.train.state import Params

Named = tuple[str, float]  # class and its softmax probability
PHASES = {"white_cell": ("classifier",), "subtype": ("backbone", "classifier")}  # target -> what has a head for it


def classifier_sha256(workdir: Path, target: str = "subtype") -> str:
    """The hash of the classifier's parameters, its backbone's among them. Raises DataError as `classifier` does."""
    from pbs_jax.train.state import tree_sha256

    return tree_sha256(_load(workdir, target)[1])


def _load(workdir: Path, target: str) -> tuple[Mapping[str, Any], Params]:
    """Facts and trees, `backbone` and `head`, of a finished phase that has a head for `target`."""
    from pbs_jax.train import handover

    content = handover.read(workdir, PHASES[target])
    facts = content["facts"]
    if content["phase"] == "backbone":
        return facts, handover.load(workdir, ["backbone", "head"])
    if facts["target"] != target:
        raise DataError(
            f"{workdir} was trained with config.target={facts['target']}: give one of config.target={target}"
        )
    return facts, handover.load_recorded(workdir, facts, "backbone") | handover.load(workdir, ["head"])


def classifier(
    workdir: Path, batch_size: int = 64, *, match_stain: bool = False, target: str = "subtype"
) -> Callable[..., Iterator[Named]]:
    """A function encoded crops -> (class, probability) of each, in order.

    target: "subtype", the five classes, or "white_cell" (`pbs_jax.train.classifier.TARGETS`).
    match_stain: it takes a second argument, the crops again or more of their slide or laboratory, and makes the density
    of their stain that of the cells learnt from (see `stain_match`; too few are left as they are).

    Raises:
        DataError: `workdir` is no finished phase 0a or `classifier` of that target, its backbone is no longer the one
            that it was trained on, or it does not say how the cells were stained that it learnt from.
    """
    import jax

    from data_prep.stain_match import Density, density_of, matched
    from pbs_jax.data.examples import decode_image

    facts, params = _load(workdir, target)
    if match_stain and "density" not in facts:
        raise DataError(f"{workdir} does not say how its training cells were stained: train that phase anew")
    classes = tuple(facts.get("classes", WHITE_CELL_CLASSES))
    side, logits = _network(facts, params)
    probabilities = jax.jit(lambda pixels: jax.nn.softmax(logits(pixels)))

    def classify(images: Iterable[bytes], alike: Iterable[bytes] = ()) -> Iterator[Named]:
        own = density_of(decode_image(image, side) for image in alike) if match_stain else None
        for batch in batched(images, batch_size):
            pixels = np.stack([decode_image(image, side) for image in batch])
            if own is not None:
                pixels = matched(pixels, own, Density(**facts["density"]))
            padded = np.pad(pixels, ((0, batch_size - len(batch)), (0, 0), (0, 0), (0, 0)))
            for row in np.asarray(probabilities(padded))[: len(batch)]:
                yield classes[int(row.argmax())], round(float(row.max()), 6)

    return classify


def _network(facts: Mapping[str, Any], params: Params) -> tuple[int, Callable[[jax.Array], jax.Array]]:
    """The side of the crops that the phase of these facts takes, and a function uint8[B, side, side, 3] -> logits [B, k]."""
    from flax import nnx

    from pbs_jax.data.augment import normalise
    from pbs_jax.models.heads import ClassifierHead
    from pbs_jax.models.sizes import backbone_shape, get_size
    from pbs_jax.models.vit import ViT
    from pbs_jax.train import handover
    from pbs_jax.train.classifier import forward
    from pbs_jax.train.phase import definition
    from pbs_jax.train.phase0_backbone import OUTPUTS

    below = handover.read(facts["backbone"])["facts"] if "backbone" in facts else facts
    config = backbone_shape(below, get_size(facts["size"]).vit)
    vit = definition(lambda rngs: ViT(config, rngs=rngs))

    def tokens(pixels: jax.Array) -> jax.Array:
        return nnx.merge(vit, params["backbone"])(normalise(pixels))["x_prenorm"]

    if "target" in facts:
        of_tokens = forward(config.dim, len(facts["classes"]), facts["hidden"])
        return config.image_size, lambda pixels: of_tokens(params["head"], params["backbone"]["norm"], tokens(pixels))
    head = definition(lambda rngs: ClassifierHead(config.dim, OUTPUTS, rngs=rngs))
    return config.image_size, lambda pixels: nnx.merge(head, params["head"])(tokens(pixels))["label"]
