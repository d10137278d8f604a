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


def classifier(backbone: Path, batch_size: int = 64, *, match_stain: bool = False) -> Callable[..., Iterator[Named]]:
    """A function encoded crops -> (class, probability) of each, in order.

    match_stain: it takes a second argument, the crops again or more of their slide or laboratory, and makes the density
    of their stain that of the cells learnt from (see `stain_match`; too few are left as they are).

    Raises:
        DataError: `backbone` is no workdir of a finished phase 0a, its head knows other classes, or it does not say how
            the cells were stained that it learnt from.
    """
    import jax
    from flax import nnx

    from data_prep.stain_match import Density, density_of, matched
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
    if match_stain and "density" not in content["facts"]:
        raise DataError(f"{backbone} does not say how its training cells were stained: train that phase anew")
    vit = definition(lambda rngs: ViT(config, rngs=rngs))
    head = definition(lambda rngs: ClassifierHead(config.dim, OUTPUTS, rngs=rngs))

    @jax.jit
    def probabilities(pixels: jax.Array) -> jax.Array:
        features = nnx.merge(vit, params["backbone"])(normalise(pixels))["x_prenorm"]
        return jax.nn.softmax(nnx.merge(head, params["head"])(features)["label"])

    def classify(images: Iterable[bytes], alike: Iterable[bytes] = ()) -> Iterator[Named]:
        own = density_of(decode_image(image, config.image_size) for image in alike) if match_stain else None
        for batch in batched(images, batch_size):
            pixels = np.stack([decode_image(image, config.image_size) for image in batch])
            if own is not None:
                pixels = matched(pixels, own, Density(**content["facts"]["density"]))
            padded = np.pad(pixels, ((0, batch_size - len(batch)), (0, 0), (0, 0), (0, 0)))
            for row in np.asarray(probabilities(padded))[: len(batch)]:
                yield WHITE_CELL_CLASSES[int(row.argmax())], round(float(row.max()), 6)

    return classify
