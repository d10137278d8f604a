"""Published checkpoints in every spelling become the same parameters, and what does not fit is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.models.decoder import Decoder, DecoderConfig
from pbs_jax.models.qformer import QFormer, QFormerConfig
from pbs_jax.train import handover
from pbs_jax.train.state import leaves_by_name
from pbs_jax.weights.convert import to_flax, to_torch
from pbs_jax.weights.importers import abstract, bert, blip2, dinobloom, import_weights, language_model
from pbs_jax.weights.tables import decoder_table, qformer_table, vit_table
from pbs_jax.weights.tables_hf import bert_table, blip2_hf_table, blip2_table, dinov2_hf_table
from tests.models.golden import Golden
from tests.models.test_vit_parity import MLP, SWIGLU
from tests.weights.conftest import random_tree, rewritten

Tensors = dict[str, np.ndarray]
QFORMER = QFormerConfig.blip2(
    dim=16,
    layers=4,
    heads=2,
    ffn_dim=24,
    vocab=31,
    dec_id=30,
    max_positions=12,
    encoder_width=8,
    queries=3,
    projection=6,
)
LM = DecoderConfig(40, 16, 2, 4, 2, 4, 24, 1e6, mrope_section=(1, 1, 0), rms_eps=1e-5)


def same(one: Any, two: Any) -> None:
    one, two = leaves_by_name(one), leaves_by_name(two)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert np.array_equal(value, two[name]), name


def saved(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: np.array(value, order="C") for name, value in tensors.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def dinov2(shared: Path) -> Tensors:
    return Golden(shared, "dinov2_mlp").w


SPELLINGS = {
    "hub": lambda name: name,
    "trainer": lambda name: f"teacher.backbone.{name}",
    "backbone": lambda name: f"backbone.{name}",
    "distributed": lambda name: f"module.{name}",
    "chunked": lambda name: re.sub(r"^blocks\.(\d)\.", lambda m: f"blocks.{int(m[1]) // 2}.{m[1]}.", name),
    "weight": lambda name: name.replace("ls1.gamma", "ls1.weight").replace("ls2.gamma", "ls2.weight"),
    "lambda": lambda name: name.replace("ls1.gamma", "layer_scale1.lambda1").replace(
        "ls2.gamma", "layer_scale2.lambda1"
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_dinov2(dinov2: Tensors, tmp_path: Path, spelling: str) -> None:
    tensors = {SPELLINGS[spelling](name): value for name, value in dinov2.items()}
    tensors["dino_head.last_layer.weight"] = tensors["ibot_head.mlp.0.weight"] = np.zeros((2, 2), np.float32)
    done = dinobloom(saved(tmp_path / "x", tensors), "7b", heads=3)
    same(done.trees["backbone"], to_flax(dinov2, vit_table(MLP), done.trees["backbone"]))
    assert sorted(done.dropped) == ["dino_head.last_layer.weight", "ibot_head.mlp.0.weight"]
    shape = done.facts["vit"]
    assert (shape["dim"], shape["depth"], shape["heads"], shape["mlp_dim"]) == (48, 3, 3, 192)
    assert (shape["position_grid"], shape["interpolate_offset"]) == ((8, 8), 0.1)


@pytest.mark.parametrize("name", ["dinov2_mlp", "dinov2_swiglu"])
def test_hugging_face_and_timm(shared: Path, tmp_path: Path, name: str) -> None:
    config, hub = (MLP if name == "dinov2_mlp" else SWIGLU), Golden(shared, name).w
    tree = to_flax(hub, vit_table(config), dinobloom(saved(tmp_path / "hub", hub), "7b", heads=3).trees["backbone"])
    files = {
        "hf": to_torch(tree, dinov2_hf_table(config)),
        "timm": {n.replace("mlp.w12", "mlp.fc1").replace("mlp.w3", "mlp.fc2"): v for n, v in hub.items()},
    }
    del files["timm"]["mask_token"]  # timm drops it
    for kind, tensors in files.items():
        told = {"num_attention_heads": 3, "layer_norm_eps": 1e-6} if kind == "hf" else {}
        done = dinobloom(saved(tmp_path / kind, tensors, told), "7b", None if told else 3)
        same(done.trees["backbone"], tree)
        assert done.facts["vit"]["ffn"] == config.ffn


def test_a_table_of_518_pixels_is_told_by_its_rows(dinov2: Tensors, tmp_path: Path) -> None:
    for rows, grid in ((257, None), (1370, (37, 37))):
        tensors = dinov2 | {"pos_embed": np.zeros((1, rows, 48), np.float32)}
        done = dinobloom(saved(tmp_path / str(rows), tensors), "7b", heads=3, antialias=True)
        assert done.facts["vit"]["position_grid"] == grid and done.facts["vit"]["antialias"]
        assert done.trees["backbone"]["positions"].shape == (rows, 48)


def test_a_backbone_that_does_not_fit_is_refused(dinov2: Tensors, tmp_path: Path) -> None:
    unscaled = {name: value for name, value in dinov2.items() if ".ls1." not in name}
    with pytest.raises(
        DataError, match=r"blocks/ls1 \(3, 48\) needs tensor blocks\.0\.ls1\.gamma, which the file lacks"
    ):
        dinobloom(saved(tmp_path / "a", unscaled), "7b", heads=3)
    with pytest.raises(DataError, match="1 tensors have no place in the model, first register_tokens"):
        dinobloom(saved(tmp_path / "b", dinov2 | {"register_tokens": np.zeros((1, 4, 48), np.float32)}), "7b", heads=3)
    with pytest.raises(DataError, match=r"no DINOv2 naming: .* is not among conv1\.weight"):
        dinobloom(saved(tmp_path / "c", {"conv1.weight": np.zeros((2, 2), np.float32)}), "7b")
    twice = dinov2 | {"backbone.norm.bias": np.zeros(48, np.float32)}
    with pytest.raises(DataError, match=r"are both norm\.bias: the file holds two models"):
        dinobloom(saved(tmp_path / "d", twice), "7b", heads=3)


@pytest.fixture(scope="module")
def qformer() -> Any:
    return random_tree(lambda rngs: QFormer(QFORMER, rngs=rngs), 1)


@pytest.mark.slow
def test_blip2_in_both_spellings(qformer: Any, tmp_path: Path) -> None:
    lavis = to_torch(qformer, qformer_table(QFORMER, "")) | {"visual_encoder.cls_token": np.zeros(4, np.float32)}
    for keep in (False, True):
        done = blip2(saved(tmp_path / f"lavis{keep}", lavis), "7b", 2, ln_vision=keep)
        found = dict(done.trees["qformer"])
        if not keep:  # the official code makes this norm anew
            assert np.all(found.pop("ln_vision")["scale"] == 1) and "ln_vision/scale" in done.fresh
        same(found, {name: qformer[name] for name in found})
    hugging = to_torch(qformer, blip2_hf_table(QFORMER)) | {
        "vision_model.embeddings.class_embedding": np.zeros(4, np.float32)
    }
    done = blip2(saved(tmp_path / "hf", hugging, {"qformer_config": {"num_attention_heads": 2}}), "7b")
    own = {name: value for name, value in done.trees["qformer"].items() if name not in ("lm_head", "temperature")}
    same(own, {name: qformer[name] for name in own})
    assert done.facts["qformer"]["cross_attention_freq"] == 2 and done.dropped == (
        "vision_model.embeddings.class_embedding",
    )


@pytest.mark.slow
def test_bert_fills_the_text_half_and_copies_it_for_the_queries(qformer: Any, tmp_path: Path) -> None:
    tensors = to_torch(qformer, bert_table())
    words, bias = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
    tensors |= {words: tensors[words][:30], bias: tensors[bias][:30]}  # BERT has no [DEC]
    old = {_google(name): value for name, value in tensors.items()} | {
        "bert.pooler.dense.bias": np.zeros(16, np.float32)
    }
    done = bert(saved(tmp_path / "bert", old, {"num_attention_heads": 2}), "7b")
    tree = done.trees["qformer"]
    same(tree["layers"]["query_ffn"], tree["layers"]["text_ffn"])
    same(tree["layers"]["attention"], qformer["layers"]["attention"])
    assert np.array_equal(tree["words"][:30], tensors[words]) and tree["words"][30].any()
    assert np.array_equal(tree["lm_head"]["decoder"]["kernel"], tree["words"].T)
    heads = {"cross", "query_tokens", "temperature", "ln_vision", "vision_proj", "text_proj", "itm_head"}
    assert {name.split("/")[0] for name in done.fresh} == heads and done.dropped == ("bert.pooler.dense.bias",)


def _google(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def told(**changes: Any) -> dict[str, Any]:
    """config.json as transformers writes it for Qwen2.5-VL."""
    text = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 24, "rms_norm_eps": 1e-5, "hidden_act": "silu", "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]},
    }  # fmt: skip
    return {"model_type": "qwen2_5_vl", "tie_word_embeddings": False, "text_config": text} | changes


@pytest.mark.parametrize("layout", ["model.", "model.language_model."])
def test_both_layouts_of_qwen_load_from_where_they_lie(tmp_path: Path, layout: str) -> None:
    tree = random_tree(lambda rngs: Decoder(LM, rngs=rngs), 2)
    visual = {("model.visual." if "language" in layout else "visual.") + "merger.ln_q.weight": np.ones(3, np.float32)}
    folder = saved(tmp_path / "snapshot", to_torch(tree, decoder_table(LM, layout)) | visual, told())
    done = import_weights("qwen2_5_vl", folder, tmp_path / "run", size="small")
    assert done.linked and not (tmp_path / "run" / "checkpoints").exists() and len(done.dropped) == 1
    same(handover.load(tmp_path / "run", ["language_model"])["language_model"], tree)
    assert any(text.startswith("vocab 40 (size small: 49152)") for text in done.facts["differs"])
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"model\.safetensors is not the imported file"):
        handover.load(tmp_path / "run", ["language_model"])


def test_tied_and_separate_heads(tmp_path: Path) -> None:
    """The flag of config.json and the tensor of the file agree, or it stops (cases.md C08)."""
    tree = random_tree(lambda rngs: Decoder(LM, rngs=rngs), 3)
    tensors = to_torch(tree, decoder_table(LM))
    headless = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    copied = headless | {"lm_head.weight": headless["model.embed_tokens.weight"]}
    leaves = {}
    for tied, content in ((True, headless), (True, copied), (False, tensors)):
        folder = saved(tmp_path / f"{tied}{len(content)}", content, told(tie_word_embeddings=tied))
        leaves[tied] = leaves_by_name(language_model(folder, "small").trees)
    assert "language_model/lm_head/kernel" in leaves[False] and "language_model/lm_head/kernel" not in leaves[True]
    with pytest.raises(DataError, match=r"ties lm_head to the embedding, but lm_head\.weight differs"):
        language_model(saved(tmp_path / "differs", tensors, told(tie_word_embeddings=True)), "small")
    with pytest.raises(DataError, match=r"lm_head/kernel \(16, 40\) needs tensor lm_head\.weight"):
        language_model(saved(tmp_path / "lacks", headless, told()), "small")
    for wrong in ({"model_type": "mistral"}, {"use_sliding_window": True}):
        text = told()["text_config"] | wrong
        with pytest.raises(DataError, match="not supported"):
            language_model(saved(tmp_path / "x", tensors, told(text_config=text)), "small")


@pytest.mark.parametrize("family", ["hub", "hf", "blip2", "blip2_hf"])
def test_round_trips_of_the_published_layouts(shared: Path, qformer: Any, family: str) -> None:
    """torch -> flax -> torch and flax -> torch -> flax, bit by bit (the other families: test_convert)."""
    vit = to_flax(Golden(shared, "dinov2_swiglu").w, vit_table(SWIGLU), abstract_vit())
    tables = {
        "hub": (vit, vit_table(SWIGLU)),
        "hf": (vit, dinov2_hf_table(SWIGLU)),
        "blip2": (qformer, blip2_table(QFORMER)),
        "blip2_hf": (qformer, blip2_hf_table(QFORMER)),
    }
    tree, table = tables[family]
    tensors = to_torch(tree, table)
    back = to_flax(tensors, table, tree)
    same(back, tree)
    again = to_torch(back, table)
    assert tensors.keys() == again.keys() and all(np.array_equal(again[name], value) for name, value in tensors.items())


def abstract_vit() -> Any:
    from pbs_jax.models.vit import ViT

    return abstract(lambda: ViT(SWIGLU, rngs=nnx.Rngs(0)))


def test_a_phase_of_the_official_release_reads_back(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from pbs_jax.models.sizes import get_size
    from pbs_jax.weights import official
    from tests.models.test_qformer_parity import CONFIG

    golden = Golden(shared, "qformer").w
    folder = saved(tmp_path / "phase1", golden)
    monkeypatch.setattr(official, "get_size", lambda *args: dataclasses.replace(get_size("nano"), qformer=CONFIG))
    import_weights("official", folder, tmp_path / "run")
    content = handover.read(tmp_path / "run", ("cell_representation",))
    assert content["facts"]["imported"]["family"] == "official"
    tree = jax.tree.map(np.asarray, handover.load(tmp_path / "run", ["qformer"])["qformer"])
    back = to_torch(tree, qformer_table(CONFIG))
    assert {name for name in golden if not name.endswith("position_ids")} == set(back)
    assert len(flatten_dict(tree)) == len(content["trees"]["qformer"])
    with pytest.raises(DataError, match="is of no phase of PBS-VL"):
        import_weights("official", saved(tmp_path / "no", {"x": np.zeros(2, np.float32)}), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("family", ["dinobloom", "qwen2_5_vl", "blip2"])
def test_from_a_snapshot_to_a_verified_export_in_three_commands(
    shared: Path, qformer: Any, tmp_path: Path, family: str
) -> None:
    """import, export, verify; and a changed export does not verify."""
    if family == "dinobloom":
        folder = saved(tmp_path / "snapshot", Golden(shared, "dinov2_swiglu").w, {"num_attention_heads": 3})
    elif family == "blip2":
        heads = {"qformer_config": {"num_attention_heads": 2}}
        folder = saved(tmp_path / "snapshot", to_torch(qformer, blip2_hf_table(QFORMER)), heads)
    else:
        tree = random_tree(lambda rngs: Decoder(LM, rngs=rngs), 2)
        folder = saved(tmp_path / "snapshot", to_torch(tree, decoder_table(LM)), told())
    run, out = tmp_path / "run", tmp_path / "export"
    assert cli.main(["weights", "import", family, str(folder), "--out", str(run)]) == 0
    assert cli.main(["weights", "export", "--workdir", str(run), "--out", str(out)]) == 0
    assert cli.main(["weights", "verify", "--export", str(out)]) == 0
    name = {
        "dinobloom": "blocks.1.ls1.gamma",
        "qwen2_5_vl": "model.layers.1.mlp.up_proj.weight",
        "blip2": "qformer.Qformer.bert.encoder.layer.0.output_query.dense.weight",
    }[family]
    changed = rewritten(out, tmp_path / "changed", "model.safetensors", lambda t: t.update({name: t[name] * 1.1}))
    assert cli.main(["weights", "verify", "--export", str(changed)]) == 1
