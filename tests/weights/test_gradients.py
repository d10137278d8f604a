"""Every phase's own loss, differentiated: against PyTorch's autograd through transformers' models and the torch networks.

The torch networks are those that `test_export_torch` holds against the official numbers; the language models and the
Q-Former's contrast and matching are transformers' own classes. Phase 1's captioning loss and its sum are golden
(`test_qformer_parity`). Tolerance: 1e-4 of the largest entry of the whole tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from data_prep.prompts import IMAGE_PAD, branch_texts
from data_prep.schema import QA, shown_options
from data_prep.tokens import load_tokenizer, pack, prefix_tokens
from pbs_jax.bench.records import load_questions
from pbs_jax.config import load
from pbs_jax.data.augment import normalise
from pbs_jax.data.examples import CellImages, QuestionBins
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.models.qformer_losses import phase1_losses
from pbs_jax.models.sizes import Size
from pbs_jax.train import phase0_backbone, phase0_language_model
from pbs_jax.train import phase2_cell_patch_alignment as phase2
from pbs_jax.train import phase3_cell_qa as phase3
from pbs_jax.train import phase4_slide_qa as phase4
from pbs_jax.train.phase import definition
from pbs_jax.weights.convert import to_torch
from pbs_jax.weights.export import phase_tables, torch_tensors
from pbs_jax.weights.importers import blip2
from pbs_jax.weights.tables import Table, decoder_table
from pbs_jax.weights.tables_hf import blip2_hf_table
from tests.models.golden import run, tree_close
from tests.models.references import tiny_blip2
from tests.weights.conftest import SLIDE_DIM, Chain, random_tree, tiny_size

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.torch]
F = torch.nn.functional


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    torch.manual_seed(0)
    with jax.default_matmul_precision("highest"):
        yield


def same_gradients(ours: Mapping[str, np.ndarray], theirs: Mapping[str, Any]) -> None:
    """Both by torch name; a parameter that torch never reached has no gradient there and a zero one here."""
    expected = {n: np.zeros(ours[n].shape, np.float32) if g is None else g.numpy() for n, g in theirs.items()}
    tree_close(ours, expected)


def differentiated(loss: Any, trees: Any, frozen: Any, batch: Any, tables: Mapping[str, Table]) -> Any:
    """(value, gradients by torch name) of a phase's loss, without dropout."""
    (value, _), grads = run(jax.value_and_grad(lambda t, f, b: loss(t, f, b, None), has_aux=True), trees, frozen, batch)
    exported = {row.torch for table in tables.values() for row in table.rows if row.export_only}
    return float(value), {n: g for n, g in torch_tensors(grads, tables).items() if n not in exported}


def filled(module: Any, tensors: Mapping[str, np.ndarray], prefix: str) -> Any:
    """The module with the tensors under `prefix`, every one of them, ready to be differentiated."""
    own = {n.removeprefix(prefix): torch.from_numpy(v.copy()) for n, v in tensors.items() if n.startswith(prefix)}
    module.load_state_dict(own, strict=True)
    return module.requires_grad_(True)


def collected(modules: Mapping[str, Any], skip: Sequence[str] = ()) -> dict[str, Any]:
    return {
        f"{prefix}{name}": value.grad
        for prefix, module in modules.items()
        for name, value in module.named_parameters()
        if name not in skip
    }


UNREAD = ("Qformer.cls.predictions.bias", "mask_token")  # the release has them, no pass reads them


# ---- phase 0a -------------------------------------------------------------------------------------------------------


def test_phase_0a(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    from pbs_jax.weights.torch_model import Head, ViT

    monkeypatch.setattr(phase0_backbone, "get_size", tiny_size)
    # So few made cells have no val split.
    monkeypatch.setattr(phase0_backbone, "CellImages", lambda root, split, side: CellImages(root, "train", side))
    phase_config = load("phase0_backbone", [f"--config.data.root={chain.root}"])
    phase = phase0_backbone.build(phase_config)
    trees = {name: chain.params[name] for name in ("backbone", "head")}
    rows = [phase.examples[k] for k in range(6)]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    tables = phase_tables("backbone", chain.size)
    value, ours = differentiated(phase.loss, trees, {}, batch, tables)

    tensors = torch_tensors(trees, tables)
    vit = filled(ViT(SimpleNamespace(**dataclasses.asdict(chain.size.vit))), _without(tensors, "head."), "")
    head = filled(Head(64, 32, sum(phase0_backbone.OUTPUTS.values())), tensors, "head.")
    tokens = vit(torch.tensor(np.asarray(normalise(batch["image"]))).permute(0, 3, 1, 2))
    logits = head(tokens).split(list(phase0_backbone.OUTPUTS.values()), -1)
    golds = [batch["label"], *batch["attributes"].T]
    losses = [_smoothed(part, torch.tensor(gold)) for part, gold in zip(logits, golds, strict=True)]
    loss = losses[0] + phase_config.attribute_weight * sum(losses[1:]) / 11
    loss.backward()
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    same_gradients(ours, collected({"": vit, "head.": head}))


def _smoothed(logits: Any, gold: Any) -> Any:
    known = gold >= 0
    if not known.any():
        return logits.sum() * 0
    return F.cross_entropy(logits[known], gold[known].long(), label_smoothing=0.1)


def _without(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in tensors.items() if not name.startswith(prefix)}


# ---- language models ------------------------------------------------------------------------------------------------


def language_model(size: Size, tree: Any, kind: str) -> Any:
    """transformers' own model with our weights."""
    shape = size.decoder
    text = {
        "vocab_size": shape.vocab, "hidden_size": shape.dim, "intermediate_size": shape.ffn_dim, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": shape.rms_eps,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if kind == "llama":
        config = transformers.LlamaConfig(**text, rope_parameters=rope, tie_word_embeddings=shape.tied)
        model, prefix = transformers.LlamaForCausalLM(config), "model."
    else:
        rope["mrope_section"] = list(shape.mrope_section)
        vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": shape.dim}
        config = transformers.Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=vision, tie_word_embeddings=shape.tied
        )
        model, prefix = transformers.Qwen2_5_VLForConditionalGeneration(config), "model.language_model."
    tensors = {n: torch.from_numpy(v) for n, v in to_torch(tree, decoder_table(shape, prefix)).items()}
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys and all("visual" in n or n == "lm_head.weight" for n in left.missing_keys)
    model.tie_weights()
    return model.eval()


def asked_by(model: Any, tokenizer: Any, asked: Sequence[QA], visual: Sequence[Any]) -> Any:
    """The model's own loss, one question a row, padded on the right; visual [32, D] fills each row's slots."""
    slot, rows = tokenizer.id(IMAGE_PAD), []
    for qa in asked:
        prompt, target = map(tokenizer.encode, branch_texts(qa, shown_options(qa)))
        start = prefix_tokens(tokenizer)
        rows.append(([*start, *prompt, *target], len(start) + len(prompt)))
    length = max(len(ids) for ids, _ in rows)
    ids, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), -100)
    mask, positions = torch.zeros_like(ids), torch.ones(3, len(rows), length, dtype=torch.long)
    for r, (tokens, known) in enumerate(rows):
        ids[r, : len(tokens)], mask[r, : len(tokens)] = torch.tensor(tokens), 1
        labels[r, known : len(tokens)] = torch.tensor(tokens[known:])
        at = tokens.index(slot)  # a strip of 32: t and h stand still, text goes on after it
        count = torch.arange(len(tokens))
        positions[2, r, : len(tokens)] = count
        positions[:2, r, : len(tokens)] = torch.where((count >= at) & (count < at + 32), at, count)
    embeds = model.get_input_embeddings()(ids)
    embeds = embeds.masked_scatter((ids == slot)[..., None], torch.cat(list(visual)))
    where = positions[0] if isinstance(model, transformers.LlamaForCausalLM) else positions
    return model(inputs_embeds=embeds, attention_mask=mask, position_ids=where, labels=labels).loss


class Bins(QuestionBins):
    """Packed questions, in memory, about images whose `visual` is given."""

    def __init__(self, records: Sequence[Any], visual: Mapping[str, np.ndarray]) -> None:
        self._set(records, visual)


def packed(chain: Chain, asked: Sequence[QA], visual: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    tokenizer = load_tokenizer(chain.root / "tokenizer")
    bins = Bins(list(pack(asked, tokenizer, bin_length=256, too_long=[])), visual)
    return {name: np.stack([row[name] for row in bins]) for name in bins[0]}


@pytest.fixture(scope="module")
def asked(chain: Chain) -> list[QA]:
    """Up to four questions of each type about each of two cells."""
    chosen: dict[str, dict[str, list[QA]]] = {}
    for qa in load_questions(chain.root, "test").items:
        chosen.setdefault(qa.image_id, {}).setdefault(qa.question_type, []).append(qa)
    return [qa for kinds in list(chosen.values())[:2] for questions in kinds.values() for qa in questions[:4]]


def rounded(seed: int, *shape: int) -> np.ndarray:
    """Random features that bfloat16 holds."""
    return np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("kind", ["qwen", "llama"])
def test_phase_3(chain: Chain, asked: list[QA], kind: str) -> None:
    """Shared-prefix bins through the frozen language model, and transformers with one question a row."""
    from pbs_jax.weights.torch_model import QFormer as TorchQFormer

    size, tree = chain.size, chain.params["language_model"]
    if kind == "llama":
        size = dataclasses.replace(
            size, decoder=dataclasses.replace(size.decoder, mrope_section=None, qkv_bias=False, rms_eps=1e-5)
        )
        tree = random_tree(phase3.networks(size)["language_model"], 9)
    images = list(dict.fromkeys(qa.image_id for qa in asked))
    features = {name: rounded(k, 5, size.vit.dim) for k, name in enumerate(images)}
    trees = {name: chain.params[name] for name in ("qformer", "projector")}
    tables = phase_tables("cell_qa", size)
    tokenizer = load_tokenizer(chain.root / "tokenizer")
    loss = phase3.make_loss(size, tokenizer.id(IMAGE_PAD), "token")
    value, ours = differentiated(loss, trees, {"language_model": tree}, packed(chain, asked, features), tables)

    tensors, encoder = torch_tensors(trees, tables), "model.visual.encoder.qformer."
    qformer = filled(TorchQFormer(SimpleNamespace(**dataclasses.asdict(size.qformer))), tensors, encoder)
    projector = filled(torch.nn.Linear(size.qformer.dim, size.decoder.dim), tensors, "model.visual.projector.")
    shown = projector(qformer(torch.from_numpy(np.stack([features[name] for name in images]).astype(np.float32))))
    model = language_model(size, tree, kind).requires_grad_(False)
    theirs = asked_by(model, tokenizer, asked, [shown[images.index(qa.image_id)] for qa in asked])
    theirs.backward()
    assert value == pytest.approx(float(theirs.detach()), rel=1e-5)
    same_gradients(ours, collected({encoder: qformer, "model.visual.projector.": projector}, UNREAD))


def test_phase_4(chain: Chain, asked: list[QA]) -> None:
    """Two bags, one of them padded: slide Perceiver and projector."""
    from pbs_jax.weights.torch_model import Perceiver

    images = list(dict.fromkeys(qa.image_id for qa in asked))
    bags = {name: rounded(k, 9, SLIDE_DIM) for k, name in enumerate(images)}
    masks = {name: np.arange(9) < count for name, count in zip(images, (9, 4), strict=True)}
    batch = packed(chain, asked, bags) | {"mask": packed(chain, asked, masks)["visual"]}
    trees = {name: chain.params[name] for name in ("slide_perceiver", "projector")}
    tables, tokenizer = phase_tables("slide_qa", chain.size), load_tokenizer(chain.root / "tokenizer")
    config = SimpleNamespace(weighting="token", patch_dropout=0.0)
    loss = phase4.make_loss(chain.size, SLIDE_DIM, tokenizer.id(IMAGE_PAD), config)
    tree = chain.params["language_model"]
    value, ours = differentiated(loss, trees, {"language_model": tree}, batch, tables)

    tensors, encoder = torch_tensors(trees, tables), "model.visual.encoder.resampler."
    shape = SimpleNamespace(**dataclasses.asdict(chain.size.slide_perceiver(SLIDE_DIM)))
    perceiver = filled(Perceiver(shape), tensors, encoder)
    projector = filled(torch.nn.Linear(shape.dim, chain.size.decoder.dim), tensors, "model.visual.projector.")
    bag, mask = (torch.from_numpy(np.stack([part[n] for n in images])) for part in (_float(bags), masks))
    shown = projector(perceiver(bag, mask))
    model = language_model(chain.size, tree, "qwen").requires_grad_(False)
    theirs = asked_by(model, tokenizer, asked, [shown[images.index(qa.image_id)] for qa in asked])
    theirs.backward()
    assert value == pytest.approx(float(theirs.detach()), rel=1e-5)
    same_gradients(ours, collected({encoder: perceiver, "model.visual.projector.": projector}))


def _float(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32) for name, value in arrays.items()}


def test_phase_0b(chain: Chain, asked: list[QA], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole decoder: its embedding is read in the slot, in the text and as the head."""
    tokenizer = load_tokenizer(chain.root / "tokenizer")
    images = list(dict.fromkeys(qa.image_id for qa in asked))
    slots = {name: np.arange(32, dtype=np.int32) * (k + 3) + 40 for k, name in enumerate(images)}
    bins = Bins(list(pack(asked, tokenizer, bin_length=256, too_long=[])), slots)
    bins.content_id = ""
    monkeypatch.setattr(phase0_language_model, "get_size", tiny_size)
    monkeypatch.setattr(phase0_language_model, "_lesson", lambda *args: bins)
    config = load("phase0_language_model", [f"--config.data.root={chain.root}", "--config.weighting=token"])
    phase = phase0_language_model.build(config)
    trees, tables = {"language_model": chain.params["language_model"]}, phase_tables("language_model", chain.size)
    value, ours = differentiated(phase.loss, trees, {}, packed(chain, asked, slots), tables)

    model = language_model(chain.size, trees["language_model"], "qwen")
    embed, mark = model.get_input_embeddings(), torch.tensor(tokenizer.id(IMAGE_PAD))
    shown = {name: embed(torch.from_numpy(ids).long()) + config.slot_mark * embed(mark) for name, ids in slots.items()}
    theirs = asked_by(model, tokenizer, asked, [shown[qa.image_id] for qa in asked])
    theirs.backward()
    assert value == pytest.approx(float(theirs.detach()), rel=1e-5)
    named = {name.replace("language_model.", ""): p.grad for name, p in model.named_parameters()}
    same_gradients(ours, {name: named[name] for name in ours})


# ---- phase 2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "target"), [("paper", "fixed"), ("official", "trained")])
def test_phase_2(chain: Chain, kind: str, target: str) -> None:
    from pbs_jax.weights.torch_model import Perceiver
    from pbs_jax.weights.torch_model import QFormer as TorchQFormer

    size = chain.size
    trees = {name: chain.params[name] for name in ("patch_perceiver", "alignment")}
    batch = {"cell": rounded(0, 3, 5, size.vit.dim), "patch": rounded(1, 3, 9, size.vit.dim)}
    config = SimpleNamespace(alignment=kind, target=target, global_weight=1.0, local_weight=0.5)
    tables = phase_tables("cell_patch_alignment", size)
    frozen = {"qformer": chain.params["qformer"]}
    value, ours = differentiated(phase2.make_loss(size, config), trees, frozen, batch, tables)

    tensors = torch_tensors(trees, tables)
    held = torch_tensors(frozen, phase_tables("cell_representation", size))
    qformer = filled(TorchQFormer(SimpleNamespace(**dataclasses.asdict(size.qformer))), held, "qformer.")
    encoder = "patch_encoder.resampler."
    perceiver = filled(Perceiver(SimpleNamespace(**dataclasses.asdict(size.patch_perceiver))), tensors, encoder)
    sides = {f"{name}_projection.": torch.nn.Linear(32, size.qformer.projection) for name in ("cell", "patch")}
    for name, module in sides.items():
        filled(module, tensors, name)
    sides["cell_projection."].requires_grad_(target == "trained")
    cell, patch = (torch.from_numpy(batch[name].astype(np.float32)) for name in ("cell", "patch"))
    c = sides["cell_projection."](qformer(cell).detach())
    p = sides["patch_projection."](perceiver(patch, torch.ones(patch.shape[:2], dtype=torch.bool)))
    if kind == "paper":
        apart, logits = torch.linalg.vector_norm(p.mean(1) - c.mean(1), dim=-1).mean(), p @ c.mT
    else:
        apart = 1 - F.cosine_similarity(c.mean(1), p.mean(1)).mean()
        logits = F.normalize(c, dim=-1) @ F.normalize(p, dim=-1).mT
    goal = torch.arange(logits.shape[1]).expand(len(logits), -1)
    loss = apart + 0.5 * F.cross_entropy(logits.flatten(0, 1), goal.flatten())
    loss.backward()
    assert value == pytest.approx(float(loss.detach()), rel=1e-5)
    same_gradients(ours, collected({encoder: perceiver, **sides}))


# ---- phase 1 --------------------------------------------------------------------------------------------------------


def test_phase_1_contrast_and_matching(tmp_path: Any) -> None:
    """`Blip2ForImageTextRetrieval`'s parts under BLIP-2's two losses; it has no captioning head."""
    model = tiny_blip2()
    model.save_pretrained(tmp_path)
    done = blip2(tmp_path, "7b")
    shape = dataclasses.replace(QFormerConfig(**done.facts["qformer"]), pad_id=0)
    visual = torch.randn(3, 5, 24)
    ids = torch.tensor([[1, 7, 8, 9, 2], [1, 11, 2, 0, 0], [1, 12, 13, 2, 0]])
    image_for_text, text_for_image = torch.tensor([1, 2, 0]), torch.tensor([2, 0, 1])

    graph = definition(lambda rngs: QFormer(shape, rngs=rngs))
    temperature = jnp.asarray(0.31)

    def losses(tree: Any, visual: Any, ids: Any, *negatives: Any) -> Any:
        net = nnx.merge(graph, tree | {"temperature": temperature})
        found = phase1_losses(net, visual, ids, jax.random.key(0), negatives=negatives)
        return found["itc"] + found["itm"]

    tree = done.trees["qformer"]
    arrays = [jnp.asarray(part.numpy()) for part in (visual, ids, image_for_text, text_for_image)]
    value, grads = run(jax.value_and_grad(losses), tree, *arrays)
    ours = to_torch(grads, blip2_hf_table(shape))

    image = model.vision_model.post_layernorm(visual)
    mask = (ids != 0).long()
    queries = model.qformer(query_embeds=model.query_tokens.expand(3, -1, -1), encoder_hidden_states=image)[0]
    text = model.qformer(query_embeds=model.embeddings(input_ids=ids), query_length=0, attention_mask=mask)[0][:, 0]
    image_side = F.normalize(model.vision_projection(queries), dim=-1)
    text_side = F.normalize(model.text_projection(text), dim=-1)
    similarity = torch.einsum("iqp,tp->iqt", image_side, text_side).amax(1) / 0.31
    own = torch.arange(3)
    itc = sum(F.cross_entropy(s, own, label_smoothing=0.1) for s in (similarity, similarity.T)) / 2
    texts, images = torch.cat([own, own, text_for_image]), torch.cat([own, image_for_text, own])
    embedded = model.embeddings(input_ids=ids[texts], query_embeds=model.query_tokens.expand(9, -1, -1))
    seen = torch.cat([torch.ones(9, 5, dtype=torch.long), mask[texts]], 1)
    joint = model.qformer(
        query_embeds=embedded, query_length=5, attention_mask=seen, encoder_hidden_states=image[images]
    )[0]
    matching = model.itm_head(joint[:, :5]).mean(1)
    loss = itc + F.cross_entropy(matching, torch.cat([torch.ones(3), torch.zeros(6)]).long())
    loss.backward()
    assert float(value) == pytest.approx(float(loss.detach()), rel=1e-5)
    same_gradients(ours, {name: p.grad for name, p in model.named_parameters() if name in ours})
