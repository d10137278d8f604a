"""`pbs train --inspect_batch`: a step's batch as text, where most mistakes of a vision-language pipeline can be seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.tokens import PAD, load_tokenizer
from pbs_jax.train.phase import Phase


def describe_batch(phase: Phase, batch: Mapping[str, np.ndarray], words: Path, step: int, rows: int = 1) -> str:
    """Shapes and ranges of every array, then the first rows token by token where the batch holds tokens, all captions where
    it holds `text`. words: the folder of the tokenizer that wrote them."""
    lines = [f"phase {phase.name}, batch of step {step}:"]
    for name, value in batch.items():
        known = np.asarray(value).astype(np.float32)
        lines.append(f"  {name:<10} {value.dtype}{list(value.shape)}  {known.min():g} .. {known.max():g}")
    for row in range(rows if "tokens" in batch else 0):
        lines += ["", *_row(phase, {name: np.asarray(value[row]) for name, value in batch.items()}, words)]
    if "text" in batch:
        tokenizer = load_tokenizer(words)
        for index, text in zip(batch["index"], batch["text"], strict=True):
            caption = tokenizer.decode(text[text != tokenizer.id(PAD)], skip_special_tokens=False)
            lines.append(f"  {phase.example_id(int(index))}: {caption}")
    return "\n".join(lines)


def _row(phase: Phase, row: Mapping[str, Any], words: Path) -> list[str]:
    tokenizer = load_tokenizer(words)
    supervised = {int(at) for at in row["answers"] if at >= 0}
    images = [phase.example_id(int(index)) for index in np.atleast_1d(row["index"])]
    lines = [
        f"row of {', '.join(images)}",
        f"{'at':>5} {'image':>5} {'segment':>7} {'t h w':>15} {'loss on':<14} token",
    ]
    for at, token in enumerate(row["tokens"]):
        if row["segments"][at] < 0:
            lines.append(f"{at:>5} padding to {len(row['tokens'])}")
            break
        group = int(row["groups"][at]) if "groups" in row else 0
        positions = " ".join(str(int(value)) for value in row["positions"][:, at])
        target = repr(_text(tokenizer, row["targets"][at])) if at in supervised else ""
        lines.append(
            f"{at:>5} {'all' if group < 0 else group:>5} {int(row['segments'][at]):>7} {positions:>15} {target:<14} "
            f"{_text(tokenizer, token)!r}"
        )
    return lines


def _text(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([int(token)], skip_special_tokens=False))
