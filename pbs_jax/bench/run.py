"""Asks a model every question of a split and records each answer; a run that stopped is continued by key.

The run folder holds predictions.jsonl (the answers), run.json (what made them) and, for slides, patches.json (what was
shown). Continuing with other settings is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.io import atomic_write
from data_prep.progress import progress
from data_prep.prompts import PROMPT_SET, question_text
from data_prep.schema import QA, DataError, option_order
from pbs_jax.bench.adapters import Adapter, Options, Request, load_adapter
from pbs_jax.bench.cache import Cached
from pbs_jax.bench.pictures import MODALITIES, PATCHES, Pictures, load_pictures
from pbs_jax.bench.records import PROTOCOLS, Prediction, PredictionLog, load_questions
from pbs_jax.bench.score import PREDICTIONS, RUN_CARD

__all__ = ["MODALITIES", "ask", "presentations", "run"]

CLOSED = ("true_false", "multiple_choice")  # the types that letter_likelihood can answer
PATCH_LIST = "patches.json"
OK, WITH_REJECTS = 0, 3


def run(
    model: str,
    data: Path,
    out: Path,
    *,
    split: str = "test",
    modality: str = "image",
    mode: str = "generate",
    protocol: str = "shuffle",
    name: str | None = None,
    seed: int | None = None,
    batch_size: int = 512,
    limit: int | None = None,
    questions_from: Path | None = None,
    patches: int | None = None,
    cache: Path | None = None,
    features: Path | None = None,
    options: Options | None = None,
    dry_run: bool = False,
) -> int:
    """Returns 0, or 3 when some questions ended in an error (run it again to ask them again).

    Args:
      data: folder with `cells` and `cell_qa`, or `patches` and `slide_qa` (the former first).
      questions_from: a question set to ask instead of data's own: released JSONL, or a dataset.
      patches: how many patches of a slide are shown (default: PATCHES pictures, or as many features as the model learnt from).
      cache: folder of answers shared between runs; answers are found by content, not by id.
      dry_run: only say what would be asked and what it may cost.
      features: folder of the slide_features that our slide model reads (default: data), so background slides or others.
    Raises DataError for an unknown model, modality or protocol, or when `out` holds a run made under other settings.
    """
    if patches is not None and patches < 1:
        raise DataError(f"--patches {patches} shows nothing: use --modality blind for that")
    questions = load_questions(questions_from or data, split)
    by_image = sorted(questions.items, key=lambda qa: qa.image_id)  # a picture is read and encoded once
    asked = [item for qa in by_image for item in presentations(qa, protocol)][:limit]
    with contextlib.ExitStack() as stack:
        adapter = load_adapter(model, options or Options(store=out))
        if hasattr(adapter, "close"):
            stack.callback(adapter.close)
        open_bags = getattr(adapter, "open_bags", None)
        bags = open_bags(features or data, split, patches) if open_bags and modality != "blind" else None
        pictures = PATCHES if patches is None else patches
        picture = load_pictures(data, modality, [item.qa for item in asked], pictures, bags)
        shows_patches = asked[0].qa.level == "slide" and modality != "blind" and not bags
        sizes = [len(ids) for ids in picture.shown.values()] or [0]
        said = list(adapter.card.get("remarks", []))
        if shows_patches and min(sizes) < pictures:
            said.append(f"{pictures} patches of a slide were asked for, but slides have {min(sizes)} to {max(sizes)}.")
        card = {
            "name": name or adapter.name,
            "seed": adapter.seed if seed is None else seed,
            "model": {**adapter.card, "remarks": said},
            "modality": modality,
            "mode": mode,
            "protocol": protocol,
            "prompt_set": PROMPT_SET,
            "split": split,
            "dataset_id": questions.dataset_id,
            "split_level": questions.split_level,
            "pictures_id": picture.dataset_id,
            "patches": pictures if shows_patches else patches if bags else None,
            "limit": limit,
        }
        if (limit_of_model := adapter.card.get("max_images")) and max(sizes) > limit_of_model:
            raise DataError(
                f"{adapter.name} takes {limit_of_model} pictures, {max(sizes)} are to be shown: give --patches"
            )
        if dry_run:
            print(_estimate(adapter, asked, picture))
            return OK
        _keep_card(out / RUN_CARD, card)
        if shows_patches:
            atomic_write(out / PATCH_LIST, json.dumps(picture.shown, indent=1, ensure_ascii=False) + "\n")
        if cache:
            adapter = Cached(adapter, cache)
        log = stack.enter_context(PredictionLog(out / PREDICTIONS))
        waiting = [item for item in asked if item.key not in log.done]
        if log.done:
            print(f"{out}: {len(asked) - len(waiting)} of {len(asked)} questions already answered")
        counts = ask(adapter, waiting, picture, mode, batch_size, log)
    if counts.usd:
        print(f"{out}: these answers cost {counts.usd:.4f} USD")
    if unasked := len(waiting) - counts.total():
        print(f"{out}: {unasked} questions not asked ({counts.unasked}); the same command goes on")
    if errors := counts["error"]:
        print(
            f"{out}: {errors} questions ended in an error (the first: {counts.error}); the same command asks them again"
        )
    return WITH_REJECTS if errors or unasked else OK


class Counts(Counter[str]):
    """Answers by status. `error` and `unasked` say why the first of their kind was not had; `usd` what all cost."""

    error = unasked = ""
    usd = 0.0


def presentations(qa: QA, protocol: str) -> list[Prediction]:
    """The question in each order in which the protocol shows its options, unanswered.

    shuffle: one seeded order per id; as_released: stored order; circular: every rotation of the seeded order.
    """
    count = len(qa.options)
    match protocol:
        case "as_released":
            orders = [tuple(range(count))]
        case "shuffle":
            orders = [option_order(qa.id, count)]
        case "circular":
            base = option_order(qa.id, count)
            orders = [base[k:] + base[:k] for k in range(count)] or [()]
        case _:
            raise DataError(f'protocol "{protocol}" is unknown: use {", ".join(PROTOCOLS)}')
    return [Prediction(dataclasses.replace(qa, options=tuple(qa.options[k] for k in o)), o, "") for o in orders]


def ask(
    adapter: Adapter,
    waiting: Sequence[Prediction],
    picture: Pictures,
    mode: str,
    batch_size: int,
    log: PredictionLog,
) -> Counts:
    """Asks as many as the model takes at once, `batch_size` at most, and logs each batch before the next.

    Stops at a question that the model did not ask its server (`detail["unasked"]`: a spent budget); it is not logged.
    """
    counts = Counts()
    size = min(batch_size, adapter.at_once)
    batches = [waiting[k : k + size] for k in range(0, len(waiting), size)]
    for batch in progress(batches, len(batches), "asking"):
        modes = [mode if item.qa.question_type in CLOSED else "generate" for item in batch]
        answered: list[Prediction] = []
        for kind in sorted(set(modes)):
            part = [item for item, own in zip(batch, modes, strict=True) if own == kind]
            requests = [_request(item, picture(item.qa)) for item in part]
            responses = adapter.generate(requests, kind)
            answered += [
                dataclasses.replace(
                    item, prediction=response.text, status=response.status, answer_mode=kind, detail=response.detail
                )
                for item, response in zip(part, responses, strict=True)
            ]
        unasked = [str(item.detail["unasked"]) for item in answered if "unasked" in item.detail]
        answered = [item for item in answered if "unasked" not in item.detail]
        log.append(answered)
        counts.update(item.status for item in answered)
        counts.usd += sum(usd for item in answered if isinstance(usd := item.detail.get("usd", 0), int | float))
        failed = [str(item.detail.get("error", "no reason given")) for item in answered if item.status == "error"]
        counts.error = counts.error or next(iter(failed), "")
        if unasked:
            counts.unasked = unasked[0]
            break
    return counts


def _estimate(adapter: Adapter, asked: Sequence[Prediction], picture: Pictures) -> str:
    """What asking would send and cost, in a sentence."""
    requests = [_request(item, picture(item.qa)) for item in asked]
    shown = f"{adapter.name}: {len(requests)} questions, {sum(len(r.images) for r in requests)} pictures"
    return f"{shown}; {adapter.estimate(requests)}" if hasattr(adapter, "estimate") else shown


def _request(item: Prediction, images: tuple[bytes, ...]) -> Request:
    qa = item.qa
    return Request(
        qa.id, item.perm, images, qa.question, qa.question_type, tuple(qa.options), question_text(qa, qa.options)
    )


def _keep_card(path: Path, card: Mapping[str, Any]) -> None:
    """Writes run.json, or checks that the run to be continued was made under the same settings (--limit may grow)."""
    card = json.loads(json.dumps(card))  # tuples become lists, as they are in the file
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [key for key in card if key != "limit" and before.get(key) != card[key]]
        if changed:
            key = changed[0]
            raise DataError(
                f"{path} was made with {key} {before.get(key)!r}, now {card[key]!r}: use another --out or that setting"
            )
    atomic_write(path, json.dumps(card, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
