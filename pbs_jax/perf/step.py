"""`pbs perf step`: questions/s of a training step of phase 3 or 4 against PyTorch with Hugging Face's modules, on this machine.

Both sides train the same part (Q-Former or Perceiver, projector, AdamW) through the same frozen language model of the same
shape with random weights, on the same released questions. Ours: shared-prefix rows, logits at the answers. The peer: one
question a row, pairs padded to the longer, logits everywhere, as the released code; eager and with `torch.compile`, the
faster counts. Like for like: ours in the peer's form. Phase 1 is in step_phase1.py.
"""

from __future__ import annotations

import dataclasses
import shutil
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pbs_jax.config import load
from pbs_jax.data.rows import Example, PackedRows, split_questions, with_keys
from pbs_jax.models.sizes import Size, get_size
from pbs_jax.perf.flops import released_bins
from pbs_jax.perf.qwen import SPECIALS, RankTokenizer
from pbs_jax.perf.timing import alternate
from pbs_jax.sharding.mesh import make_mesh
from pbs_jax.train import phase3_cell_qa, phase4_slide_qa
from pbs_jax.train.abstract import TRAINABLE
from pbs_jax.train.optimizer import make_optimizer
from pbs_jax.train.phase import Networks, parameters
from pbs_jax.train.step import LossFn, init_state, make_step

SPLITS = {3: ("phase3_cell_qa", "cell_val"), 4: ("phase4_slide_qa", "slide_train")}
SLOT = 0  # id of the visual slot here: ids are those of Qwen's tokenizer folded into the smaller vocabulary


def report(data: Path, phase: int, size_name: str, images: int, rounds: int, patches: int) -> str:
    """Measures and prints. data: holds pbsbench/ and qwen_tokenizer/. patches: of a slide, in phase 4."""
    config_name, split = SPLITS[phase]
    config = load(f"{config_name}:size={size_name}")
    size = get_size(size_name)
    bins = released_bins(data / "pbsbench" / f"{split}.jsonl", RankTokenizer(data / "qwen_tokenizer" / "qwen.tiktoken"))
    bins = [_fold(example, size.decoder.vocab) for example in bins]
    shape = (
        (1 + (size.vit.image_size // size.vit.patch_size) ** 2, size.vit.dim)
        if phase == 3
        else (patches, size.qformer.dim)
    )
    rows = PackedRows([example | {"visual": np.zeros(shape, np.float32)} for example in bins], images)
    row = with_keys(rows)[len(rows) // 2]
    singles = split_questions([bins[i] for i in rows.plan[len(rows) // 2]])
    if phase == 3:
        networks, loss = phase3_cell_qa.networks(size), phase3_cell_qa.make_loss(size, SLOT, "token")
    else:
        networks = phase4_slide_qa.networks(size, size.qformer.dim)
        loss = phase4_slide_qa.make_loss(size, size.qformer.dim, SLOT, config)
    sides = {
        "ours": jax_step(config, networks, loss, _batch([row], shape, images, phase), len(singles)),
        "ours, one question a row": jax_step(config, networks, loss, _batch(_trimmed(singles[:2]), shape, 1, phase), 2),
        "PyTorch": torch_step(size, phase, singles, shape),
    }
    if any(map(shutil.which, ("c++", "g++", "clang++"))):
        sides["PyTorch, compiled"] = torch_step(size, phase, singles, shape, compiled=True)
    found = alternate(sides, rounds)
    title = (
        f"phase {phase} training step at size {size_name}, {rounds} alternating rounds, medians (questions a second):"
    )
    peer = max((name for name in found if name.startswith("PyTorch")), key=lambda name: found[name]["wall"])
    return "\n".join([title, *rates(found, peer)])


def rates(found: Mapping[str, Mapping[str, float]], peer: str) -> list[str]:
    """A line for each measured side, its ratio to `peer`."""
    lines = []
    for name, rate in found.items():
        ratio = {kind: rate[kind] / found[peer][kind] for kind in rate}
        lines.append(
            f"  {name:<32}{rate['wall']:>8.3f} wall ({ratio['wall']:.2f}x), {rate['cpu']:.3f} a CPU-second ({ratio['cpu']:.2f}x)"
        )
    return [*lines, f"  (1.00x: {peer})"]


def jax_step(
    config: Any, networks: Networks, loss: LossFn, batch: dict[str, np.ndarray], items: int
) -> Callable[[], float]:
    """One training step of a real phase on random weights; the returned function runs it and gives back `items`."""
    trees = {name: parameters(make, 0)[1] for name, make in networks.items()}
    trains = TRAINABLE[config.phase]
    mesh = make_mesh(devices=jax.devices()[:1])
    tx = make_optimizer(config.optimizer, 1000)
    trainable = jax.device_put({name: trees[name] for name in trains}, jax.sharding.NamedSharding(mesh, jax.P()))
    frozen = {name: tree for name, tree in trees.items() if name not in trains}
    state = init_state(trainable, tx, mesh)
    step = make_step(loss, tx, 0, state)
    holder = [state]

    def run() -> float:
        holder[0], metrics = step(holder[0], frozen, batch)
        metrics["loss"].block_until_ready()
        return float(items)

    return run


def torch_step(
    size: Size, phase: int, singles: Sequence[Example], shape: tuple[int, ...], *, compiled: bool = False
) -> Callable[[], float]:
    """Steps over all `singles` in pairs, one question a row, with transformers' Llama and BLIP-2 Q-Former modules.

    compiled: the language model, where nearly all the work is, goes through `torch.compile` for rows of any length.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    decoder, qformer = size.decoder, size.qformer
    language_model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=decoder.vocab, hidden_size=decoder.dim, intermediate_size=decoder.ffn_dim,
            num_hidden_layers=decoder.layers, num_attention_heads=decoder.heads, num_key_value_heads=decoder.kv_heads,
            head_dim=decoder.head_dim, tie_word_embeddings=decoder.tied, max_position_embeddings=2048,
        )
    ).requires_grad_(False)  # fmt: skip
    projector = torch.nn.Linear(qformer.dim, decoder.dim)
    queries = torch.nn.Parameter(torch.randn(1, qformer.queries, qformer.dim) * 0.02)
    if phase == 3:
        reader: Any = transformers.Blip2QFormerModel(
            transformers.Blip2QFormerConfig(
                hidden_size=qformer.dim, num_hidden_layers=qformer.layers, num_attention_heads=qformer.heads,
                intermediate_size=qformer.ffn_dim, encoder_hidden_size=qformer.encoder_width,
                cross_attention_frequency=qformer.cross_attention_freq,
            )
        )  # fmt: skip
        read = lambda x: reader(query_embeds=queries.expand(len(x), -1, -1), encoder_hidden_states=x).last_hidden_state  # noqa: E731
    else:
        from pbs_jax.weights.torch_model import Perceiver

        reader = Perceiver(types.SimpleNamespace(**dataclasses.asdict(size.slide_perceiver(qformer.dim))))
        read = lambda x: reader(x, torch.ones(x.shape[:2], dtype=torch.bool))  # noqa: E731
    trained = [*reader.parameters(), *projector.parameters(), *([queries] if phase == 3 else [])]
    optimiser = torch.optim.AdamW(trained, lr=5e-5)
    generator = torch.Generator().manual_seed(0)
    embedding = language_model.get_input_embeddings()
    if compiled:
        language_model = torch.compile(language_model, dynamic=True)
    pairs = [_trimmed(singles[i : i + 2]) for i in range(0, len(singles), 2)]

    def run() -> float:
        for pair in pairs:
            tokens, targets = (
                torch.tensor(np.stack([row[name] for row in pair])).long() for name in ("tokens", "targets")
            )
            real = torch.tensor(np.stack([row["segments"] for row in pair])) >= 0
            visual = projector(read(torch.randn((len(pair), *shape), generator=generator)))
            embeds = embedding(tokens)
            embeds = embeds.masked_scatter(((tokens == SLOT) & real)[..., None], visual)
            logits = language_model(inputs_embeds=embeds, attention_mask=real.long(), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            optimiser.zero_grad()
        return float(len(singles))

    return run


def _fold(example: Example, vocab: int) -> Example:
    """Ids within a smaller vocabulary; the slot's stay apart from all others."""
    slot = example["tokens"] == SPECIALS["<|image_pad|>"]
    tokens = np.where(slot, SLOT, 1 + example["tokens"] % (vocab - 1)).astype(np.int32)
    targets = np.where(example["targets"] >= 0, 1 + example["targets"] % (vocab - 1), -1).astype(np.int32)
    return example | {"tokens": tokens, "targets": targets}


def _trimmed(rows: Sequence[Example]) -> list[Example]:
    """Rows cut to the longest of them, the answers to the most."""
    length = max(int((row["segments"] >= 0).sum()) for row in rows)
    answers = max(int((row["answers"] >= 0).sum()) for row in rows)
    cuts = {"tokens": length, "targets": length, "segments": length, "positions": length}
    cuts |= {"answers": answers, "shares": answers, "firsts": answers}
    return [{name: value[..., : cuts[name]] if name in cuts else value for name, value in row.items()} for row in rows]


def _batch(rows: Sequence[Example], shape: tuple[int, ...], images: int, phase: int) -> dict[str, np.ndarray]:
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0] if name not in ("visual", "real", "index")}
    lead = (len(rows), images) if images > 1 else (len(rows),)
    batch["visual"] = np.random.default_rng(0).standard_normal((*lead, *shape), np.float32)
    return batch | ({"mask": np.ones((*lead, shape[0]), bool)} if phase == 4 else {})
