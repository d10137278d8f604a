"""PBS-VL in plain PyTorch, for inference: ViT, the Q-Former's image pass, projector, Qwen2.5 decoder.

Attribute names are the released ones (DINOv2, the official Q-Former, Hugging Face's Qwen2), so a state dict is what
`pbs weights export` writes. Shapes come from export.json; nothing here needs JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_prep.tokens import rope_positions

Shape = SimpleNamespace  # the fields of ViTConfig, QFormerConfig or DecoderConfig
Cache = list[tuple[Tensor, Tensor]]  # per layer k, v [B, heads, S, hd]


def split(x: Tensor, heads: int) -> Tensor:
    """[B, T, H*hd] -> [B, H, T, hd]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """[B, H, T, hd] -> [B, T, H*hd]."""
    return x.transpose(1, 2).flatten(2)


# ---- vision backbone ------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGlu(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    """Pre-norm transformer block with LayerScale, [B, T, D] -> [B, T, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim = shape.dim
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, shape.eps), nn.LayerNorm(dim, shape.eps)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        self.mlp = (Mlp if shape.ffn == "mlp" else SwiGlu)(dim, shape.mlp_dim)
        self.ls1, self.ls2 = LayerScale(dim), LayerScale(dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, self.heads) for part in self.attn["qkv"](self.norm1(x)).chunk(3, dim=-1))
        x = x + self.ls1(self.attn["proj"](merge(F.scaled_dot_product_attention(q, k, v))))
        return x + self.ls2(self.mlp(self.norm2(x)))


class ConvStage(nn.Module):
    """x + conv(gelu(norm(x))) twice, then a convolution of stride 2: [B, C, H, W] -> [B, D, H/2, W/2]."""

    def __init__(self, cin: int, cout: int, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(1, cin, eps) for _ in range(3))
        self.conv1, self.conv2 = (nn.Conv2d(cin, cin, 3, padding=1) for _ in range(2))
        self.conv3 = nn.Conv2d(cin, cout, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv1(F.gelu(self.norm1(x)))
        x = x + self.conv2(F.gelu(self.norm2(x)))
        return self.conv3(F.gelu(self.norm3(x)))


class ViT(nn.Module):
    """DINOv2, or nano's variant with a convolutional stem. Pixels float[B, 3, H, W] -> tokens before the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, dim, patch = shape, shape.dim, shape.patch_size
        side = shape.image_size // patch
        self.grid = tuple(shape.position_grid or (side, side))
        if shape.stem == "conv":
            stages = {
                "patch": nn.Conv2d(3, dim // 4, 4, stride=4),
                "stage1": ConvStage(dim // 4, dim // 2, shape.eps),
                "stage2": ConvStage(dim // 2, dim, shape.eps),
            }
            self.stem = nn.ModuleDict(stages)
        else:
            self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch, stride=patch)})
            self.mask_token = nn.Parameter(torch.zeros(1, dim))  # the release has it; no pass reads it
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], dim))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(dim, shape.eps)  # for classification; PBS-VL reads the tokens before it

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 1+N, D], class token first."""
        x = pixels
        for step in self.stem.values() if self.shape.stem == "conv" else self.patch_embed.values():
            x = step(x)
        positions = self._positions(x.shape[2:])
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1) + positions
        for block in self.blocks:
            x = block(x)
        return x

    def _positions(self, grid: Sequence[int]) -> Tensor:
        """The position table, resampled as DINOv2 does for other image sizes."""
        if tuple(grid) == self.grid:
            return self.pos_embed
        offset = self.shape.interpolate_offset
        size = {"scale_factor": tuple((new + offset) / old for new, old in zip(grid, self.grid, strict=True))}
        table = self.pos_embed[:, 1:].unflatten(1, self.grid).permute(0, 3, 1, 2)
        options = {"mode": "bicubic", "antialias": self.shape.antialias}
        table = F.interpolate(table, **(size if offset else {"size": tuple(grid)}), **options)
        return torch.cat([self.pos_embed[:, :1], table.flatten(2).transpose(1, 2)], dim=1)


class Head(nn.Module):
    """Backbone tokens [B, 1+N, D], class token first -> logits [B, outputs] from the class token and the patches' mean."""

    def __init__(self, wide: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.ffn, self.out = nn.LayerNorm(wide, 1e-6), nn.Linear(wide, hidden), nn.Linear(hidden, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        pooled = torch.cat([tokens[:, 0], tokens[:, 1:].mean(dim=1)], dim=-1)
        return self.out(F.gelu(self.ffn(self.norm(pooled))))


# ---- Q-Former -------------------------------------------------------------------------------------------------------


def bert_attention(dim: int, width: int, eps: float) -> nn.ModuleDict:
    projections = {"query": nn.Linear(dim, dim), "key": nn.Linear(width, dim), "value": nn.Linear(width, dim)}
    return nn.ModuleDict({"self": nn.ModuleDict(projections), "output": dense_norm(dim, dim, eps)})


def dense_norm(din: int, dout: int, eps: float) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(din, dout), "LayerNorm": nn.LayerNorm(dout, eps)})


class QFormer(nn.Module):
    """BLIP-2's Q-Former. Only the image pass runs; the text half is held so that a file loads whole."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, dim, eps = shape, shape.dim, shape.eps
        layers = []
        for index in range(shape.layers):
            layer = {"attention": bert_attention(dim, dim, eps)}
            if index % shape.cross_attention_freq == 0:
                layer["crossattention"] = bert_attention(dim, shape.encoder_width, eps)
            for kind in ("", "_query"):
                layer[f"intermediate{kind}"] = nn.ModuleDict({"dense": nn.Linear(dim, shape.ffn_dim)})
                layer[f"output{kind}"] = dense_norm(shape.ffn_dim, dim, eps)
            layers.append(nn.ModuleDict(layer))
        embeddings = {
            "word_embeddings": nn.Embedding(shape.vocab, dim),
            "position_embeddings": nn.Embedding(shape.max_positions, dim),
            "LayerNorm": nn.LayerNorm(dim, eps),
        }
        bert = {"embeddings": nn.ModuleDict(embeddings), "encoder": nn.ModuleDict({"layer": nn.ModuleList(layers)})}
        head = nn.ModuleDict({"transform": dense_norm(dim, dim, eps), "decoder": nn.Linear(dim, shape.vocab)})
        head.register_parameter("bias", nn.Parameter(torch.zeros(shape.vocab)))
        self.query_tokens = nn.Parameter(torch.zeros(1, shape.queries, dim))
        self.temp = nn.Parameter(torch.zeros(()))
        self.ln_vision = nn.LayerNorm(shape.encoder_width, 1e-5)
        self.Qformer = nn.ModuleDict({"bert": nn.ModuleDict(bert), "cls": nn.ModuleDict({"predictions": head})})
        self.vision_proj, self.text_proj = nn.Linear(dim, shape.projection), nn.Linear(dim, shape.projection)
        self.itm_head = nn.Linear(dim, 2)

    def forward(self, features: Tensor) -> Tensor:
        """Backbone tokens [B, N, W] -> queries [B, Q, D]; tokens that are exactly zero are invisible."""
        visible = features.ne(0).any(-1)[:, None, None]
        image, bert = self.ln_vision(features), self.Qformer["bert"]
        x = bert["embeddings"]["LayerNorm"](self.query_tokens).expand(len(features), -1, -1)
        for layer in bert["encoder"]["layer"]:
            x = self._attend(layer["attention"], x, x)
            if "crossattention" in layer:
                x = self._attend(layer["crossattention"], x, image, visible)
            output = layer["output_query"]
            x = output["LayerNorm"](x + output["dense"](F.gelu(layer["intermediate_query"]["dense"](x))))
        return x

    def _attend(self, part: Any, x: Tensor, source: Tensor, visible: Tensor | None = None) -> Tensor:
        inputs = {"query": x, "key": source, "value": source}
        q, k, v = (split(part["self"][name](value), self.shape.heads) for name, value in inputs.items())
        context = merge(F.scaled_dot_product_attention(q, k, v, visible))
        return part["output"]["LayerNorm"](x + part["output"]["dense"](context))


# ---- Perceiver resampler ------------------------------------------------------------------------------------------


class PerceiverBlock(nn.Module):
    """latents += attention(query_norm(latents), input_norm(x)); latents += ffn(latents)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, eps = shape.dim, shape.eps
        self.query_norm, self.input_norm = nn.LayerNorm(dim, eps), nn.LayerNorm(dim, eps)
        self.attention = nn.MultiheadAttention(dim, shape.heads, batch_first=True)
        layers = (nn.LayerNorm(dim, eps), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ffn = nn.Sequential(*layers)

    def forward(self, latents: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
        source = self.input_norm(x)
        read, _ = self.attention(self.query_norm(latents), source, source, key_padding_mask=hidden, need_weights=False)
        latents = latents + read
        return latents + self.ffn(latents)


class Perceiver(nn.Module):
    """Learned latents that read a slide's patches or a patch's tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(1, shape.latents, shape.dim))
        self.input_projection = nn.Linear(shape.input_dim, shape.dim)
        self.blocks = nn.ModuleList(PerceiverBlock(shape) for _ in range(shape.depth))
        self.output_norm = nn.LayerNorm(shape.dim, shape.eps)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """x [B, N, D], visible bool[B, N] -> [B, L, dim]."""
        inputs, latents = self.input_projection(x), self.latents.expand(len(x), -1, -1)
        for block in self.blocks:
            latents = block(latents, inputs, ~visible)
        return self.output_norm(latents)


# ---- language model -------------------------------------------------------------------------------------------------


class DecoderLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, hd, bias = shape.dim, shape.head_dim, shape.qkv_bias
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(dim, shape.rms_eps)
        self.post_attention_layernorm = nn.RMSNorm(dim, shape.rms_eps)
        attention = {f"{name}_proj": nn.Linear(dim, shape.kv_heads * hd, bias) for name in "kv"}
        attention["q_proj"] = nn.Linear(dim, shape.heads * hd, bias)
        attention["o_proj"] = nn.Linear(shape.heads * hd, dim, bias=False)
        self.self_attn = nn.ModuleDict(attention)
        ffn = {f"{name}_proj": nn.Linear(dim, shape.ffn_dim, bias=False) for name in ("gate", "up")}
        self.mlp = nn.ModuleDict({**ffn, "down_proj": nn.Linear(shape.ffn_dim, dim, bias=False)})

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        shape, attention, ffn = self.shape, self.self_attn, self.mlp
        h = self.input_layernorm(x)
        q = rotate(split(attention["q_proj"](h), shape.heads), *rope)
        k = rotate(split(attention["k_proj"](h), shape.kv_heads), *rope)
        v = split(attention["v_proj"](h), shape.kv_heads)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        shared = shape.heads // shape.kv_heads  # query heads to one key/value head
        context = F.scaled_dot_product_attention(
            q, k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1), mask[:, None]
        )
        x = x + attention["o_proj"](merge(context))
        h = self.post_attention_layernorm(x)
        return x + ffn["down_proj"](F.silu(ffn["gate_proj"](h)) * ffn["up_proj"](h)), (k, v)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, hd], first half paired with second half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Decoder(nn.Module):
    """Causal language model of the Qwen2.5 / Llama family with M-RoPE."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        parts = {
            "embed_tokens": nn.Embedding(shape.vocab, shape.dim),
            "layers": nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers)),
            "norm": nn.RMSNorm(shape.dim, shape.rms_eps),
        }
        self.model = nn.ModuleDict(parts)
        self.lm_head = None if shape.tied else nn.Linear(shape.dim, shape.vocab, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model["embed_tokens"](ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model["embed_tokens"].weight) if self.lm_head is None else self.lm_head(hidden)

    def forward(
        self, embeds: Tensor, positions: Tensor, mask: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """embeds [B, T, D], positions int[3, B, T], mask bool[B, T, S] with S = past + T -> hidden [B, T, D], cache."""
        rope, cache, x = self._rope(positions), [], embeds
        for index, layer in enumerate(self.model["layers"]):
            x, kv = layer(x, rope, mask, past[index] if past else None)
            cache.append(kv)
        return self.model["norm"](x), cache

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [B, 1, T, hd/2]: frequency j turns with the position of its section's axis (t, h or w)."""
        half = self.shape.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions.device) / half
        sections = self.shape.mrope_section or (half, 0, 0)
        axis = [number for number, width in enumerate(sections) for _ in range(width)]
        angles = positions.float()[axis].permute(1, 2, 0) * self.shape.rope_theta**-steps
        return angles.cos()[:, None], angles.sin()[:, None]

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        visual: Tensor | None,
        *,
        pad_id: int,
        slot_id: int,
        stop_id: int,
        max_new: int,
    ) -> tuple[list[list[int]], Tensor]:
        """Greedy answers up to the stop id, without it, and the first step's logits [B, V].

        Prompts are padded on the left; visual [B, Q, D] fills each prompt's slots (None: they keep their embedding).
        """
        device = self.model["norm"].weight.device
        batch, length = len(prompts), max(map(len, prompts))
        tokens, positions = np.full((batch, length), pad_id), np.ones((3, batch, length), np.int64)
        real = np.zeros((batch, length), bool)
        for row, prompt in enumerate(prompts):
            start = length - len(prompt)
            tokens[row, start:], real[row, start:] = prompt, True
            positions[:, row, start:] = rope_positions(prompt, slot_id)
        after = torch.as_tensor(positions.max(axis=(0, 2)) + 1, device=device)
        tokens, positions, visible = (torch.as_tensor(array, device=device) for array in (tokens, positions, real))
        embeds = self.embed(tokens)
        if visual is not None:
            embeds[tokens == slot_id] = visual.to(embeds).flatten(0, 1)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        # A padding row sees itself, so that its softmax stays finite; no real token sees it.
        mask = (causal & visible[:, None]) | torch.eye(length, dtype=torch.bool, device=device)
        hidden, cache = self(embeds, positions, mask)
        first = logits = self.logits(hidden[:, -1])
        answers: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(batch))
        for step in range(max_new):
            chosen = logits.argmax(-1)
            for row, token in enumerate(chosen.tolist()):
                if token == stop_id:
                    open_rows.discard(row)
                elif row in open_rows:
                    answers[row].append(token)
            if not open_rows or step == max_new - 1:
                break
            visible = F.pad(visible, (0, 1), value=True)
            now = (after + step).expand(3, -1)[..., None]
            hidden, cache = self(self.embed(chosen[:, None]), now, visible[:, None], cache)
            logits = self.logits(hidden[:, -1])
        return answers, first
