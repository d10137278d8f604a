"""`pbs weights verify`: the same pictures and questions through JAX and, reloaded from the export, through PyTorch.

Stages are compared on the same input, each against JAX, as max|difference| over JAX's max|value|: a stage above
TOLERANCE fails. In between, features are rounded to bfloat16 as the training data was; there one last bit of float32
can turn one of bfloat16, so what follows is compared on JAX's rounded features, and the end-to-end rows carry no limit.
Answers are compared end to end, each side on its own. All must be equal; a pair that parts at a tie (the two tokens'
logits within TIE of each other) is counted apart and does not fail.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from data_prep.io import atomic_write
from data_prep.progress import progress
from data_prep.prompts import IM_END, IMAGE_PAD
from data_prep.schema import QA, DataError, shown_options, stable_hash
from data_prep.tokens import PAD, prompt_tokens
from pbs_jax.bench.records import load_questions
from pbs_jax.bench.run import picture_source
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import decode_image
from pbs_jax.decode.answer import MAX_NEW, VISUAL_TREES, Answerer, load_answerer
from pbs_jax.decode.generate import generate
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights.torch_answer import TorchAnswerer, batch_rows, load_export

TOLERANCE, TIE = 1e-4, 1e-2
LIMITED = ("backbone_tokens", "qformer_queries", "visual_tokens", "prompt_logits")
END_TO_END = ("end_to_end_visual_tokens", "end_to_end_prompt_logits")
BATCH = 64


class Difference:
    """Running max and mean absolute difference of one stage, and max|JAX|."""

    def __init__(self) -> None:
        self.largest = self.total = self.scale = 0.0
        self.count = 0

    def add(self, torch_value: Any, jax_value: Any) -> None:
        ours, theirs = np.asarray(torch_value, np.float64), np.asarray(jax_value, np.float64)
        if ours.shape != theirs.shape:
            raise DataError(f"PyTorch gives shape {ours.shape} where JAX gives {theirs.shape}")
        error = np.abs(ours - theirs)
        # np.maximum keeps a NaN, which then is within no tolerance; max() would lose it.
        self.largest, self.scale = np.maximum(self.largest, error.max()), np.maximum(self.scale, np.abs(theirs).max())
        self.total, self.count = self.total + error.sum(), self.count + error.size

    @property
    def relative(self) -> float:
        return self.largest / self.scale


def verify(
    export: Path, data: Path, *, split: str = "test", n: int = 200, out: Path | None = None, workdir: Path | None = None
) -> int:
    """Prints the table, writes `out` (flat JSON), returns 0 or, when the two disagree, 1.

    `workdir`: the finished phase that was exported, by default where export.json says. n questions of the split are
    drawn by hash. Raises DataError when the export is not of that phase.
    """
    ours = load_export(export, BATCH)
    workdir = workdir or Path(ours.card["workdir"])
    theirs = load_answerer(workdir, BATCH)
    for name, digest in ours.card["trees"].items():
        if tree_sha256(theirs.params[name]) != digest:
            raise DataError(f"{export} was not exported from the weights that {workdir} now holds: export again")
    asked = sorted(load_questions(data, split).items, key=lambda qa: stable_hash("verify", qa.id))[:n]
    picture = picture_source(data, split, "image", asked)
    images = {qa.image_id: picture(qa) or b"" for qa in sorted(asked, key=lambda qa: qa.image_id)}
    with jax.default_matmul_precision("highest"):
        found = compare(theirs, ours, asked, images)
    found = {"phase": ours.card["phase"], "step": ours.card["step"], "split": split, **found}
    print(table(found))
    if out:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    return 0 if found["verdict"] == "equal" else 1


@torch.inference_mode()
def compare(theirs: Answerer, ours: TorchAnswerer, asked: Sequence[QA], images: dict[str, bytes]) -> dict[str, Any]:
    """All figures, flat: `verdict`, counts, and per stage `_max_abs`, `_mean_abs`, `_relative`."""
    stages = {name: Difference() for name in (*LIMITED, *END_TO_END)}
    graphs, params = (tuple(values[name] for name in VISUAL_TREES) for values in (theirs.graphs, theirs.params))
    pixels = np.stack([decode_image(image, theirs.image_side) for image in images.values()])
    place = {image_id: row for row, image_id in enumerate(images)}
    shared = []  # JAX's visual tokens: its own end-to-end ones, and the input of both language models
    for start in range(0, len(pixels), BATCH):
        part = pixels[start : start + BATCH]
        padded = np.concatenate([part, np.repeat(part[:1], BATCH - len(part), axis=0)])
        tokens, rounded, queries, visual = (
            np.array(value)[: len(part)] for value in jax_stages(graphs, params, padded)
        )
        own = ours.parts["qformer"](torch.from_numpy(rounded))
        stages["backbone_tokens"].add(ours.features(part), tokens)
        stages["qformer_queries"].add(own, queries)
        stages["visual_tokens"].add(ours.parts["projector"](own), visual)
        shared.append(visual)
    given, alone = np.concatenate(shared), ours.encode(list(images.values()))
    stages["end_to_end_visual_tokens"].add(alone, given)

    options = [shown_options(qa) for qa in asked]
    prompts = [prompt_tokens(theirs.tokenizer, qa, shown) for qa, shown in zip(asked, options, strict=True)]
    kinds = [qa.question_type for qa in asked]
    divergence, same_top, same, ties, parted = 0.0, 0, 0, 0, []
    batches = batch_rows(prompts, kinds, BATCH)
    for rows in progress(batches, len(batches), "comparing answers"):
        kind, part = kinds[rows[0]], [prompts[i] for i in rows]
        where = [place[asked[i].image_id] for i in rows]
        jax_tokens, jax_first = jax_generate(theirs, part, given[where], kind)
        _, torch_first = ours.generate(part, given[where], kind)
        stages["prompt_logits"].add(torch_first, jax_first)
        divergence += kl(jax_first, torch_first.numpy()).sum()
        same_top += int((torch_first.numpy().argmax(-1) == jax_first.argmax(-1)).sum())
        torch_tokens, torch_first = ours.generate(part, alone[where], kind)
        stages["end_to_end_prompt_logits"].add(torch_first, jax_first)
        for row, i in enumerate(rows):
            if jax_tokens[row] == torch_tokens[row]:
                same += 1
                continue
            gap = margin(ours, part[row], alone[where[row]], jax_tokens[row], torch_tokens[row])
            ties += gap <= TIE
            texts = " and ".join(repr(ours.tokenizer.decode(tokens[row])) for tokens in (jax_tokens, torch_tokens))
            parted.append(f"{asked[i].id}: {texts}, {gap:.2g} logits apart")

    sound = all(stages[name].relative <= TOLERANCE for name in LIMITED) and same + ties == len(asked)
    figures = {
        f"{name}_{what}": float(value)
        for name, stage in stages.items()
        for what, value in (
            ("max_abs", stage.largest),
            ("mean_abs", stage.total / stage.count),
            ("relative", stage.relative),
        )
    }
    return {
        "verdict": "equal" if sound else "different",
        "questions": len(asked),
        "images": len(images),
        "identical_answers": same,
        "ties": ties,
        "same_first_token": same_top,
        "mean_logit_kl": divergence / len(asked),
        "tolerance_relative": TOLERANCE,
        **figures,
        "parted": "; ".join(parted) or "none",
    }


@functools.partial(jax.jit, static_argnums=0)
def jax_stages(graphs: tuple[Any, ...], params: tuple[Any, ...], pixels: jax.Array) -> tuple[jax.Array, ...]:
    """uint8[B, S, S, 3] -> backbone tokens, the same rounded to bfloat16, queries, visual tokens, all float32."""
    vit, qformer, projector = (nnx.merge(graph, tree) for graph, tree in zip(graphs, params, strict=True))
    tokens = vit(normalise(pixels))["x_prenorm"]
    rounded = tokens.astype(jnp.bfloat16).astype(jnp.float32)
    queries = qformer.encode(rounded)
    return tokens, rounded, queries, projector(queries)


def jax_generate(
    answerer: Answerer, prompts: Sequence[Sequence[int]], visual: np.ndarray, kind: str
) -> tuple[list[list[int]], np.ndarray]:
    """Token ids and first-step logits of one batch, filled up to BATCH rows so that few programs are compiled."""
    fill = [0] * (BATCH - len(prompts))
    tokens, first = generate(
        answerer.graphs["language_model"],
        answerer.params["language_model"],
        [*prompts, *(prompts[i] for i in fill)],
        jnp.asarray(np.concatenate([visual, visual[fill]])),
        pad_id=answerer.tokenizer.id(PAD),
        slot_id=answerer.tokenizer.id(IMAGE_PAD),
        stop_ids=(answerer.tokenizer.id(IM_END),),
        max_new=MAX_NEW[kind],
    )
    return tokens[: len(prompts)], first[: len(prompts)]


def margin(ours: TorchAnswerer, prompt: Sequence[int], visual: np.ndarray, one: list[int], two: list[int]) -> float:
    """How far apart PyTorch's logits of the two tokens are where two answers first differ."""
    stop = ours.card["answers"]["stop_id"]
    one, two = [*one, stop], [*two, stop]
    at = next(k for k, pair in enumerate(zip(one, two, strict=False)) if pair[0] != pair[1])
    _, logits = ours.generate([[*prompt, *one[:at]]], visual[None], "true_false")
    return float((logits[0, one[at]] - logits[0, two[at]]).abs())


def kl(jax_logits: np.ndarray, torch_logits: np.ndarray) -> np.ndarray:
    """KL divergence [n] of PyTorch's next-token distribution from JAX's, in nats, float64."""
    p, q = (np.asarray(logits, np.float64) for logits in (jax_logits, torch_logits))
    log_p, log_q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (p, q))
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def table(found: dict[str, Any]) -> str:
    """The result for a terminal."""
    lines = [f"  {'stage':<26}{'max abs':>12}{'mean abs':>12}{'relative':>12}   limit"]
    for name in (*LIMITED, *END_TO_END):
        values = [found[f"{name}_{what}"] for what in ("max_abs", "mean_abs", "relative")]
        limit = f"{TOLERANCE:.0e}" if name in LIMITED else "none"
        lines.append(f"  {name.replace('_', ' '):<26}" + "".join(f"{value:>12.2e}" for value in values) + f"   {limit}")
    n = found["questions"]
    lines += [
        f"  first token equal {found['same_first_token']} of {n}, mean KL of the logits {found['mean_logit_kl']:.2e}",
        f"  answers identical {found['identical_answers']} of {n}, parted at a tie {found['ties']}",
        f"  JAX and PyTorch: {found['verdict']}",
    ]
    if found["parted"] != "none":
        lines.insert(-1, f"  parted: {found['parted']}")
    return "\n".join(lines)
