"""`pbs weights verify`: the same pictures (or slides) and questions through JAX and, reloaded from the export, PyTorch.

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
from pbs_jax.bench.pictures import load_pictures
from pbs_jax.bench.records import load_questions
from pbs_jax.bench.slide_rows import EncodedBags
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import decode_image
from pbs_jax.decode.answer import MAX_NEW, VISUAL_TREES, Answerer, load_answerer
from pbs_jax.decode.batching import batch_rows
from pbs_jax.decode.generate import generate
from pbs_jax.decode.slide_answer import load_slide_answerer
from pbs_jax.train.state import tree_sha256
from pbs_jax.weights.stages import TOLERANCE, Difference, flat, table
from pbs_jax.weights.torch_answer import TorchAnswerer, load_export

TIE = 1e-3
LIMITED = ("backbone_tokens", "qformer_queries", "visual_tokens", "prompt_logits")
END_TO_END = ("end_to_end_visual_tokens", "end_to_end_prompt_logits")
OF_SLIDES = ("visual_tokens", "prompt_logits", "end_to_end_prompt_logits")  # a slide's features come ready made
BATCH = 64
SHOWN = 10  # pairs of different answers that are written out


def verify(
    export: Path, data: Path, *, split: str = "test", n: int = 200, out: Path | None = None, workdir: Path | None = None,
    features: Path | None = None,
) -> int:  # fmt: skip
    """Prints the table, writes `out` (flat JSON), returns 0 or, when the two disagree, 1.

    `workdir`: the finished phase that was exported, by default where export.json says. n questions of the split are
    drawn by hash. `features`: where the slide_features of a slide phase lie, by default in `data`. Raises DataError when
    the export is not of that phase.
    """
    ours = load_export(export, BATCH)
    workdir = workdir or Path(ours.card["workdir"])
    slides = ours.card["phase"] == "slide_qa"
    theirs: Any = (load_slide_answerer if slides else load_answerer)(workdir, BATCH, exact=True)
    for name, digest in ours.card["trees"].items():
        if tree_sha256(theirs.params[name]) != digest:
            raise DataError(f"{export} was not exported from the weights that {workdir} now holds: export again")
    asked = draw(data, split, n)
    if not asked:
        raise DataError(f"no question to ask: --n is {n}, {data} has questions of split {split}")
    bags = EncodedBags(theirs.open_bags(features or data, split)) if slides else None
    picture = load_pictures(data, "image", asked, bags=bags)
    images = {qa.image_id: picture(qa)[0] for qa in sorted(asked, key=lambda qa: qa.image_id)}
    with jax.default_matmul_precision("highest"):
        found = compare(theirs, ours, asked, images)
    found = {"phase": ours.card["phase"], "step": ours.card["step"], "split": split, **found}
    print(summary(found))
    if out:
        atomic_write(out, json.dumps(found, indent=1) + "\n")
    return 0 if found["verdict"] == "equal" else 1


def draw(data: Path, split: str, n: int) -> list[QA]:
    """n questions of the split, always the same."""
    return sorted(load_questions(data, split).items, key=lambda qa: stable_hash("verify", qa.id))[:n]


@torch.inference_mode()
def compare(theirs: Answerer, ours: TorchAnswerer, asked: Sequence[QA], images: dict[str, bytes]) -> dict[str, Any]:
    """All figures, flat: `verdict`, counts, and per stage `_max_abs`, `_mean_abs`, `_relative`. `images`: by image id."""
    slides = "slide_perceiver" in theirs.params
    stages = {name: Difference() for name in (OF_SLIDES if slides else (*LIMITED, *END_TO_END))}
    given, alone = compare_images(theirs, ours, list(images.values()), stages)
    place = {image_id: row for row, image_id in enumerate(images)}
    rows = [place[qa.image_id] for qa in asked]
    counts = compare_answers(theirs, ours, asked, given[rows], alone[rows], stages)
    same = counts["identical_answers"] + counts["ties"] == len(asked)
    sound = same and all(stage.relative <= TOLERANCE for name, stage in stages.items() if name in LIMITED)
    head = {"verdict": "equal" if sound else "different", "questions": len(asked), "images": len(images)}
    return {**head, **counts, "tolerance_relative": TOLERANCE, **flat(stages)}


def compare_images(
    theirs: Answerer, ours: TorchAnswerer, images: Sequence[bytes], stages: dict[str, Difference]
) -> tuple[np.ndarray, np.ndarray]:
    """Fills the stages up to the visual tokens; returns JAX's and PyTorch's visual tokens [n, Q, D], each on its own."""
    if "slide_perceiver" in theirs.params:
        given, alone = theirs.encode(images), ours.encode(images)
        stages["visual_tokens"].add(alone, given)
        return given, alone
    graphs, params = (tuple(values[name] for name in VISUAL_TREES) for values in (theirs.graphs, theirs.params))
    pixels = np.stack([decode_image(image, theirs.image_side) for image in images])
    visual_tokens = []
    for start in range(0, len(pixels), BATCH):
        part = pixels[start : start + BATCH]
        padded = np.concatenate([part, np.repeat(part[:1], BATCH - len(part), axis=0)])
        values = jax_stages(graphs, params, padded)
        tokens, rounded, queries, visual = (np.array(value)[: len(part)] for value in values)
        own = ours.parts["qformer"](torch.from_numpy(rounded))
        stages["backbone_tokens"].add(ours.features(part), tokens)
        stages["qformer_queries"].add(own, queries)
        stages["visual_tokens"].add(ours.parts["projector"](own), visual)
        visual_tokens.append(visual)
    given, alone = np.concatenate(visual_tokens), ours.encode(images)
    stages["end_to_end_visual_tokens"].add(alone, given)
    return given, alone


def compare_answers(
    theirs: Answerer,
    ours: TorchAnswerer,
    asked: Sequence[QA],
    given: np.ndarray,
    alone: np.ndarray,
    stages: dict[str, Difference],
) -> dict[str, Any]:
    """Fills the stages of the logits; returns the counts. given, alone [n, Q, D]: each question's visual tokens."""
    prompts = [prompt_tokens(theirs.tokenizer, qa, shown_options(qa), theirs.slot) for qa in asked]
    kinds = [qa.question_type for qa in asked]
    divergence, top, same, ties, parted = 0.0, 0, 0, 0, []
    batches = batch_rows(prompts, kinds, BATCH)
    for rows in progress(batches, len(batches), "comparing answers"):
        kind, texts = kinds[rows[0]], [prompts[i] for i in rows]
        jax_tokens, jax_first = jax_generate(theirs, texts, given[rows], kind)
        _, first = ours.generate(texts, given[rows], kind)
        torch_tokens, own_first = ours.generate(texts, alone[rows], kind)
        stages["prompt_logits"].add(first, jax_first)
        stages["end_to_end_prompt_logits"].add(own_first, jax_first)
        divergence += float(kl(jax_first, first.numpy()).sum())
        top += int((first.numpy().argmax(-1) == jax_first.argmax(-1)).sum())
        for row, i in enumerate(rows):
            pair = jax_tokens[row], torch_tokens[row]
            if pair[0] == pair[1]:
                same += 1
                continue
            gap = margin(ours, texts[row], alone[i], *pair)
            ties += gap <= TIE
            answers = " and ".join(repr(ours.tokenizer.decode(tokens)) for tokens in pair)
            parted.append(f"{asked[i].id}: {answers}, {gap:.2g} logits apart")
    return {
        "identical_answers": same,
        "ties": ties,
        "same_first_token": top,
        "mean_logit_kl": divergence / len(asked),
        "parted": "; ".join(parted[:SHOWN]) or "none",
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


def summary(found: dict[str, Any]) -> str:
    """The result for a terminal."""
    n, names = found["questions"], [name for name in (*LIMITED, *END_TO_END) if f"{name}_max_abs" in found]
    lines = [
        *table(found, names, END_TO_END),
        f"  first token equal {found['same_first_token']} of {n}, mean KL of the logits {found['mean_logit_kl']:.2e}",
        f"  answers identical {found['identical_answers']} of {n}, parted at a tie {found['ties']}",
        f"  JAX and PyTorch: {found['verdict']}",
    ]
    if found["parted"] != "none":
        lines.insert(-1, f"  parted: {found['parted']}")
    return "\n".join(lines)
