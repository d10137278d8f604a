"""An exported folder that answers in PyTorch, without JAX: the counterpart of `decode.answer.Answerer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from data_prep.schema import QA, DataError
from data_prep.tokens import Tokenizer, load_tokenizer, prompt_tokens
from pbs_jax.data.examples import decode_image
from pbs_jax.data.slide_examples import SlideBags, decode_bag, open_bags
from pbs_jax.decode.batching import batch_rows, first_words
from pbs_jax.weights.files import ANSWERS, BESIDE, FROZEN, PARTS, read_card
from pbs_jax.weights.source import decoder_name, open_source
from pbs_jax.weights.torch_model import Decoder, Perceiver, QFormer, ViT


@dataclasses.dataclass(frozen=True)
class TorchAnswerer:
    """`parts`: backbone, qformer, projector, language_model. `encode` and `answer` as those of the JAX `Answerer`."""

    card: Mapping[str, Any]
    tokenizer: Tokenizer
    parts: Mapping[str, Any]
    batch_size: int = 64

    def features(self, images: np.ndarray) -> Tensor:
        """uint8[B, S, S, 3] -> backbone tokens before the last norm [B, N, W]."""
        mean, std = (torch.tensor(self.card["images"][name]) for name in ("mean", "std"))
        pixels = (torch.from_numpy(images).float() / 255.0 - mean) / std
        return self.parts["backbone"](pixels.permute(0, 3, 1, 2))

    @torch.inference_mode()
    def encode(self, images: Sequence[bytes]) -> np.ndarray:
        """Encoded pictures, or a slide phase's encoded bags -> visual tokens float32[n, Q, lm width]."""
        done = []
        if "slide_perceiver" in self.parts:
            for image in images:
                features, mask = decode_bag(image)
                x, seen = torch.from_numpy(features.astype(np.float32))[None], torch.from_numpy(np.array(mask))[None]
                done.append(self.parts["projector"](self.parts["slide_perceiver"](x, seen)).numpy())
            return np.concatenate(done)
        pixels = np.stack([decode_image(image, self.card["images"]["side"]) for image in images])
        for start in range(0, len(pixels), self.batch_size):
            features = self.features(pixels[start : start + self.batch_size])
            # The bfloat16 round trip is what the cached features of training went through.
            queries = self.parts["qformer"](features.bfloat16().float())
            done.append(self.parts["projector"](queries).numpy())
        return np.concatenate(done)

    def open_bags(self, folder: Path, split: str, patches: int | None = None) -> SlideBags:
        """The split's bags of folder/slide_features, of at most so many patches. Raises DataError when other weights made them."""
        facts = self.card["facts"]
        return open_bags(folder, split, facts["features"], facts["max_patches"], patches)

    def generate(
        self, prompts: Sequence[Sequence[int]], visual: np.ndarray | None, kind: str
    ) -> tuple[list[list[int]], Tensor]:
        """Answers of one question type as token ids, and the first step's logits [n, V]."""
        rules = self.card["answers"]
        ids = {name: rules[name] for name in ("pad_id", "slot_id", "stop_id")}
        shown = None if visual is None else torch.from_numpy(visual)
        return self.parts["language_model"].generate(prompts, shown, max_new=rules["max_new"][kind], **ids)

    def answer(
        self,
        visual: np.ndarray | None,
        questions: Sequence[QA],
        options: Sequence[Sequence[str]],
        mode: str = "generate",
    ) -> list[str]:
        """One answer per question, in order; visual [n, Q, D] row by row, None = blind."""
        slot = self.card["shapes"]["qformer"]["queries"]
        prompts = [prompt_tokens(self.tokenizer, qa, shown, slot) for qa, shown in zip(questions, options, strict=True)]
        answers = [""] * len(prompts)
        for rows in batch_rows(prompts, [qa.question_type for qa in questions], self.batch_size):
            kind = questions[rows[0]].question_type
            tokens, first = self.generate([prompts[i] for i in rows], None if visual is None else visual[rows], kind)
            for row, i in enumerate(rows):
                allowed = first_words(kind, len(options[i])) if mode == "letter_likelihood" else ()
                if allowed:
                    scores = [float(first[row, self.tokenizer.encode(word)[0]]) for word in allowed]
                    answers[i] = allowed[int(np.argmax(scores))]
                else:
                    answers[i] = self.tokenizer.decode(tokens[row]).strip()
        return answers


def load_export(directory: str | Path, batch_size: int = 64) -> TorchAnswerer:
    """Reads what `pbs weights export` wrote of a cell_qa or slide_qa phase, every tensor used once. Raises DataError."""
    directory = Path(directory)
    card = read_card(directory)
    if FROZEN not in card["files"] and BESIDE not in card:
        raise DataError(
            f"{directory} (phase {card['phase']}) has no {FROZEN}: only an export of {' or '.join(ANSWERS)} with --frozen can answer"
        )
    shapes = {name: SimpleNamespace(**fields) for name, fields in card["shapes"].items()}
    width = shapes["perceiver"].dim if card["phase"] == "slide_qa" else shapes["qformer"].dim
    makers: dict[str, Callable[[], nn.Module]] = {
        "backbone": lambda: ViT(shapes["vit"]),
        "qformer": lambda: QFormer(shapes["qformer"]),
        "slide_perceiver": lambda: Perceiver(shapes["perceiver"]),
        "projector": lambda: nn.Linear(width, shapes["decoder"].dim),
        "language_model": lambda: Decoder(shapes["decoder"]),
    }
    with torch.device("meta"):  # no memory and no initialisation for what is loaded anyway
        parts = {name: makers[name]() for name in ANSWERS[card["phase"]]}
    written = dict(PARTS)
    if BESIDE in card:
        del written["language_model"]
        fill(
            parts["language_model"],
            snapshot_tensors(directory, card[BESIDE], shapes["decoder"].tied),
            card[BESIDE]["folder"],
        )
    for name in sorted({file for file, _ in written.values()} & set(card["files"])):
        tensors = load_file(directory / name)
        for part, (file, prefix) in written.items():
            if file == name and part in parts:
                own = [key for key in tensors if key.startswith(prefix)]
                fill(
                    parts[part],
                    {key.removeprefix(prefix): tensors.pop(key) for key in own},
                    f"{directory / name} {prefix}",
                )
        if tensors:
            raise DataError(f"{directory / name} holds {len(tensors)} tensors of no part, first {min(tensors)}")
    return TorchAnswerer(card, load_tokenizer(directory), parts, batch_size)


def snapshot_tensors(directory: Path, beside: Mapping[str, Any], tied: bool) -> dict[str, Tensor]:
    """float32 tensors of the language model's Hugging Face snapshot, at directory/language_model or where it was.

    Raises DataError when a file is gone or has another size.
    """
    inside = directory / BESIDE
    folder = inside if inside.is_dir() else Path(beside["folder"])
    for name, facts in beside["files"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != facts["bytes"]:
            raise DataError(
                f"{folder / name} is not the snapshot's file of {facts['bytes']:,} bytes: put the snapshot at {inside}"
            )
    source, _ = open_source(folder).renamed(decoder_name)
    unread = "rotary_emb.inv_freq", *(["lm_head.weight"] if tied else [])
    return {name: _float32(source[name]) for name in source if not name.endswith(tuple(unread))}


def _float32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, np.float32))


def fill(module: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Puts the tensors into the module, for inference. Raises DataError for a missing, extra or differently shaped one."""
    want = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    have = {name: tuple(value.shape) for name, value in tensors.items()}
    problems = [f"missing {name} {want[name]}" for name in sorted(want.keys() - have.keys())]
    problems += [f"extra {name} {have[name]}" for name in sorted(have.keys() - want.keys())]
    problems += [f"{n} is {have[n]}, not {want[n]}" for n in sorted(want.keys() & have.keys()) if want[n] != have[n]]
    if problems:
        raise DataError(f"{where} does not fit its module ({'; '.join(problems[:8])}): export again")
    module.load_state_dict(tensors, strict=True, assign=True)
    module.requires_grad_(False).eval()
