"""`pbs perf int8`: what int8 kernels of a frozen language model do to its logits on real prompts, and to its size."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_prep.prompts import IMAGE_PAD
from data_prep.tokens import load_tokenizer
from pbs_jax.data.examples import QuestionBins
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.int8 import int8_kernels, logit_kl
from pbs_jax.models.pbs_vl import insert_visual
from pbs_jax.models.sizes import get_size
from pbs_jax.train import handover
from pbs_jax.train.answers import branch_mask, frozen_cast

LIMIT = 0.01  # nats: above it the check says no


def report(workdir: Path, root: Path, rows: int) -> tuple[str, bool]:
    """(what is printed, whether the mean KL stays below LIMIT) of the language model of `workdir` on val questions of `root`."""
    tokenizer = load_tokenizer(root / "tokenizer")
    size_name = handover.read(workdir, ("language_model",))["facts"]["size"]
    plain, small = get_size(size_name, tokenizer), get_size(size_name, tokenizer, int8=True)
    params = frozen_cast(handover.load(workdir, ["language_model"])["language_model"], plain.frozen_dtype)
    bins = QuestionBins(root, "val", captions=tokenizer)
    examples = [bins[i] for i in range(min(rows, len(bins)))]
    batch = {name: jnp.asarray(np.stack([example[name] for example in examples])) for name in examples[0]}
    trees = {"plain": (plain, params), "int8": (small, int8_kernels(params))}
    logits, slot_id = {}, tokenizer.id(IMAGE_PAD)
    for name, (size, tree) in trees.items():
        graph = nnx.graphdef(nnx.eval_shape(lambda shape=size.decoder: Decoder(shape, rngs=nnx.Rngs(0))))

        @jax.jit
        def forward(tree: object, batch: dict[str, jax.Array], graph: object = graph) -> jax.Array:
            model = nnx.merge(graph, tree)
            embeds = insert_visual(model.embed(batch["tokens"]), batch["tokens"], model.embed(batch["visual"]), slot_id)
            hidden, _ = model(embeds, batch["positions"].swapaxes(0, 1), branch_mask(batch["segments"]))
            return model.logits(jnp.take_along_axis(hidden, jnp.maximum(batch["answers"], 0)[..., None], axis=1))

        logits[name] = forward(tree, batch)
    real = np.asarray(batch["answers"] >= 0)
    kl = np.asarray(logit_kl(logits["plain"], logits["int8"]))[real]
    same = np.asarray(logits["plain"].argmax(-1) == logits["int8"].argmax(-1))[real].mean()
    sizes = [
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 2**20 for _, tree in trees.values()
    ]
    good = bool(kl.mean() < LIMIT)
    return (
        f"int8 kernels of {workdir} on {len(kl):,} answer positions of {len(examples)} real rows: KL mean {kl.mean():.2e}, "
        f"largest {kl.max():.2e} nats; same likeliest word {same:.2%}; {sizes[0]:,.1f} -> {sizes[1]:,.1f} MiB. "
        f"{'Good' if good else 'NOT good'}: the limit is a mean of {LIMIT} nats",
        good,
    )
