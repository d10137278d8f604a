"""`pbs perf step --phase 1`: cells/s of a Q-Former training step at the paper's shapes against PyTorch, on this machine.

At size 7b ViT-L backbone and BERT-base Q-Former, random weights, float32, 32 caption tokens. Ours reads cached backbone tokens;
the peer, as the released code, runs the frozen backbone in every step: Dinov2Model, Blip2QFormerModel and the three losses
of BLIP-2 stage 1. Like for like: the peer on cached tokens too. Its captions are written without the queries' keys and
values, which Hugging Face's module cannot take: a little less work for the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pbs_jax.config import load
from pbs_jax.models.qformer import QFormerConfig
from pbs_jax.models.sizes import get_size, in_float32, with_remat
from pbs_jax.models.vit import ViTConfig
from pbs_jax.perf.step import jax_step, rates
from pbs_jax.perf.timing import alternate
from pbs_jax.train import phase1_cell_representation as phase1

TEXT = 32  # tokens of a caption, as the released code cuts them


def report(size_name: str, cells: int, rounds: int) -> str:
    """Measures steps of `cells` cells and prints."""
    config = load(f"phase1_cell_representation:size={size_name}")
    size = get_size(size_name)
    # Float32 and nothing recomputed, as the released code trains this part.
    size = in_float32(with_remat(size, "none"))
    generator = np.random.default_rng(0)
    text = generator.integers(size.qformer.cls_id + 1, size.qformer.vocab - 1, (cells, TEXT), dtype=np.int32)
    text[:, 0] = size.qformer.cls_id
    tokens = 1 + (size.vit.image_size // size.vit.patch_size) ** 2
    features = generator.standard_normal((cells, tokens, size.vit.dim), np.float32)
    ours = jax_step(config, phase1.networks(size), phase1.make_loss(size), {"features": features, "text": text}, cells)
    read, cached = torch_steps(size.qformer, text, size.vit, features)
    sides = {"ours, cached tokens": ours, "PyTorch, backbone in the step": read, "PyTorch, cached tokens": cached}
    found = alternate(sides, rounds)
    title = f"phase 1 training step of {cells} cells at size {size_name}, {rounds} alternating rounds, medians (cells a second):"
    return "\n".join([title, *rates(found, "PyTorch, backbone in the step")])


def torch_steps(
    shape: QFormerConfig, text: np.ndarray, vit: ViTConfig, features: np.ndarray
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Steps of one model over the captions: the backbone reads pixels, or `features` stand for its tokens."""
    import torch
    import transformers
    from torch.nn import functional as F
    from transformers.models.blip_2.modeling_blip_2 import Blip2TextEmbeddings

    torch.manual_seed(0)
    config = transformers.Blip2QFormerConfig(
        vocab_size=shape.vocab, hidden_size=shape.dim, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        intermediate_size=shape.ffn_dim, encoder_hidden_size=shape.encoder_width, use_qformer_text_input=True,
        cross_attention_frequency=shape.cross_attention_freq, max_position_embeddings=shape.max_positions,
    )  # fmt: skip
    parts: Any = torch.nn.ModuleDict(
        {
            "qformer": transformers.Blip2QFormerModel(config),
            "words": Blip2TextEmbeddings(config),
            "norm": torch.nn.LayerNorm(shape.encoder_width),
            "image": torch.nn.Linear(shape.dim, shape.projection),
            "text": torch.nn.Linear(shape.dim, shape.projection),
            "match": torch.nn.Linear(shape.dim, 2),
            "dense": torch.nn.Linear(shape.dim, shape.dim),
            "dense_norm": torch.nn.LayerNorm(shape.dim),
        }
    )
    parts.queries = torch.nn.Parameter(torch.randn(1, shape.queries, shape.dim) * 0.02)
    optimiser = torch.optim.AdamW(parts.parameters(), lr=5e-5)
    ids = torch.tensor(text).long()
    cells = len(ids)
    backbone = transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=vit.dim, num_hidden_layers=vit.depth, num_attention_heads=vit.heads,
            image_size=vit.image_size, patch_size=vit.patch_size,
        )
    ).eval().requires_grad_(False)  # fmt: skip
    pixels, tokens = torch.randn(cells, 3, vit.image_size, vit.image_size), torch.tensor(features)

    def read(queries: Any, captions: Any, image: Any) -> Any:
        embeds = parts.words(input_ids=captions, query_embeds=queries) if captions is not None else queries
        length = queries.shape[1] if queries is not None else 0
        return parts.qformer(query_embeds=embeds, query_length=length, encoder_hidden_states=image).last_hidden_state

    def step(seen_tokens: Any) -> float:
        image = parts.norm(seen_tokens)
        queries = parts.queries.expand(cells, -1, -1)
        seen = F.normalize(parts.image(read(queries, None, image)), dim=-1)
        said = F.normalize(parts.text(read(None, ids, None)[:, 0]), dim=-1)
        similarity = torch.einsum("iqp,tp->iqt", seen, said).amax(1) / 0.07
        diagonal = torch.arange(cells)
        contrast = (
            F.cross_entropy(similarity, diagonal, label_smoothing=0.1)
            + F.cross_entropy(similarity.T, diagonal, label_smoothing=0.1)
        ) / 2
        with torch.no_grad():
            apart = similarity - 1e4 * torch.eye(cells)
            text_for = torch.multinomial(apart.softmax(1), 1)[:, 0]
            image_for = torch.multinomial(apart.T.softmax(1), 1)[:, 0]
        captions = torch.cat([ids, ids, ids[text_for]])
        images = torch.cat([image, image[image_for], image])
        joint = read(parts.queries.expand(3 * cells, -1, -1), captions, images)[:, : shape.queries]
        labels = torch.cat([torch.ones(cells), torch.zeros(2 * cells)]).long()
        matching = F.cross_entropy(parts.match(joint).mean(1), labels)
        hidden = parts.dense_norm(F.gelu(parts.dense(read(None, ids, None))))
        logits = hidden @ parts.words.word_embeddings.weight.T
        writing = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
        (contrast + matching + writing).backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return float(cells)

    return lambda: step(backbone(pixels).last_hidden_state), lambda: step(tokens)
