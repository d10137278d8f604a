"""Questions about slides, answered by a finished phase 4: slide features -> slide Perceiver -> projector -> language model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_prep.tokens import load_tokenizer
from pbs_jax.data.slide_examples import SlideBags, decode_bag, open_bags
from pbs_jax.decode.answer import Answerer, asked_int8, load_trees
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.pbs_vl import Projector
from pbs_jax.models.perceiver import PerceiverResampler, encode_slide
from pbs_jax.models.sizes import get_size, in_float32, told_queries, with_queries
from pbs_jax.train import handover
from pbs_jax.train.phase import definition

VISUAL_TREES = ("slide_perceiver", "projector")
SLIDES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class SlideAnswerer(Answerer):
    """A finished phase 4. `features` says which weights made the features that it learnt from; `answer` is Answerer's."""

    features: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_patches: int = 2048

    def open_bags(self, folder: Path, split: str, patches: int | None = None) -> SlideBags:
        """The split's bags of folder/slide_features, of at most so many patches. Raises DataError when other weights made them."""
        return open_bags(folder, split, self.features, self.max_patches, patches)

    def encode(self, images: Sequence[bytes]) -> np.ndarray:
        """Encoded bags of one N (`SlideBag.encode`) -> visual tokens float32[n, Q, lm width] for the language model's slot."""
        bags = [decode_bag(image) for image in images]
        graphs = tuple(self.graphs[name] for name in VISUAL_TREES)
        params = tuple(self.params[name] for name in VISUAL_TREES)
        out = []
        for start in range(0, len(bags), SLIDES_AT_ONCE):
            part = bags[start : start + SLIDES_AT_ONCE]
            features, mask = map(np.stack, zip(*part, *[part[0]] * (SLIDES_AT_ONCE - len(part)), strict=True))
            out.append(np.asarray(_visual(graphs, params, features, mask))[: len(part)])
        return np.concatenate(out)


@functools.partial(jax.jit, static_argnums=0)
def _visual(graphs: tuple[nnx.GraphDef[Any], ...], params: tuple[Any, ...], x: jax.Array, mask: jax.Array) -> jax.Array:
    """x bfloat16[B, N, D], mask bool[B, N] -> float32[B, Q, lm width]."""
    perceiver, projector = (nnx.merge(graph, tree) for graph, tree in zip(graphs, params, strict=True))
    return projector(encode_slide(perceiver, x.astype(jnp.float32), mask)).astype(jnp.float32)


def load_slide_answerer(
    workdir: str | Path,
    batch_size: int = 64,
    exact: bool = False,
    devices: Sequence[jax.Device] | None = None,
    int8: bool | None = None,
) -> SlideAnswerer:
    """Loads the chain that workdir/handover.json names, each part checked against the recorded hash. Raises DataError.

    exact, devices, int8: as of `load_answerer`.
    """
    content = handover.read(workdir, ("slide_qa",))
    facts = content["facts"]
    words = Path(content["config"]["data"]["root"]) / "tokenizer"
    tokenizer = load_tokenizer(words)
    handover.same_tokenizer(workdir, facts, tokenizer, words)
    size = with_queries(get_size(facts["size"], tokenizer, int8=asked_int8(content, int8)), told_queries(facts))
    size = in_float32(size) if exact else size
    shape = size.slide_perceiver(facts["features"]["dim"])
    params, mesh = load_trees(workdir, facts, VISUAL_TREES, ("language_model",), size.decoder, devices)
    graphs = {
        "slide_perceiver": definition(lambda rngs: PerceiverResampler(shape, rngs=rngs)),
        "projector": definition(lambda rngs: Projector(shape.dim, size.decoder.dim, rngs=rngs)),
        "language_model": definition(lambda rngs: Decoder(size.decoder, rngs=rngs)),
    }
    return SlideAnswerer(
        tokenizer,
        size.vit.image_size,
        graphs,
        params,
        batch_size,
        mesh,
        size.qformer.queries,
        features=facts["features"],
        max_patches=facts["max_patches"],
    )
