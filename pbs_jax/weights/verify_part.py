"""`pbs weights verify` of an exported backbone or language model: the same random inputs through JAX and PyTorch.

For a published part that was imported and exported: no questions can be asked of it, but every layer runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.sizes import get_size
from pbs_jax.models.vit import ViT
from pbs_jax.train import handover
from pbs_jax.train.phase import definition
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights import torch_model
from pbs_jax.weights.export import true_shapes
from pbs_jax.weights.files import MODEL
from pbs_jax.weights.torch_answer import fill

PARTS = ("backbone", "language_model")
TOLERANCE = 1e-4  # of JAX's largest value
TOKENS = 48


def verify_part(export: Path, card: Mapping[str, Any], workdir: Path | None, out: Path | None) -> int:
    """Prints and writes the figures; returns 0, or 1 when the two differ. Raises DataError for weights that have changed."""
    name = card["phase"]
    workdir = workdir or Path(card["workdir"])
    params = handover.load(workdir, [name])[name]
    if tree_sha256(params) != card["trees"][name]:
        raise DataError(f"{export} was not exported from the weights that {workdir} now holds: export again")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    shapes = SimpleNamespace(**card["shapes"]["vit" if name == "backbone" else "decoder"])
    tensors = {key: value for key, value in load_file(export / MODEL).items() if not key.startswith("head.")}
    with torch.device("meta"):
        module = torch_model.ViT(shapes) if name == "backbone" else torch_model.Decoder(shapes)
    fill(module, tensors, str(export / MODEL))
    size = true_shapes(get_size(card["facts"]["size"]), card["facts"])
    run = _backbone if name == "backbone" else _language_model
    with torch.inference_mode(), jax.default_matmul_precision("highest"):
        theirs, ours = run(size, params, module, np.random.default_rng(0))
    error, scale = float(np.abs(theirs - ours).max()), float(np.abs(theirs).max())
    same = bool((theirs.argmax(-1) == ours.argmax(-1)).all())
    verdict = "equal" if error <= TOLERANCE * scale else "different"
    found = {"phase": name, "verdict": verdict, "max_abs": error, "relative": error / scale, "same_top_1": same}
    print(f"  {name}: max abs difference {error:.2e}, relative {error / scale:.2e} (limit {TOLERANCE:.0e})")
    print(f"  largest entry the same everywhere: {same}\n  JAX and PyTorch: {verdict}")
    if out:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    return 0 if verdict == "equal" else 1


def _backbone(size: Any, params: Any, module: Any, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens before the last norm of two random pictures, JAX's and PyTorch's."""
    pixels = draw.standard_normal((2, size.vit.image_size, size.vit.image_size, 3), np.float32)
    graph = definition(lambda rngs: ViT(size.vit, rngs=rngs))
    theirs = jax.jit(lambda params, x: nnx.merge(graph, params)(x)["x_prenorm"])(params, pixels)
    return np.asarray(theirs), module(torch.from_numpy(pixels).permute(0, 3, 1, 2)).numpy()


def _language_model(size: Any, params: Any, module: Any, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Logits of two rows of random tokens, JAX's and PyTorch's."""
    ids = draw.integers(0, size.decoder.vocab, (2, TOKENS))
    positions = np.broadcast_to(np.arange(TOKENS), (3, 2, TOKENS))
    mask = np.broadcast_to(np.tril(np.ones((TOKENS, TOKENS), bool)), (2, TOKENS, TOKENS))
    graph = definition(lambda rngs: Decoder(size.decoder, rngs=rngs))

    @jax.jit
    def logits(params: Any, ids: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        return model.logits(model(model.embed(ids), jnp.asarray(positions), jnp.asarray(mask))[0])

    embeds = module.embed(torch.from_numpy(ids))
    hidden, _ = module(embeds, torch.from_numpy(positions.copy()), torch.from_numpy(mask.copy()))
    return np.asarray(logits(params, ids)), module.logits(hidden).numpy()
