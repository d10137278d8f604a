"""What a model looked at: the attention of the Q-Former over a cell's tokens; of the slide Perceiver over a slide's patches
and of phase 2's Perceiver within them.

Attention is where the queries read from, the mean over queries, heads and layers; it is no explanation of the answer (it
does not depend on the question: the visual tokens are made before the question is read).
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from PIL import Image, ImageDraw

from data_prep.io import open_dataset
from data_prep.picture import PATCH_SIDE, Picture
from data_prep.schema import CROP_SIDE, Cell
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import decode_image
from pbs_jax.data.slide_features import SlideEncoder
from pbs_jax.decode.answer import Answerer
from pbs_jax.decode.slide_answer import SlideAnswerer
from pbs_jax.models.layers import split_heads

TOP = 8  # places that are outlined
EVEN = 1.1  # the highest attention over the mean, below which a picture of it shows nothing
FINE = 64  # patches of a slide, those read most, that are looked into: each goes through the backbone once more
HEAT_SIDE = 448  # px of a cell's overlay
CLASS_COLOURS = {
    "Neutrophil": "#5b3f9e", "Lymphocyte": "#0b8a8a", "Monocyte": "#d5702a", "Eosinophil": "#b8336a", "Basophil": "#3a6fc4",
    "Others": "#7a7f1e", "Artifact": "#6a6475", "": "#23202b",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Evidence:
    """`overlay`: JPEG; `top`: the places looked at most, (left, top, side, share of the attention) in the picture's pixels
    (a cell's: of its crop); `caption`: one sentence."""

    overlay: bytes
    top: list[tuple[int, int, int, float]]
    caption: str


def of_cell(answerer: Answerer, cell: Cell) -> Evidence:
    """The Q-Former's attention over a cell's patch tokens, over its crop."""
    pixels = decode_image(cell.image, answerer.image_side)
    names = ("backbone", "qformer")
    graphs, params = tuple(answerer.graphs[n] for n in names), tuple(answerer.params[n] for n in names)
    shares = np.asarray(qformer_attention(graphs, params, pixels[None])[0])[0, 1:]  # without the class token
    side = round(len(shares) ** 0.5)
    grid = (shares / max(shares.sum(), 1e-9)).reshape(side, side)
    image = Image.fromarray(pixels).resize((HEAT_SIDE, HEAT_SIDE), Image.Resampling.LANCZOS)
    step = CROP_SIDE / side
    ranked = np.argsort(-grid.ravel(), kind="stable")[:TOP]
    top = [(round(k % side * step), round(k // side * step), round(step), float(grid.ravel()[k])) for k in ranked]
    return Evidence(_jpeg(_heat(image, grid)), top, "attention of the Q-Former's queries over the cell")


@dataclasses.dataclass(frozen=True)
class SlideAttention:
    """`corners` int32[P, 2] (left, top) of the patches read, `shares` float32[P, G, G] of the attention on their places."""

    corners: np.ndarray
    shares: np.ndarray

    @property
    def side(self) -> int:
        """px of a place."""
        return PATCH_SIDE // self.shares.shape[1]

    @property
    def order(self) -> np.ndarray:
        """Numbers of all places, those read most first."""
        return np.argsort(-self.shares.ravel(), kind="stable")

    def places(self) -> list[tuple[int, int, float]]:
        """(left, top, share) of every place, in `order`."""
        grid = np.arange(self.shares.shape[1]) * self.side
        left, top = (self.corners[:, axis, None, None] + offset for axis, offset in ((0, grid), (1, grid[:, None])))
        left, top, shares = (np.broadcast_to(part, self.shares.shape).ravel() for part in (left, top, self.shares))
        return [(int(left[k]), int(top[k]), float(shares[k])) for k in self.order]

    def on(self, boxes: Sequence[Sequence[int]]) -> np.ndarray:
        """The covered part of every place, float[P, G, G]; boxes (left, top, right, bottom) in the slide's pixels."""
        grid, parts = self.shares.shape[1], []
        for x, y in self.corners:
            patch = np.zeros((PATCH_SIDE, PATCH_SIDE), bool)
            for left, top, right, bottom in boxes:
                patch[max(top - y, 0) : max(bottom - y, 0), max(left - x, 0) : max(right - x, 0)] = True
            parts.append(patch.reshape(grid, self.side, grid, self.side).mean((1, 3)))
        return np.stack(parts)


def slide_attention(answerer: SlideAnswerer, bag: Any, folder: Path, encoder: SlideEncoder) -> SlideAttention:
    """Attention over the patches of `bag`; within the FINE that are read most as phase 2 reads them, else even.

    folder: a slide job's, whose patches the bag is of; encoder: what made its features (token means read a patch evenly).
    """
    graph, params = answerer.graphs["slide_perceiver"], answerer.params["slide_perceiver"]
    weights = np.asarray(
        perceiver_attention(graph, params, np.asarray(bag.features, np.float32)[None], bag.mask[None])
    )[0]
    real = np.flatnonzero(bag.mask)
    corners, weights = np.asarray(bag.coords)[real], weights[real]
    if encoder.perceiver is None:
        return SlideAttention(corners, weights[:, None, None])
    most = np.argsort(-weights, kind="stable")[:FINE]
    wanted = {tuple(corner): k for k, corner in enumerate(corners[most].tolist())}
    rows: list[Any] = [None] * len(most)
    for row in open_dataset(folder / "patches", "test"):
        if (row["x"], row["y"]) in wanted:
            rows[wanted[row["x"], row["y"]]] = row
    tokens = np.stack(list(encoder.patches(rows)))
    read = perceiver_attention(*encoder.perceiver, tokens, np.ones(tokens.shape[:2], bool))
    within = encoder.patches.places(np.asarray(read))
    shares = np.broadcast_to(weights[:, None, None] / within[0].size, (len(weights), *within.shape[1:])).copy()
    shares[most] = weights[most, None, None] * within
    return SlideAttention(corners, shares)


def of_slide(attention: SlideAttention, picture: Picture) -> Evidence:
    """The attention over a slide on its overview; the TOP places are outlined."""
    image = Image.open(io.BytesIO(picture.overview)).convert("RGBA")
    layer = Image.new("RGBA", image.size, (0, 0, 0, 0))
    draw = ImageDraw.Draw(layer)
    places = attention.places()
    most = max(places[0][2], 1e-9)
    for x, y, share in places:
        draw.rectangle(_square(x, y, attention.side, picture.factor), fill=(255, 140, 0, round(150 * share / most)))
    for x, y, _ in places[:TOP]:
        draw.rectangle(_square(x, y, attention.side, picture.factor), outline=(190, 20, 60, 255), width=3)
    top = [(x, y, attention.side, share) for x, y, share in places[:TOP]]
    caption = f"the {len(top)} of {len(places)} places of {attention.side} px with the highest attention"
    if most * len(places) < EVEN:
        caption += f"; it is nearly even ({most * len(places):.2f} times the mean at most), so these places say little"
    return Evidence(_jpeg(Image.alpha_composite(image, layer)), top, caption)


def boxes(picture: Picture) -> bytes:
    """JPEG of the overview with every white cell's box in its class's colour."""
    image = Image.open(io.BytesIO(picture.overview)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for cell in picture.cells:
        box = [side / picture.factor for side in (cell.bbox.left, cell.bbox.top, cell.bbox.right, cell.bbox.bottom)]
        draw.rectangle(box, outline=CLASS_COLOURS.get(cell.label, "#23202b"), width=3)
    return _jpeg(image)


def _square(x: int, y: int, side: int, factor: float) -> tuple[float, float, float, float]:
    return x / factor, y / factor, (x + side) / factor - 1, (y + side) / factor - 1


def _heat(image: Image.Image, grid: np.ndarray) -> Image.Image:
    """The picture, paler and greyer where nothing was read, orange where most was."""
    scaled = grid / max(float(grid.max()), 1e-9)
    soft = Image.fromarray((255 * scaled).astype(np.uint8)).resize(image.size, Image.Resampling.BICUBIC)
    weight = np.asarray(soft, np.float32)[..., None] / 255
    pixels = np.asarray(image, np.float32)
    pale = 0.55 * pixels.mean(-1, keepdims=True) + 0.45 * 235
    out = pale * (1 - weight) + (0.72 * pixels + 0.28 * np.array([255, 120, 0], np.float32)) * weight
    return Image.fromarray(out.round().astype(np.uint8))


def _jpeg(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.convert("RGB").save(out, "JPEG", quality=88)
    return out.getvalue()


def attention_weights(q: jax.Array, k: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean over queries and heads of softmax(q k / sqrt(hd)): q [B, T, H, hd], k [B, S, H, hd], mask bool[B, S] -> [B, S]."""
    logits = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if mask is not None:
        logits = jnp.where(mask[:, None, None], logits, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits, axis=-1).mean((1, 2))


@functools.partial(jax.jit, static_argnums=0)
def perceiver_attention(graph: Any, params: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
    """x [B, P, D], mask bool[B, P] -> float32[B, P], the mean over the blocks; a row sums to 1."""
    resampler = nnx.merge(graph, params)
    inputs = resampler.input_projection(x.astype(resampler.config.dtype))
    latents = jnp.broadcast_to(resampler.latents[...], (x.shape[0], *resampler.latents.shape)).astype(inputs.dtype)
    block_graph, blocks = nnx.split(resampler.blocks)
    dim, total = resampler.config.dim, jnp.zeros(mask.shape, jnp.float32)
    for i in range(resampler.config.depth):
        block = nnx.merge(block_graph, jax.tree.map(lambda leaf, i=i: leaf[i], blocks))
        q = split_heads(block.in_proj(block.query_norm(latents), slice(0, dim)), block.heads)
        k = split_heads(block.in_proj(block.input_norm(inputs), slice(dim, 2 * dim)), block.heads)
        total += attention_weights(q, k, mask)
        latents = block(latents, inputs, mask[:, None, :])
    return total / resampler.config.depth


@functools.partial(jax.jit, static_argnums=0)
def qformer_attention(
    graphs: tuple[Any, Any], params: tuple[Any, Any], pixels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """uint8[B, S, S, 3] -> float32[B, N], the queries' cross-attention over the backbone's tokens, mean over the layers,
    and the queries' outputs [B, Q, D], which are `QFormer.encode`'s."""
    vit, qformer = (nnx.merge(graph, tree) for graph, tree in zip(graphs, params, strict=True))
    config = qformer.config
    visual = vit(normalise(pixels))["x_prenorm"].astype(jnp.bfloat16).astype(config.dtype)
    normed = qformer.ln_vision(visual)
    mask = jnp.any(visual != 0, axis=-1)
    queries = jnp.broadcast_to(qformer.query_tokens[...], (len(pixels), config.queries, config.dim))
    x = qformer.embed_norm(queries.astype(config.dtype))
    (layer_graph, layers), (cross_graph, crosses) = nnx.split(qformer.layers), nnx.split(qformer.cross)
    total, none = jnp.zeros(mask.shape, jnp.float32), (None, None)
    for i in range(config.layers):
        layer = nnx.merge(layer_graph, jax.tree.map(lambda leaf, i=i: leaf[i], layers))
        x = layer.attention(x, *layer.attention.keys_values(x), None, none)
        if i % config.cross_attention_freq == 0:
            at = i // config.cross_attention_freq
            cross = nnx.merge(cross_graph, jax.tree.map(lambda leaf, at=at: leaf[at], crosses))
            k, v = cross.keys_values(normed)
            total += attention_weights(split_heads(cross.query(x), cross.heads), k, mask)
            x = cross(x, k, v, mask[:, None, :], none)
        x = layer.query_ffn(x, None)
    return total / (config.layers // config.cross_attention_freq), x
