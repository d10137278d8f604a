"""Compiles a real step for a real TPU slice on this CPU, and says whether it fits, what it holds and how fast it can be.

The step is the one `pbs train` runs: same loss, rules, optimiser, donation. Memory comes from the TPU compiler's own
allocation; FLOPs from the jaxpr (scans multiplied out); the times are rooflines, lower bounds, not measurements.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pbs_jax.perf.count import count_flops, flops_and_saved_bytes
from pbs_jax.sharding import hlo
from pbs_jax.sharding.mesh import BATCH, answering_mesh
from pbs_jax.sharding.rules import specs
from pbs_jax.sharding.topology import GIB, Chip, bytes_per_chip, chip_of, on, slice_devices, slice_mesh
from pbs_jax.train.abstract import RULES, Row, abstract_phase, frozen_shapes
from pbs_jax.train.answers import answer_weight
from pbs_jax.train.optimizer import make_optimizer
from pbs_jax.train.step import abstract_state, make_step

# The two ways in which the TPU compiler says how much memory it would have needed.
OUT_OF_MEMORY = re.compile(r"(?:Used |\()([\d.]+)([GM])(?: of [\d.]+[GM] hbm|\) exceeds)")
FEATURE_SLIDES, FEATURE_PATCHES = 353, 2048  # the paper's slides, the official code's patches of each


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One cell of the table. Memory in bytes a chip, work in FLOPs over all chips, times in seconds a step.

    parts: what a chip holds, by part; needed: their sum, as the compiler allocated it (or would have to);
    flops: executed, recomputation included; model_flops: without recomputation.
    """

    name: str
    step: str
    topology: str
    chips: int
    batch: int
    per_step: float  # questions, cells, tokens or patches of one step
    unit: str
    fits: bool
    parts: dict[str, float]
    needed: float
    flops: float
    model_flops: float
    collectives: dict[str, float]
    counts: dict[str, float]
    compute_s: float
    memory_s: float
    links_s: float
    compile_s: float
    message: str = ""

    @property
    def bound_s(self) -> float:
        """The slowest of the three: no step can be quicker."""
        return max(self.compute_s, self.memory_s, self.links_s)

    @property
    def mfu(self) -> float:
        """Of the peak, at the bound: what recomputation, memory and links leave."""
        return self.model_flops / self.flops * self.compute_s / self.bound_s if self.flops else 0.0


def compile_train(config: Any, topology: str, row: Row | None = None, tensor: int = 1) -> Compiled:
    """The training step of config.phase at config.batch_size rows or examples. Raises DataError for a slice that does not exist."""
    mesh = slice_mesh(topology, tensor)
    phase = abstract_phase(config, row)
    trainable = {n: on(mesh, tree, specs(tree, RULES[n])) for n, tree in phase.trainable.items()}
    frozen = {n: on(mesh, tree, specs(tree, RULES[n])) for n, tree in phase.frozen.items()}
    batch = on(mesh, phase.batch, BATCH)
    tx = make_optimizer(config.optimizer, 1000)
    state = abstract_state(trainable, tx, mesh)
    key = on(mesh, jax.eval_shape(lambda: jax.random.key(0)), P())
    weight = answer_weight(config.weighting) if phase.tokens else None
    step = make_step(phase.loss, tx, 0, state, parts=config.accumulate, weight=weight).func  # type: ignore[attr-defined]
    parts = {
        "frozen": bytes_per_chip(frozen),
        "trainable": bytes_per_chip(trainable),
        "optimiser": bytes_per_chip(state.opt_state),
        "batch": bytes_per_chip(batch),
    }
    gradient = jax.value_and_grad(phase.loss, has_aux=True)
    arguments = (phase.trainable, phase.frozen, phase.batch, jax.random.key(0))
    with jax.set_mesh(mesh):
        flops, saved = flops_and_saved_bytes(gradient, *arguments)
        saved /= mesh.shape["data"] * mesh.shape["fsdp"] * config.accumulate
        lean = abstract_phase(config, row, remat="none")
        model_flops = count_flops(jax.value_and_grad(lean.loss, has_aux=True), *arguments)
        result = _compile(lambda: step.lower(state, frozen, batch, key))
    return _report(
        result, config.phase, "train", topology, config.batch_size, phase.questions,
        "cells" if not phase.tokens else "questions", parts, flops, model_flops, saved=saved,
    )  # fmt: skip


def compile_decode(config: Any, topology: str, row: Row, new_tokens: int = 64) -> Compiled:
    """Greedy answering of config.batch_size prompts of row.length tokens, laid out as `answering_mesh` does: prefill and
    `new_tokens` steps with a key-value cache."""
    from flax import nnx

    from pbs_jax.decode.generate import decode
    from pbs_jax.models.decoder import Decoder, init_cache

    phase = abstract_phase(config, row)
    shape, count = phase.size.decoder, config.batch_size
    devices = slice_devices(topology)
    mesh = answering_mesh(shape.kv_heads, devices) or slice_mesh(topology)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(shape, rngs=nnx.Rngs(0))))
    params = frozen_shapes(phase.size)
    params = on(mesh, params, specs(params, RULES["language_model"]))
    line = on(mesh, jax.ShapeDtypeStruct((count, row.length), jnp.int32), BATCH)
    mask = on(mesh, jax.ShapeDtypeStruct((count, row.length), jnp.bool_), BATCH)
    positions = on(mesh, jax.ShapeDtypeStruct((3, count, row.length), jnp.int32), P(None, ("data", "fsdp")))
    visual = on(mesh, jax.ShapeDtypeStruct((count, 32, shape.dim), jnp.bfloat16), BATCH)
    cache = jax.eval_shape(lambda: init_cache(shape, count, row.length + new_tokens))
    flags = {"slot_id": 1, "stop_ids": (2,), "max_new": new_tokens}
    parts = {
        "frozen": bytes_per_chip(params),
        "cache": bytes_per_chip(on(mesh, cache, P(None, ("data", "fsdp"), None, "tensor"))),
    }
    with jax.set_mesh(mesh):
        model = lambda tokens: count_flops(  # noqa: E731
            lambda p, e: nnx.merge(graph, p)(
                e, jnp.zeros((3, *e.shape[:2]), jnp.int32), jnp.ones((count, e.shape[1], row.length + new_tokens), bool),
                init_cache(shape, count, row.length + new_tokens), 0,
            )[0],
            params, jax.ShapeDtypeStruct((count, tokens, shape.dim), jnp.bfloat16),
        )  # fmt: skip
        one_token = model(1) + 2.0 * count * shape.dim * shape.vocab
        flops = model(row.length) + new_tokens * one_token
        result = _compile(lambda: decode.lower(graph, params, line, mask, positions, visual, **flags))
    reads = new_tokens * (parts["frozen"] + parts["cache"])
    return _report(
        result, "answers", "decode", topology, count, float(count * new_tokens), "tokens",
        parts, flops, flops, reads=reads,
    )  # fmt: skip


def compile_features(config: Any, topology: str) -> Compiled:
    """The frozen backbone over config.batch_size images, whole on every chip: what `pbs data features` runs."""
    from flax import nnx

    from pbs_jax.data.augment import normalise
    from pbs_jax.models.vit import ViT

    mesh = slice_mesh(topology)
    shape = abstract_phase(config).size.vit
    module = nnx.eval_shape(lambda: ViT(shape, rngs=nnx.Rngs(0)))
    graph, params = nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    params = on(mesh, params, P())
    pixels = (config.batch_size, shape.image_size, shape.image_size, 3)
    images = on(mesh, jax.ShapeDtypeStruct(pixels, jnp.uint8), BATCH)

    def forward(params: Any, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(normalise(images).astype(jnp.bfloat16))["x_prenorm"].astype(jnp.bfloat16)

    parts = {"frozen": bytes_per_chip(params), "batch": bytes_per_chip(images)}
    with jax.set_mesh(mesh):
        flops = count_flops(forward, params, images)
        sharding = jax.sharding.NamedSharding(mesh, BATCH)
        result = _compile(lambda: jax.jit(forward, out_shardings=sharding).lower(params, images))
    count = config.batch_size
    return _report(result, "backbone", "features", topology, count, float(count), "patches", parts, flops, flops)


def feature_hours(rate: float) -> float:
    """Hours that the paper's slides take at `rate` patches a second."""
    return FEATURE_SLIDES * FEATURE_PATCHES / rate / 3600


def _compile(lower: Any) -> dict[str, Any]:
    """Compiled or refused: {"compiled", "seconds"} or {"needed", "message", "seconds"}."""
    start = time.perf_counter()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        found = OUT_OF_MEMORY.search(text)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        needed = float(found[1]) * {"G": GIB, "M": 2**20}[found[2]] if found else math.inf
        return {"needed": needed, "message": text.splitlines()[0][:200], "seconds": time.perf_counter() - start}
    return {"compiled": compiled, "seconds": time.perf_counter() - start}


def _report(
    result: dict[str, Any],
    name: str,
    step: str,
    topology: str,
    batch: int,
    per_step: float,
    unit: str,
    held: Mapping[str, int],
    flops: float,
    model_flops: float,
    saved: float = 0.0,
    reads: float | None = None,
) -> Compiled:
    chip: Chip = chip_of(topology)
    parts = {name: float(size) for name, size in held.items()}
    chips = slice_mesh(topology).size
    shared: dict[str, Any] = {"name": name, "step": step, "topology": topology, "chips": chips, "batch": batch}
    shared |= {"per_step": per_step, "unit": unit, "flops": flops, "model_flops": model_flops}
    shared |= {"compute_s": flops / (chips * chip.flops), "compile_s": result["seconds"]}
    if "compiled" not in result:
        empty: dict[str, Any] = {"collectives": {}, "counts": {}, "memory_s": 0.0, "links_s": 0.0}
        return Compiled(**shared, **empty, fits=False, parts=parts, needed=result["needed"], message=result["message"])
    compiled = result["compiled"]
    memory = compiled.memory_analysis()
    temporary = float(memory.temp_size_in_bytes)
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + temporary
    saved = min(saved, temporary)
    parts = parts | {"saved for backward": saved, "temporaries": temporary - saved}
    parts["outputs and padding"] = needed - sum(parts.values())
    found = hlo.totals(compiled.as_text())
    moved = sum(found["collectives"].values())
    # Every byte a chip holds is read at least once a pass, a training step passes twice over frozen weights.
    reads = reads if reads is not None else (2 if step == "train" else 1) * needed
    return Compiled(
        **shared,
        fits=needed <= chip.usable,
        parts=parts,
        needed=float(needed),
        collectives=found["collectives"],
        counts=found["counts"],
        memory_s=reads / chip.bandwidth,
        links_s=moved / chip.links,
    )
