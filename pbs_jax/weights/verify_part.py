"""`pbs weights verify` of an export that answers no questions: its networks on the same random inputs in both frameworks.

Backbone and its heads, language model, the Q-Former of phase 1 (its image pass, all that PyTorch runs), phase 2's patch
Perceiver and projections, a classifier's head. Besides, every tensor of the file is compared bit by bit with the workdir's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from safetensors.torch import load_file

from data_prep.io import atomic_write
from data_prep.schema import DataError
from pbs_jax.models.alignment import Alignment
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.heads import ClassifierHead
from pbs_jax.models.perceiver import PerceiverResampler
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import Size, in_float32
from pbs_jax.models.vit import ViT
from pbs_jax.train import handover
from pbs_jax.train.phase import definition
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights import torch_model
from pbs_jax.weights.export import phase_tables, told_size, torch_tensors
from pbs_jax.weights.files import MODEL, PARTS
from pbs_jax.weights.stages import TOLERANCE, Difference, flat, table
from pbs_jax.weights.torch_answer import fill

TOKENS = 48
Call = Callable[[Any], Any]


def verify_part(export: Path, card: Mapping[str, Any], workdir: Path | None, out: Path | None) -> int:
    """Prints and writes the figures; returns 0, or 1 when the two differ. Raises DataError for weights that have changed."""
    phase, workdir = card["phase"], workdir or Path(card["workdir"])
    params = handover.load(workdir, card["trees"])
    for name, digest in card["trees"].items():
        if tree_sha256(params[name]) != digest:
            raise DataError(f"{export} was not exported from the weights that {workdir} now holds: export again")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    tensors, size = load_file(export / MODEL), in_float32(told_size(card["facts"]))
    tables = {name: rows for name, rows in phase_tables(phase, size).items() if name in params}
    expected = torch_tensors(params, tables)
    changed = [name for name, value in expected.items() if not np.array_equal(tensors[name].numpy(), value)]
    stages: dict[str, Difference] = {}
    with torch.inference_mode(), jax.default_matmul_precision("highest"):
        for name, ours, theirs in _stages(card, size, params, tensors):
            stages[name] = Difference()
            stages[name].add(ours, theirs)
    equal = not changed and all(stage.relative <= TOLERANCE for stage in stages.values())
    verdict, same = "equal" if equal else "different", len(expected) - len(changed)
    found = {"phase": phase, "verdict": verdict, "tensors": len(expected), "equal_tensors": same, **flat(stages)}
    print(*table(found, stages), f"  tensors equal bit by bit {same} of {len(expected)}", sep="\n")
    print(f"  JAX and PyTorch: {verdict}" + (f", first in {changed[0]}" if changed else ""))
    if out:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    return 0 if equal else 1


def _stages(
    card: Mapping[str, Any], size: Size, params: Any, tensors: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """(name, PyTorch's value, JAX's) of every network in the export, each on random inputs."""
    draw = np.random.default_rng(0)
    shapes = {name: SimpleNamespace(**fields) for name, fields in card["shapes"].items()}

    def noise(*shape: int) -> np.ndarray:
        return draw.standard_normal(shape, np.float32)

    def in_torch(prefix: str, make: Callable[[], Any]) -> Any:
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        with torch.device("meta"):
            module = make()
        fill(module, own, prefix or MODEL)
        return module

    def in_jax(tree: str, make: Callable[[nnx.Rngs], nnx.Module], call: Call) -> Any:
        graph = definition(make)
        return jax.jit(lambda leaves: call(nnx.merge(graph, leaves)))(params[tree])

    if "backbone" in params:
        side = size.vit.image_size
        pixels = noise(2, side, side, 3)
        headless = {name: value for name, value in tensors.items() if not name.startswith("head.")}
        with torch.device("meta"):
            vit = torch_model.ViT(shapes["vit"])
        fill(vit, headless, MODEL)
        tokens = in_jax("backbone", lambda rngs: ViT(size.vit, rngs=rngs), lambda net: net(pixels)["x_prenorm"])
        yield "backbone_tokens", vit(torch.from_numpy(pixels).permute(0, 3, 1, 2)), tokens
    if "head" in params:
        wide, hidden, outputs = (
            tensors[f"head.{name}"].shape[0] for name in ("norm.weight", "ffn.weight", "out.weight")
        )
        x = noise(4, TOKENS, wide // 2)
        named = {"all": outputs}
        head = in_torch("head.", lambda: torch_model.Head(wide, hidden, outputs))
        logits = in_jax(
            "head",
            lambda rngs: ClassifierHead(wide // 2, named, rngs=rngs, hidden=hidden),
            lambda net: net(jnp.asarray(x))["all"],
        )
        yield "head_logits", head(torch.from_numpy(x)), logits
    if "language_model" in params:
        ids = draw.integers(0, shapes["decoder"].vocab, (2, TOKENS))
        positions = np.broadcast_to(np.arange(TOKENS), (3, 2, TOKENS)).copy()
        mask = np.broadcast_to(np.tril(np.ones((TOKENS, TOKENS), bool)), (2, TOKENS, TOKENS)).copy()
        decoder = in_torch("", lambda: torch_model.Decoder(shapes["decoder"]))
        hidden_states, _ = decoder(decoder.embed(torch.from_numpy(ids)), *map(torch.from_numpy, (positions, mask)))
        yield (
            "logits",
            decoder.logits(hidden_states),
            in_jax(
                "language_model",
                lambda rngs: Decoder(size.decoder, rngs=rngs),
                lambda net: net.logits(net(net.embed(jnp.asarray(ids)), jnp.asarray(positions), jnp.asarray(mask))[0]),
            ),
        )
    if "qformer" in params:
        x = noise(2, TOKENS, size.qformer.encoder_width)
        qformer = in_torch("qformer.", lambda: torch_model.QFormer(shapes["qformer"]))
        queries = in_jax(
            "qformer", lambda rngs: QFormer(size.qformer, rngs=rngs), lambda net: net.encode(jnp.asarray(x))
        )
        yield "qformer_queries", qformer(torch.from_numpy(x)), queries
    if "patch_perceiver" in params:
        shape, prefix = size.patch_perceiver, PARTS["patch_perceiver"][1]
        x, cells = noise(2, TOKENS, shape.input_dim), noise(2, size.qformer.queries, size.qformer.dim)
        perceiver = in_torch(prefix, lambda: torch_model.Perceiver(shapes["perceiver"]))
        ours = perceiver(torch.from_numpy(x), torch.ones(2, TOKENS, dtype=torch.bool))
        patches = in_jax(
            "patch_perceiver", lambda rngs: PerceiverResampler(shape, rngs=rngs), lambda net: net(jnp.asarray(x))
        )
        yield "patch_tokens", ours, patches
        widths = (size.qformer.dim, shape.dim, size.qformer.projection)
        projected = in_jax(
            "alignment",
            lambda rngs: Alignment(*widths, rngs=rngs),
            lambda net: jnp.stack(net(jnp.asarray(cells), patches)),
        )
        given = (torch.from_numpy(cells), torch.from_numpy(np.array(patches)))
        sides = [
            in_torch(f"{side}_projection.", functools.partial(torch.nn.Linear, width, widths[2]))(value)
            for side, width, value in zip(("cell", "patch"), widths, given, strict=False)
        ]
        yield "projections", torch.stack(sides), projected
