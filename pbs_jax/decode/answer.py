"""Questions about cell images, answered by a finished phase 3: image -> backbone -> Q-Former -> projector -> language model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_prep.prompts import IM_END, IMAGE_PAD, SLOT_LENGTH, branch_texts
from data_prep.schema import QA, DataError
from data_prep.tokens import PAD, Tokenizer, load_tokenizer, prefix_tokens, prompt_tokens
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import decode_image
from pbs_jax.decode.batching import batch_by_limit, first_words
from pbs_jax.decode.generate import CHUNK, GREEDY, Prefix, generate, read_prefix
from pbs_jax.decode.sampling import Sampling
from pbs_jax.models.decoder import Decoder, DecoderConfig, layers_apart
from pbs_jax.models.int8 import host_first, int8_kernels
from pbs_jax.models.pbs_vl import Projector, visual_tokens
from pbs_jax.models.qformer import QFormer
from pbs_jax.models.sizes import backbone_shape, get_size, in_float32, told_queries, with_queries
from pbs_jax.models.vit import ViT
from pbs_jax.sharding.mesh import answering_mesh, within
from pbs_jax.sharding.rules import DECODER_RULES
from pbs_jax.train import handover
from pbs_jax.train.phase import definition

MODES = ("generate", "letter_likelihood")
TOLD = 4  # tokens between two words to who listens
# Longest answers per type, in tokens: the closed ones are a letter, a word or ten words.
MAX_NEW = {"true_false": 4, "multiple_choice": 4, "fill_blank": 16, "open": 64}


@dataclasses.dataclass(frozen=True)
class Answerer:
    """A finished phase 3 ready to answer. `encode` and `answer` work on batches of any size."""

    tokenizer: Tokenizer
    image_side: int
    graphs: dict[str, nnx.GraphDef[Any]]
    params: dict[str, Any]
    batch_size: int = 64
    mesh: Mesh | None = None  # of `answering_mesh`; None = one device
    slot: int = SLOT_LENGTH  # visual tokens of an image

    def encode(self, images: Sequence[bytes]) -> np.ndarray:
        """Encoded pictures -> visual tokens float32[n, Q, lm width] for the language model's slot."""
        pixels = np.stack([decode_image(image, self.image_side) for image in images])
        return np.concatenate([self._encode(part) for part in _batches(pixels, self.batch_size)])[: len(images)]

    def _encode(self, pixels: np.ndarray) -> np.ndarray:
        graphs = tuple(self.graphs[name] for name in VISUAL_TREES)
        return np.asarray(_visual(graphs, tuple(self.params[name] for name in VISUAL_TREES), pixels))

    def answer(
        self,
        visual: np.ndarray | None,
        questions: Sequence[QA],
        options: Sequence[Sequence[str]],
        mode: str = "generate",
        penalty: float = 1.0,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """One answer per question; visual [n, Q, D] row by row, None = blind (the slot stays empty).

        mode "letter_likelihood" restricts true/false and multiple choice to the likelier of the allowed first tokens.
        stop: more texts of one token that end an answer.
        """
        prompts = [
            prompt_tokens(self.tokenizer, qa, shown, self.slot) for qa, shown in zip(questions, options, strict=True)
        ]
        return self._answer(prompts, questions, options, visual, None, [], mode, penalty, sampling, stop)

    def read(self, visual: np.ndarray) -> Prefix:
        """What the language model has read when it has seen each image, visual [images, Q, D]: for `answer_about`."""
        count = -(-len(visual) // self.batch_size) * self.batch_size  # few programs whatever the number of images
        padded = np.concatenate([visual, np.repeat(visual[:1], count - len(visual), axis=0)])
        with within(self.mesh):
            return read_prefix(
                self.graphs["language_model"],
                self.params["language_model"],
                prefix_tokens(self.tokenizer, self.slot),
                padded,
                self.tokenizer.id(IMAGE_PAD),
            )

    def answer_about(
        self,
        prefix: Prefix,
        owners: Sequence[int],
        questions: Sequence[QA],
        options: Sequence[Sequence[str]],
        mode: str = "generate",
        penalty: float = 1.0,
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        tell: Callable[[str], None] | None = None,
    ) -> list[str]:
        """`answer` for several questions an image, which is read once: owners[i] is the image of question i in `read`.

        tell: of a single question, called with the answer so far while it is written.
        """
        prompts = [
            self.tokenizer.encode(branch_texts(qa, shown)[0]) for qa, shown in zip(questions, options, strict=True)
        ]
        return self._answer(prompts, questions, options, None, prefix, owners, mode, penalty, sampling, stop, tell)

    def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        questions: Sequence[QA],
        options: Sequence[Sequence[str]],
        visual: np.ndarray | None,
        prefix: Prefix | None,
        owners: Sequence[int],
        mode: str,
        penalty: float,
        sampling: Sampling,
        stop: Sequence[str],
        tell: Callable[[str], None] | None = None,
    ) -> list[str]:
        if mode not in MODES:
            raise DataError(f'answer mode "{mode}" is unknown: use one of {", ".join(MODES)}')
        kinds = [qa.question_type for qa in questions]
        allowed = [
            first_words(kind, len(shown)) if mode == "letter_likelihood" else ()
            for kind, shown in zip(kinds, options, strict=True)
        ]
        limits = [0 if words else MAX_NEW[kind] for kind, words in zip(kinds, allowed, strict=True)]
        answers = [""] * len(prompts)
        for rows in batch_by_limit(prompts, limits, self.batch_size):
            short = self.batch_size - len(rows)
            padded = rows + [rows[0]] * short
            with within(self.mesh):
                tokens, first = generate(
                    self.graphs["language_model"],
                    self.params["language_model"],
                    [prompts[i] for i in padded],
                    None if visual is None else visual[padded],
                    pad_id=self.tokenizer.id(PAD),
                    slot_id=self.tokenizer.id(IMAGE_PAD),
                    stop_ids=(self.tokenizer.id(IM_END), *map(self._one_token, stop)),
                    max_new=[limits[i] for i in rows] + [0] * short,
                    penalty=penalty,
                    sampling=sampling,
                    seeds=padded,
                    prefix=prefix,
                    owners=[owners[i] for i in padded] if prefix else (),
                    tell=tell and (lambda answers: tell(self._text(answers[0]))),
                    chunk=TOLD if tell else CHUNK,
                )
            for row, i in enumerate(rows):
                if allowed[i]:
                    scores = [first[row, self.tokenizer.encode(word)[0]] for word in allowed[i]]
                    answers[i] = allowed[i][int(np.argmax(scores))]
                else:
                    answers[i] = self._text(tokens[row])
        return answers

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids)).strip()

    def _one_token(self, text: str) -> int:
        ids = self.tokenizer.encode(text)
        if len(ids) != 1:
            raise DataError(f'stop text "{text}" is {len(ids)} tokens of this model: give one that is a single token')
        return ids[0]


VISUAL_TREES = ("backbone", "qformer", "projector")


@functools.partial(jax.jit, static_argnums=0)
def _visual(graphs: tuple[nnx.GraphDef[Any], ...], params: tuple[Any, ...], pixels: jax.Array) -> jax.Array:
    """uint8[B, S, S, 3] -> float32[B, Q, lm width]."""
    vit, qformer, projector = (nnx.merge(graph, tree) for graph, tree in zip(graphs, params, strict=True))
    # The bfloat16 round trip is what the cached features of training went through.
    features = vit(normalise(pixels))["x_prenorm"].astype(jnp.bfloat16).astype(jnp.float32)
    return visual_tokens(qformer, projector, features)


def _batches(array: np.ndarray, size: int) -> list[np.ndarray]:
    """Equal batches; the last one is padded by repeating its first row."""
    parts = [array[start : start + size] for start in range(0, len(array), size)]
    short = size - len(parts[-1])
    return [*parts[:-1], np.concatenate([parts[-1], np.repeat(parts[-1][:1], short, axis=0)])]


def load_answerer(
    workdir: str | Path,
    batch_size: int = 64,
    exact: bool = False,
    devices: Sequence[jax.Device] | None = None,
    int8: bool | None = None,
) -> Answerer:
    """Loads the chain that workdir/handover.json names, each part checked against the recorded hash. Raises DataError.

    exact: compute in float32 at every size. devices: the language model is split over them (default: this process's
    accelerators, see `answering_mesh`), the rest lies whole on each. int8: the language model's kernels (default: as the
    phase was trained).
    """
    content = handover.read(workdir, ("cell_qa",))
    facts = content["facts"]
    words = Path(content["config"]["data"]["root"]) / "tokenizer"
    tokenizer = load_tokenizer(words)
    handover.same_tokenizer(workdir, facts, tokenizer, words)
    size = with_queries(get_size(facts["size"], tokenizer, int8=asked_int8(content, int8)), told_queries(facts))
    size = dataclasses.replace(size, vit=backbone_shape(handover.read(facts["backbone"])["facts"], size.vit))
    size = in_float32(size) if exact else size
    params, mesh = load_trees(
        workdir, facts, ("qformer", "projector"), ("language_model", "backbone"), size.decoder, devices
    )
    graphs = {
        "backbone": definition(lambda rngs: ViT(size.vit, rngs=rngs)),
        "qformer": definition(lambda rngs: QFormer(size.qformer, rngs=rngs)),
        "projector": definition(lambda rngs: Projector(size.qformer.dim, size.decoder.dim, rngs=rngs)),
        "language_model": definition(lambda rngs: Decoder(size.decoder, rngs=rngs)),
    }
    return Answerer(tokenizer, size.vit.image_size, graphs, params, batch_size, mesh, size.qformer.queries)


def load_trees(
    workdir: str | Path,
    facts: dict[str, Any],
    own: Sequence[str],
    recorded: Sequence[str],
    decoder: DecoderConfig,
    devices: Sequence[jax.Device] | None,
) -> tuple[dict[str, Any], Mesh | None]:
    """The phase's `own` trees and the `recorded` ones that its facts name, laid out for answering, and the mesh they lie on."""
    mesh = answering_mesh(decoder.kv_heads, devices)
    host = host_first(decoder.int8, mesh.size if mesh else 1)
    whole = NamedSharding(mesh, PartitionSpec()) if mesh else None
    with within(mesh):
        params = handover.load(workdir, own, whole)
        for name in recorded:
            place = host if host and name == "language_model" else whole
            params |= handover.load_recorded(workdir, facts, name, place, {"language_model": DECODER_RULES})
        if decoder.int8:
            params["language_model"] = int8_kernels(params["language_model"])
    if host:
        params["language_model"] = jax.device_put(params["language_model"], jax.local_devices()[0])
    params["language_model"] = to_answer(params["language_model"], mesh)
    return params, mesh


def asked_int8(content: Mapping[str, Any], int8: bool | None) -> bool:
    """Whether the language model of a phase answers with int8 kernels: as asked for, else as it was trained with."""
    return bool(content["config"].get("int8")) if int8 is None else int8


def to_answer(language_model: Any, mesh: Mesh | None) -> Any:
    """The parameters as they decode fastest here."""
    alone = mesh is None and jax.local_devices()[0].platform == "cpu"
    return layers_apart(language_model) if alone else language_model
