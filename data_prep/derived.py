"""Writes the datasets of the cell job from its cells: `cells`, `cell_qa`, the tokenizer, `cell_qa_tokens`.

Each manifest names the content ids of what the dataset was made from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import io, probe, prompts, tokens
from data_prep.datasets import CELL_FEATURES, QA_FEATURES, cell_record, qa_record
from data_prep.files import atomic_write
from data_prep.schema import QA, SPLITS, Cell
from data_prep.sources import Reject

PROBE_QUESTIONS = (
    1000  # with fewer test questions of a type the probe is printed and is no gate: chance alone exceeds it
)


def write_cells(out: Path, cells: Sequence[Cell], rejects: Sequence[Reject], **options: Any) -> str:
    """Writes OUT/cells; its manifest holds the identity of the whole job. Returns the content id."""
    rejected = Counter(reject.reason for reject in rejects)
    return io.write_dataset(
        out, "cells", CELL_FEATURES, map(cell_record, cells), id_feature="cell_id", rejected=rejected, **options
    )


def write_questions(
    out: Path,
    questions: Sequence[QA],
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    level: str,
    name: str = "cell_qa",
) -> str:
    """Writes OUT/cell_qa (or slide_qa) and returns its content id. `inputs`: what they were made from -> content id."""
    counts = Counter(f"{qa.split} {qa.question_type}" for qa in questions)
    return io.write_dataset(
        out,
        name,
        QA_FEATURES,
        map(qa_record, questions),
        id_feature="id",
        config=config,
        inputs=inputs,
        records_in=len(questions),
        records_per_shard=20_000,
        split_level=level,
        details={"questions": dict(sorted(counts.items()))},
    )


def run_probe(questions: Sequence[QA], say: Callable[[str], None]) -> None:
    """Prints what the text alone answers of the test questions. Raises DataError when that is too much (a gate where
    there are enough questions to tell)."""
    train, test = ([qa for qa in questions if qa.split == split] for split in ("train", "test"))
    if not train or not test:
        say("text-only probe: not run, it needs train and test questions")
        return
    result = probe.text_probe(train, test)
    say("text-only probe: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))
    counts = Counter(qa.question_type for qa in test)
    fewest = min(counts["true_false"], counts["multiple_choice"])
    if fewest >= PROBE_QUESTIONS:
        probe.check_probe(result, "cell_qa")
    else:
        say(f"text-only probe: no gate with {fewest} test questions of a type (needs {PROBE_QUESTIONS})")


def make_tokenizer(out: Path, given: Path | None, cells: Sequence[Cell], questions: Sequence[QA]) -> tokens.Tokenizer:
    """OUT/tokenizer: a copy of the given one, else trained on the train split's captions and questions."""
    if given is not None:
        tokenizer = tokens.load_tokenizer(given)
        atomic_write(out / "tokenizer" / "tokenizer.json", (given / "tokenizer.json").read_bytes())
        return tokenizer
    texts = tokens.tokenizer_texts(
        [cell for cell in cells if cell.split == "train"], [qa for qa in questions if qa.split == "train"]
    )
    return tokens.train_tokenizer(texts, out / "tokenizer")


def write_tokens(
    out: Path,
    questions: Sequence[QA],
    tokenizer: tokens.Tokenizer,
    *,
    bin_length: int,
    seed: int,
    qa_id: str,
    level: str,
    name: str = "cell_qa",
) -> tuple[str, list[Reject]]:
    """Writes OUT/<name>_tokens; returns its content id and the questions that are longer than a bin."""
    split_of = {qa.image_id: qa.split for qa in questions}
    too_long: list[str] = []
    bins = [
        record | {"split": split_of[record["image_id"]]}
        for split in SPLITS
        for record in tokens.pack(
            [qa for qa in questions if qa.split == split],
            tokenizer,
            bin_length=bin_length,
            too_long=too_long,
            seed=seed,
        )
    ]
    content_id = io.write_dataset(
        out,
        f"{name}_tokens",
        tokens.token_features(bin_length),
        bins,
        id_feature="bin_id",
        config={"prompt_set": prompts.PROMPT_SET, "option_order": "shuffle", "seed": seed, "bin_length": bin_length},
        inputs={name: qa_id, "tokenizer": tokenizer.sha256},
        records_in=len(bins),
        records_per_shard=10_000,
        split_level=level,
        details={"questions": len(questions), "questions_too_long": len(too_long)},
    )
    detail = f"the question does not fit a bin of {bin_length} tokens: raise --bin-length"
    return content_id, [Reject(id, "longer than a bin", detail) for id in too_long]
