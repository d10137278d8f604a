"""`pbs perf decode`: greedy decoding of an imported language model against transformers, same weights, same prompts.

Two questions: tokens/s like for like, 64 new tokens at batch 1 and 16; and questions/s on the benchmark's mix, several
questions about one image, where ours reads the image's prefix once and the peer reads it with every question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

from data_prep.prompts import IMAGE_PAD, SLOT_LENGTH, branch_texts
from data_prep.schema import QA, DataError, shown_options
from data_prep.tokens import Tokenizer, load_tokenizer, prefix_tokens, prompt_tokens
from pbs_jax.bench.records import load_questions
from pbs_jax.decode.answer import MAX_NEW, to_answer
from pbs_jax.decode.batching import batch_by_limit, batch_rows
from pbs_jax.decode.generate import generate, left_pad, read_prefix
from pbs_jax.models.decoder import Decoder
from pbs_jax.models.sizes import get_size
from pbs_jax.perf.timing import alternate
from pbs_jax.train import handover
from pbs_jax.train.phase import definition

NEW = 64
NEVER = (-1,)  # no id: every answer runs to its full length on both sides


def report(workdir: Path, data: Path, images: int, rounds: int) -> str:
    """workdir: of `pbs weights import gguf-llama`; data: holds pbsbench. Empty 32-slot prefixes stand for pictures.

    Raises DataError when workdir holds no model of transformers beside ours.
    """
    import torch
    from transformers import LlamaForCausalLM

    if not (workdir / "hf").is_dir():
        raise DataError(f"{workdir}/hf is missing: make it with `pbs weights import gguf-llama --out {workdir}`")
    torch.set_grad_enabled(False)
    peer = LlamaForCausalLM.from_pretrained(workdir / "hf", dtype="float32").eval()
    graph = definition(lambda rngs: Decoder(get_size("small").decoder, rngs=rngs))
    params = to_answer(handover.load(workdir, ["language_model"])["language_model"], None)
    tokenizer = load_tokenizer(workdir / "hf")
    released = load_questions(data / "pbsbench", "test").items
    prompts = [prompt_tokens(tokenizer, qa, shown_options(qa)) for qa in released[:16]]
    asked = _of_images(released, images)
    questions = [qa for of_image in asked for qa in of_image]

    def ours(rows: Sequence[Sequence[int]]) -> Callable[[], float]:
        def run() -> float:  # no prompt here has a slot
            found, _ = generate(graph, params, rows, None, pad_id=0, slot_id=-1, stop_ids=NEVER, max_new=NEW)
            return float(len(found) * NEW)

        return run

    def theirs(rows: Sequence[Sequence[int]]) -> Callable[[], float]:
        return lambda: float(len(rows) * NEW) if _generate(peer, rows, NEW) else 0.0

    sides = {
        "ours, batch 1": ours(prompts[:1]),
        "transformers, batch 1": theirs(prompts[:1]),
        "ours, batch 16": ours(prompts),
        "transformers, batch 16": theirs(prompts),
    }
    lines = [f"{NEW} new tokens, greedy, float32, {rounds} alternating rounds, medians (tokens a second):"]
    lines += _lines(alternate(sides, rounds))
    mix = {
        "ours, an image read once": lambda: _ours_mix(graph, params, tokenizer, asked),
        "transformers, a question a row": lambda: _their_mix(peer, tokenizer, asked),
    }
    lines += [f"{len(questions)} released questions about {len(asked)} images (questions a second):"]
    return "\n".join(lines + _lines(alternate(mix, rounds)))


def _of_images(questions: Sequence[QA], images: int) -> list[list[QA]]:
    cells = sorted((qa for qa in questions if qa.level == "cell"), key=lambda qa: qa.image_id)
    groups = [list(group) for _, group in groupby(cells, key=lambda qa: qa.image_id)]
    return groups[:: max(len(groups) // images, 1)][:images]


def _ours_mix(graph: Any, params: Any, tokenizer: Tokenizer, asked: Sequence[Sequence[QA]]) -> float:
    """All images' prefixes in one batch, then their questions, the longest answers together, each after its image's prefix."""
    visual = jax.numpy.zeros((len(asked), SLOT_LENGTH, get_size("small").decoder.dim))
    slot = tokenizer.id(IMAGE_PAD)
    prefix = read_prefix(graph, params, prefix_tokens(tokenizer), visual, slot)
    questions = [(owner, qa) for owner, of_image in enumerate(asked) for qa in of_image]
    prompts = [tokenizer.encode(branch_texts(qa, shown_options(qa))[0]) for _, qa in questions]
    limits = [MAX_NEW[qa.question_type] for _, qa in questions]
    for rows in batch_by_limit(prompts, limits, 16):
        generate(
            graph, params, [prompts[i] for i in rows], None, pad_id=0, slot_id=slot, stop_ids=NEVER,
            max_new=[limits[i] for i in rows], prefix=prefix, owners=[questions[i][0] for i in rows],
        )  # fmt: skip
    return float(len(questions))


def _their_mix(peer: Any, tokenizer: Tokenizer, asked: Sequence[Sequence[QA]]) -> float:
    questions = [qa for of_image in asked for qa in of_image]
    prompts = [prompt_tokens(tokenizer, qa, shown_options(qa)) for qa in questions]
    for rows in batch_rows(prompts, [qa.question_type for qa in questions], 16):
        _generate(peer, [prompts[i] for i in rows], MAX_NEW[questions[rows[0]].question_type])
    return float(len(questions))


def _generate(peer: Any, rows: Sequence[Sequence[int]], new: int) -> bool:
    import torch

    ids, mask = (torch.from_numpy(array).long() for array in left_pad(rows, 0, multiple=1))
    out = peer.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return out.shape[1] == ids.shape[1] + new


def _lines(found: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for (name, ours), (peer, theirs) in zip(list(found.items())[::2], list(found.items())[1::2], strict=True):
        lines.append(f"  {name:<32}{ours['wall']:>9.2f} ({ours['wall'] / theirs['wall']:.2f}x)")
        lines.append(f"  {peer:<32}{theirs['wall']:>9.2f}")
    return lines
