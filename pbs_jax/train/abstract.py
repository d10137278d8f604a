"""A phase as shapes alone: its trees, the very loss that trains it, and a batch. What `pbs compile` and `pbs perf` work on.

Nothing is allocated, and no data or earlier phase is needed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from data_prep.prompts import SLOT_LENGTH
from data_prep.schema import DataError
from pbs_jax.models.int8 import int8_kernels
from pbs_jax.models.sizes import Size, of_config, with_remat
from pbs_jax.sharding import rules
from pbs_jax.train.answers import frozen_cast
from pbs_jax.train.phase import Networks
from pbs_jax.train.state import Params
from pbs_jax.train.step import LossFn

IMAGE_PAD_7B = 151655  # Qwen2.5's; any id would do for shapes
RULES = {
    "qformer": rules.QFORMER_RULES,
    "projector": rules.PROJECTOR_RULES,
    "language_model": rules.DECODER_RULES,
    "patch_perceiver": rules.PERCEIVER_RULES,
    "slide_perceiver": rules.PERCEIVER_RULES,
    "alignment": rules.ALIGNMENT_RULES,
}
TRAINABLE = {
    "cell_representation": ("qformer",),
    "cell_patch_alignment": ("patch_perceiver", "alignment"),
    "cell_qa": ("qformer", "projector"),
    "slide_qa": ("slide_perceiver", "projector"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of questions: `images` images in `length` tokens, at most `answers` of them supervised, `questions` on average.

    The defaults are what the released questions give at three images a row (`pbs perf flops` prints them).
    """

    images: int
    length: int
    answers: int
    questions: float


ROWS = {"cell_qa": Row(3, 1088, 249, 18.6), "slide_qa": Row(3, 1072, 274, 17.8)}


@dataclasses.dataclass(frozen=True)
class AbstractPhase:
    """trees and batch as ShapeDtypeStructs; loss as in `pbs_jax.train.phase.Phase`; tokens: of the language model, a batch."""

    name: str
    size: Size
    trainable: Params
    frozen: Params
    loss: LossFn
    batch: dict[str, jax.ShapeDtypeStruct]
    questions: float
    tokens: int


def abstract_phase(config: Any, row: Row | None = None, *, remat: str = "") -> AbstractPhase:
    """Phase 1 to 4 of `config`: phase, size, batch_size (examples or rows), int8; images_per_row 0 or 1 need a `row`.

    remat: in place of config.remat; "none" counts what a step must compute, without what it computes again to save memory.
    Raises DataError for a phase that has no shapes of its own.
    """
    size = with_remat(of_config(config, queries=config.queries), remat)
    count, width = config.batch_size, size.vit.dim
    tokens = 1 + (size.vit.image_size // size.vit.patch_size) ** 2
    row = row or ROWS.get(config.phase)
    if row and config.queries:
        row = dataclasses.replace(row, length=row.length + row.images * (config.queries - SLOT_LENGTH))
    match config.phase:
        case "cell_representation":
            from pbs_jax.train.phase1_cell_representation import make_loss, networks

            networks_, loss = networks(size), make_loss(size)
            batch = {"features": _half(count, tokens, width), "text": _int(count, config.text_length)}
            return _phase(config, size, networks_, loss, batch, float(count), 0)
        case "cell_patch_alignment":
            from pbs_jax.train import phase2_cell_patch_alignment as phase2

            networks_, loss = phase2.networks(size), phase2.make_loss(size, config)
            patch_tokens = tokens * size.patch_windows**2
            batch = {"cell": _half(count, tokens, width), "patch": _half(count, patch_tokens, width)}
            return _phase(config, size, networks_, loss, batch, float(count), 0)
        case "cell_qa" if row:
            from pbs_jax.train import phase3_cell_qa as phase3

            networks_, loss = phase3.networks(size), phase3.make_loss(size, IMAGE_PAD_7B, config.weighting)
            batch = {"visual": _half(count, row.images, tokens, width), **_questions(count, row)}
            return _phase(config, size, networks_, loss, batch, count * row.questions, count * row.length)
        case "slide_qa" if row:
            from pbs_jax.train import phase4_slide_qa as phase4

            dim = size.qformer.dim
            networks_, loss = phase4.networks(size, dim), phase4.make_loss(size, dim, IMAGE_PAD_7B, config)
            bag = (count, row.images, config.max_patches)
            batch = {"visual": _half(*bag, dim), "mask": jax.ShapeDtypeStruct(bag, jnp.bool_), **_questions(count, row)}
            return _phase(config, size, networks_, loss, batch, count * row.questions, count * row.length)
    raise DataError(f'phase "{config.phase}" has no shapes here: use phases 1 to 4')


def _phase(
    config: Any, size: Size, networks: Networks, loss: LossFn, batch: dict[str, Any], questions: float, tokens: int
) -> AbstractPhase:
    trees = {
        name: nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda m=make: m(nnx.Rngs(0)))))
        for name, make in networks.items()
    }
    trains = TRAINABLE[config.phase]
    if "language_model" in trees:
        trees["language_model"] = frozen_shapes(size)
    frozen = {name: tree for name, tree in trees.items() if name not in trains}
    if "qformer" in frozen:
        frozen["qformer"] = jax.eval_shape(lambda tree: frozen_cast(tree, size.frozen_dtype), frozen["qformer"])
    return AbstractPhase(config.phase, size, {n: trees[n] for n in trains}, frozen, loss, batch, questions, tokens)


def frozen_shapes(size: Size) -> Params:
    """The language model's tree as a phase holds it: frozen dtype, int8 kernels if the size says so."""
    from pbs_jax.models.decoder import Decoder

    plain = dataclasses.replace(size.decoder, int8=False)

    def make() -> Params:
        tree = frozen_cast(nnx.to_pure_dict(nnx.state(Decoder(plain, rngs=nnx.Rngs(0)))), size.frozen_dtype)
        return int8_kernels(tree) if size.decoder.int8 else tree

    return jax.eval_shape(make)


def _questions(count: int, row: Row) -> dict[str, jax.ShapeDtypeStruct]:
    line, answers = _int(count, row.length), (count, row.answers)
    arrays = {"tokens": line, "targets": line, "segments": line, "positions": _int(count, 3, row.length)}
    arrays |= {"answers": _int(*answers), "shares": jax.ShapeDtypeStruct(answers, jnp.float32)}
    arrays |= {"firsts": jax.ShapeDtypeStruct(answers, jnp.bool_)}
    return arrays | ({"groups": line} if row.images > 1 else {})


def _half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _int(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
