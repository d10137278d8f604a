"""Asks a model every question of a split and records each answer; a run that stopped is continued by key.

The run folder holds predictions.jsonl (the answers) and run.json (what made them). Continuing with other settings is
refused.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.io import atomic_write, open_dataset
from data_prep.progress import progress
from data_prep.prompts import PROMPT_SET, question_text
from data_prep.schema import CROP_SIDE, QA, DataError, option_order, stable_hash
from pbs_jax.bench.adapters import Adapter, Request, load_adapter
from pbs_jax.bench.records import PROTOCOLS, Prediction, PredictionLog, load_questions
from pbs_jax.bench.score import PREDICTIONS, RUN_CARD

MODALITIES = ("image", "blind", "blank", "mismatched")
CLOSED = ("true_false", "multiple_choice")  # the types that letter_likelihood can answer
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
) -> int:
    """Returns 0, or 3 when some questions ended in an error (run it again to ask them again).

    Raises DataError for an unknown model, modality or protocol, or when `out` holds a run made under other settings.
    """
    questions = load_questions(data, split)
    by_image = sorted(questions.items, key=lambda qa: qa.image_id)  # a picture is read and encoded once
    asked = [item for qa in by_image for item in presentations(qa, protocol)][:limit]
    adapter = load_adapter(model)
    card = {
        "name": name or adapter.name,
        "seed": adapter.seed if seed is None else seed,
        "model": dict(adapter.card),
        "modality": modality,
        "mode": mode,
        "protocol": protocol,
        "prompt_set": PROMPT_SET,
        "split": split,
        "dataset_id": questions.dataset_id,
        "split_level": questions.split_level,
        "limit": limit,
    }
    _keep_card(out / RUN_CARD, card)
    with PredictionLog(out / PREDICTIONS) as log:
        waiting = [item for item in asked if item.key not in log.done]
        if log.done:
            print(f"{out}: {len(asked) - len(waiting)} of {len(asked)} questions already answered")
        picture = picture_source(data, split, modality, [item.qa for item in asked])
        errors = sum(ask(adapter, waiting, picture, mode, batch_size, log))
    if errors:
        print(f"{out}: {errors} questions ended in an error; the same command asks them again")
    return WITH_REJECTS if errors else OK


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
    picture: Callable[[QA], bytes | None],
    mode: str,
    batch_size: int,
    log: PredictionLog,
) -> Iterator[int]:
    """Asks in batches and logs each batch; yields its number of errors."""
    batches = [waiting[k : k + batch_size] for k in range(0, len(waiting), batch_size)]
    for batch in progress(batches, len(batches), "asking"):
        modes = [mode if item.qa.question_type in CLOSED else "generate" for item in batch]
        answered: list[Prediction] = []
        for kind in sorted(set(modes)):
            part = [item for item, own in zip(batch, modes, strict=True) if own == kind]
            requests = [_request(item, picture(item.qa)) for item in part]
            responses = adapter.generate(requests, kind)
            answered += [
                dataclasses.replace(item, prediction=response.text, status=response.status, answer_mode=kind)
                for item, response in zip(part, responses, strict=True)
            ]
        log.append(answered)
        yield sum(item.status == "error" for item in answered)


def _request(item: Prediction, image: bytes | None) -> Request:
    qa = item.qa
    return Request(
        qa.id, item.perm, image, qa.question, qa.question_type, tuple(qa.options), question_text(qa, qa.options)
    )


def picture_source(data: Path, split: str, modality: str, asked: Sequence[QA]) -> Callable[[QA], bytes | None]:
    """What the model is shown for a question: its cell, nothing, a grey picture, or another cell of the split.

    `mismatched` gives every question of an image the same wrong image, drawn by hash; never its own.
    """
    match modality:
        case "blind":
            return lambda qa: None
        case "blank":
            grey = _grey()
            return lambda qa: grey
        case "image" | "mismatched":
            cells = open_dataset(data / "cells", split)
        case _:
            raise DataError(f'modality "{modality}" is unknown: use {", ".join(MODALITIES)}')
    shown = {qa.image_id: qa.image_id for qa in asked}
    if modality == "mismatched":
        ring = sorted(shown, key=lambda image_id: stable_hash("mismatched", image_id))
        if len(ring) < 2:
            raise DataError("mismatched pictures need questions about two images at least")
        shown = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    last: tuple[str, bytes] = ("", b"")

    def picture(qa: QA) -> bytes:
        nonlocal last  # questions come image by image
        image_id = shown[qa.image_id]
        if last[0] != image_id:
            last = image_id, bytes(cells[cells.position(image_id)]["image"])
        return last[1]

    return picture


def _grey() -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (CROP_SIDE, CROP_SIDE), (128, 128, 128)).save(out, "PNG")
    return out.getvalue()


def _keep_card(path: Path, card: Mapping[str, Any]) -> None:
    """Writes run.json, or checks that the run to be continued was made under the same settings (--limit may grow)."""
    if path.is_file():
        before = json.loads(path.read_text())
        changed = [key for key in card if key != "limit" and before.get(key) != card[key]]
        if changed:
            key = changed[0]
            raise DataError(
                f"{path} was made with {key} {before.get(key)!r}, now {card[key]!r}: use another --out or that setting"
            )
    atomic_write(path, json.dumps(card, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
