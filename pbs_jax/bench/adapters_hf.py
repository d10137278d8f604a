"""Vision-language models of transformers, run in this process: the eight baselines of Table 2 that it has classes for.

One class serves all: the processor's own chat template wraps the question, pictures come first. BLIP-2 has no template
and takes `Question: … Answer:`. Decoding is greedy whatever the checkpoint's generation_config says.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from data_prep.io import sha256_file
from data_prep.schema import DataError
from pbs_jax.bench.adapters import ANSWER_TOKENS, Options, Request, Response
from pbs_jax.decode.batching import first_words

# Classes that the tests run. Others that transformers maps to an image-text model load too, with a remark.
FAMILIES = ("internvl", "idefics3", "qwen2_vl", "qwen2_5_vl", "deepseek_vl_hybrid", "llava_next", "blip-2")
SINGLE_IMAGE = ("blip-2",)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HfModel:
    """A checkpoint from a folder or the hub (safetensors only, no remote code). Raises DataError if it does not fit."""

    def __init__(self, value: str, options: Options):
        source, _, revision = (value, "", "") if Path(value).is_dir() else value.partition("@")
        self._device = torch.device(_device(options.device))
        self._processor, self._model = _load(source, revision or None, options.dtype)
        self._model.to(self._device).eval()
        config = self._model.config
        self._family = str(config.model_type)
        tokenizer = self._processor.tokenizer
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._template = getattr(self._processor, "chat_template", None)
        if not self._template and self._family != "blip-2":
            raise DataError(f"{source} has no chat template, so its questions can't be put as it was taught")
        overridden = _decode_greedily(self._model, tokenizer)
        self.name, self.seed, self.at_once = Path(source).name, 0, options.batch
        found = _revision(source, revision, config)
        remarks = [] if self._family in FAMILIES else [f"Model family {self._family} was never tested here."]
        if not revision and not Path(source).is_dir():
            remarks.append(f"No revision of {source} was asked for: {found} was its newest.")
        self.card: Mapping[str, Any] = {
            "backend": "hf",
            "source": Path(source).name if Path(source).is_dir() else source,
            "revision": found,
            "class": type(self._model).__name__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "device": self._device.type,
            "batch": options.batch,
            "decoding": {"greedy": True, "answer_tokens": ANSWER_TOKENS, "overridden": overridden},
            "template_sha256": _sha256(str(self._template or "")),
            "images": _image_policy(self._processor.image_processor),
            "remarks": remarks,
        }

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        """Answers in the order asked; alike lengths go together. A batch that doesn't fit into memory is halved."""
        order = sorted(range(len(requests)), key=lambda k: (len(requests[k].images), len(requests[k].text)))
        found: dict[int, Response] = {}
        for count in sorted({len(request.images) for request in requests}):
            alike = [k for k in order if len(requests[k].images) == count]
            for start in range(0, len(alike), self.at_once):
                rows = alike[start : start + self.at_once]
                found |= zip(rows, self._fitting([requests[k] for k in rows], mode), strict=True)
        return [found[k] for k in range(len(requests))]

    def _fitting(self, requests: Sequence[Request], mode: str) -> list[Response]:
        try:
            with torch.inference_mode():
                return self._choose(requests) if mode == "letter_likelihood" else self._write(requests)
        except torch.OutOfMemoryError as error:
            if len(requests) == 1:
                return [Response("", "error", {"error": str(error).splitlines()[0]})]
        torch.cuda.empty_cache()
        half = len(requests) // 2
        return self._fitting(requests[:half], mode) + self._fitting(requests[half:], mode)

    def _write(self, requests: Sequence[Request]) -> list[Response]:
        inputs = self._inputs(requests)
        limit = max(ANSWER_TOKENS[request.question_type] for request in requests)
        tokens = self._for(inputs).generate(**inputs, max_new_tokens=limit)
        prompt = inputs["input_ids"]
        width = prompt.shape[1]
        if tokens.shape[1] >= width and torch.equal(tokens[:, :width], prompt):
            tokens = tokens[:, width:]
        return [self._response(row, request) for row, request in zip(tokens.tolist(), requests, strict=True)]

    def _for(self, inputs: Mapping[str, Any]) -> Any:
        """BLIP-2 does nothing without a picture; its language model alone is what is left of it."""
        blind = self._family == "blip-2" and "pixel_values" not in inputs
        return self._model.language_model if blind else self._model

    def _response(self, tokens: Sequence[int], request: Request) -> Response:
        """Cuts at the question type's own limit: what a longer answer in the batch needed must change nothing."""
        stops = set(_as_list(self._model.generation_config.eos_token_id))
        limit = ANSWER_TOKENS[request.question_type]
        end = next((k for k, token in enumerate(tokens[:limit]) if token in stops), None)
        text = self._processor.tokenizer.decode(tokens[: limit if end is None else end], skip_special_tokens=True)
        truncated = end is None and len(tokens) >= limit
        used = limit if truncated else len(tokens[:limit]) if end is None else end + 1
        return Response(text.strip(), "truncated" if truncated else "ok", {"output_tokens": used})

    def _choose(self, requests: Sequence[Request]) -> list[Response]:
        """The allowed answer whose spellings' first tokens are likeliest together."""
        inputs = self._inputs(requests)
        logits = self._for(inputs)(**inputs).logits[:, -1].float()
        out = []
        for row, request in zip(logits, requests, strict=True):
            words = first_words(request.question_type, len(request.options))
            starts = self._first_tokens(words)
            scores = torch.stack([row[torch.tensor(starts[word], device=row.device)].logsumexp(0) for word in words])
            out.append(Response(words[int(scores.argmax())]))
        return out

    def _first_tokens(self, words: Sequence[str]) -> dict[str, list[int]]:
        """First tokens of each word's spellings, without those that several words share."""
        encode = self._processor.tokenizer
        starts = {
            word: {
                encode(form, add_special_tokens=False)["input_ids"][0]
                for form in (word, f" {word}", word.capitalize(), f" {word.capitalize()}")
            }
            for word in words
        }
        own = {w: sorted(s.difference(*(o for v, o in starts.items() if v != w))) for w, s in starts.items()}
        if not all(own.values()):
            raise DataError(f"{self.name}'s tokenizer does not tell {', '.join(words)} apart by their first token")
        return own

    def _inputs(self, requests: Sequence[Request]) -> Any:
        pictures: list[Any] = [[_picture(image) for image in request.images] for request in requests]
        if self._family in SINGLE_IMAGE:
            if (most := max(map(len, pictures))) > 1:
                raise DataError(f"{self.name} takes one picture, and a question shows {most}")
            pictures = [picture for shown in pictures for picture in shown]  # its processor takes a flat list
        texts = [self._prompt(request) for request in requests]
        begin = self._processor.tokenizer.bos_token
        inputs = self._processor(
            text=texts,
            images=pictures if any(request.images for request in requests) else None,
            return_tensors="pt",
            padding=True,
            add_special_tokens=not (begin and texts[0].startswith(begin)),  # templates may write it themselves
        )
        return inputs.to(self._device, self._model.dtype)

    def _prompt(self, request: Request) -> str:
        if self._family == "blip-2":
            return f"Question: {request.text} Answer:"
        content = [{"type": "image"} for _ in request.images] + [{"type": "text", "text": request.text}]
        turns = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def _load(source: str, revision: str | None, dtype: str) -> tuple[Any, Any]:
    known = {"revision": revision, "trust_remote_code": False}
    try:
        processor = transformers.AutoProcessor.from_pretrained(source, **known)
        model, loaded = transformers.AutoModelForImageTextToText.from_pretrained(
            source, dtype=dtype, use_safetensors=True, output_loading_info=True, **known
        )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:400]
        raise DataError(
            f"{source} does not load with transformers {transformers.__version__} ({reason}); pip install pbs-jax[hf] "
            "brings what its processors need, models with code of their own go through subprocess:COMMAND"
        ) from error
    # Weights that a checkpoint lacks are drawn at random: a model that looks loaded and isn't.
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, loaded.get(kind) or ())):
            raise DataError(f"{source}: {len(found)} {kind.replace('_', ' ')} on loading, first {found[0]}")
    return processor, model


def _decode_greedily(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Replaces the checkpoint's generation settings by greedy ones; returns those it would have used."""
    had = model.generation_config
    stops = _as_list(had.eos_token_id) or _as_list(tokenizer.eos_token_id)
    greedy = transformers.GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=stops,
        bos_token_id=had.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.generation_config = greedy
    if hasattr(model, "language_model") and hasattr(model.language_model, "generation_config"):
        model.language_model.generation_config = greedy  # BLIP-2 generates through it
    names = ("do_sample", "num_beams", "temperature", "top_p", "top_k", "repetition_penalty")
    changed = {n: getattr(had, n) for n in names if getattr(had, n, None) != getattr(greedy, n, None)}
    return {name: value for name, value in changed.items() if value is not None}


def _as_list(ids: int | Sequence[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _picture(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def _revision(source: str, asked: str, config: Any) -> str:
    """The hub's commit, or for a folder the hash of its weights: what the answers stand for."""
    folder = Path(source)
    if not folder.is_dir():
        return str(getattr(config, "_commit_hash", None) or asked)
    if _COMMIT.fullmatch(folder.name):
        return folder.name
    files = sorted(folder.glob("*.safetensors"))
    return "sha256:" + _sha256("".join(f"{file.name} {sha256_file(file)}\n" for file in files))


def _image_policy(processor: Any) -> dict[str, Any]:
    """How pictures are resized and cut: part of what a score means."""
    names = ("size", "min_pixels", "max_pixels", "crop_size", "max_image_size", "high_res_size", "resample",
             "do_image_splitting", "crop_to_patches", "max_patches", "image_grid_pinpoints", "patch_size")  # fmt: skip
    settings = json.loads(processor.to_json_string())
    return {"processor": type(processor).__name__} | {n: settings[n] for n in names if settings.get(n) is not None}
