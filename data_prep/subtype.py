"""Names white cells by the classifier of a finished phase 0a. The only step of slide preparation that needs jax."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import batched
from pathlib import Path

import numpy as np

from data_prep.schema import WHITE_CELL_CLASSES, DataError

Named = tuple[str, float]  # class and its softmax probability


def backbone_sha256(backbone: Path) -> str:
    """The hash of the classifier's parameters. Raises DataError when `backbone` is no finished phase 0a."""
    from pbs_jax.train import handover
    from pbs_jax.train.state import tree_sha256

    handover.read(backbone, ("backbone",))
    return tree_sha256(handover.load(backbone, ["backbone", "head"]))


def classifier(backbone: Path, batch_size: int = 64) -> Callable[[Iterable[bytes]], Iterator[Named]]:
    """A function encoded crops -> (class, probability) of each, in order.

    Raises:
        DataError: `backbone` is no workdir of a finished phase 0a, or its head knows other classes.
    """
    import jax
    from flax import nnx

    from pbs_jax.data.augment import normalise
    from pbs_jax.data.examples import decode_image
    from pbs_jax.models.heads import ClassifierHead
    from pbs_jax.models.sizes import get_size
    from pbs_jax.models.vit import ViT
    from pbs_jax.train import handover
    from pbs_jax.train.phase import definition
    from pbs_jax.train.phase0_backbone import OUTPUTS

    content = handover.read(backbone, ("backbone",))
    params = handover.load(backbone, ["backbone", "head"])
    config = get_size(content["facts"]["size"]).vit
    if next(iter(OUTPUTS)) != "label" or OUTPUTS["label"] != len(WHITE_CELL_CLASSES):
        raise DataError(f"{backbone} has a head for other classes than {', '.join(WHITE_CELL_CLASSES)}")
    vit = definition(lambda rngs: ViT(config, rngs=rngs))
    head = definition(lambda rngs: ClassifierHead(config.dim, OUTPUTS, rngs=rngs))

    @jax.jit
    def probabilities(pixels: jax.Array) -> jax.Array:
        features = nnx.merge(vit, params["backbone"])(normalise(pixels))["x_prenorm"]
        return jax.nn.softmax(nnx.merge(head, params["head"])(features)["label"])

    def classify(images: Iterable[bytes]) -> Iterator[Named]:
        for batch in batched(images, batch_size):
            pixels = np.stack([decode_image(image, config.image_size) for image in batch])
            padded = np.pad(pixels, ((0, batch_size - len(batch)), (0, 0), (0, 0), (0, 0)))
            for row in np.asarray(probabilities(padded))[: len(batch)]:
                yield WHITE_CELL_CLASSES[int(row.argmax())], round(float(row.max()), 6)

    return classify
