"""Tiny random models of the real transformers classes, with processors and byte-level tokenizers, built in-process.

`build(family, folder)` saves one as from_pretrained reads it. Templates follow each family's turn markers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WIDTH = 32
CONTENT = (
    "{% for m in messages %}BEFORE{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}AFTER{% endfor %}"
)


def template(before: str, image: str, after: str, prompt: str = "") -> str:
    """A chat template with the given turn markers; `prompt` opens the answer."""
    text = CONTENT.replace("BEFORE", before).replace("IMAGE", image).replace("AFTER", after)
    return text + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


def tokenizer(*special: str, **named: str) -> tf.PreTrainedTokenizerFast:
    """One token a byte, plus <s>, </s>, <pad> and the family's own; the named ones become attributes."""
    raw = Tokenizer(
        models.BPE(vocab={c: k for k, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=named
    )
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def text_config(tok: Any, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tok), "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "head_dim": 8,
        "bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id,
        "tie_word_embeddings": False,
    } | more  # fmt: skip


def qwen(version: str) -> tuple[Any, Any]:
    tok = tokenizer(
        "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
        image_token="<|image_pad|>", video_token="<|video_pad|>",
    )  # fmt: skip
    ids = {f"{n}_token_id": tok.convert_tokens_to_ids(f"<|{n}|>") for n in ("vision_start", "vision_end")}
    ids |= {"image_token_id": tok.image_token_id, "video_token_id": tok.video_token_id}
    rope = {
        "rope_parameters": {"type": "default", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    }
    if version == "2":
        vision: dict[str, Any] = {"depth": 2, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 4, "mlp_ratio": 2}
        config = tf.Qwen2VLConfig(text_config=text_config(tok, **rope), vision_config=vision, **ids)
        model, processor = tf.Qwen2VLForConditionalGeneration(config), tf.Qwen2VLProcessor
    else:
        vision = {"depth": 2, "hidden_size": WIDTH, "out_hidden_size": WIDTH, "num_heads": 4, "intermediate_size": 64,
                  "fullatt_block_indexes": [1]}  # fmt: skip
        config = tf.Qwen2_5_VLConfig(text_config=text_config(tok, **rope), vision_config=vision, **ids)
        model, processor = tf.Qwen2_5_VLForConditionalGeneration(config), tf.Qwen2_5_VLProcessor
    images = tf.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112)
    chat = template(
        "<|im_start|>user\n", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>\n", "<|im_start|>assistant\n"
    )
    return model, processor(images, tok, tf.Qwen2VLVideoProcessor(), chat_template=chat)


def internvl() -> tuple[Any, Any]:
    tok = tokenizer(
        "<|im_start|>", "<|im_end|>", start_image_token="<img>", end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>", video_token="<video>",
    )  # fmt: skip
    side = 56
    config = tf.InternVLConfig(
        text_config=text_config(tok, model_type="qwen3"),
        vision_config={"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                       "image_size": [side, side], "patch_size": [14, 14]},
        image_token_id=tok.context_image_token_id, image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    images = tf.GotOcr2ImageProcessor(size={"height": side, "width": side}, crop_to_patches=True, max_patches=4)
    chat = template("<|im_start|>user\n", "<IMG_CONTEXT>\n", "<|im_end|>\n", "<|im_start|>assistant\n")
    processor = tf.InternVLProcessor(images, tok, tf.InternVLVideoProcessor(), image_seq_length=4, chat_template=chat)
    return tf.InternVLForConditionalGeneration(config), processor


def idefics3() -> tuple[Any, Any]:
    grid = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tok = tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *grid)
    config = tf.Idefics3Config(
        text_config=text_config(tok, model_type="llama"),
        vision_config={"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                       "image_size": 56, "patch_size": 14},
        image_token_id=tok.convert_tokens_to_ids("<image>"), scale_factor=2, pad_token_id=tok.pad_token_id,
    )  # fmt: skip
    images = tf.Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    chat = "<s>" + template("User:", "<image>", "<end_of_utterance>\n", "Assistant:")
    return tf.Idefics3ForConditionalGeneration(config), tf.Idefics3Processor(
        images, tok, image_seq_len=4, chat_template=chat
    )


def deepseek() -> tuple[Any, Any]:
    tok = tokenizer(image_token="<image_placeholder>")
    common = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tf.DeepseekVLHybridConfig(
        text_config=text_config(tok, model_type="llama"),
        vision_config=common | {"model_type": "siglip_vision_model", "intermediate_size": 64, "image_size": 32,
                                "patch_size": 8, "vision_use_head": False},
        high_res_vision_config=common | {"model_type": "sam_vision_model", "output_channels": 16, "image_size": 128,
                                         "patch_size": 16, "mlp_dim": 64, "global_attn_indexes": [1], "window_size": 4},
        image_token_id=tok.image_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    images = tf.DeepseekVLHybridImageProcessor(
        size={"height": 32, "width": 32}, high_res_size={"height": 128, "width": 128}
    )
    chat = template("User: ", "<image_placeholder>", "\n\n", "Assistant:")
    processor = tf.DeepseekVLHybridProcessor(images, tok, chat, num_image_tokens=16)
    return tf.DeepseekVLHybridForConditionalGeneration(config), processor


def llava(base: str) -> tuple[Any, Any]:
    tok = tokenizer(image_token="<image>")
    config = tf.LlavaNextConfig(
        text_config=text_config(tok, model_type={"mistral": "mistral", "vicuna": "llama"}[base]),
        vision_config={"model_type": "clip_vision_model", "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
                       "intermediate_size": 64, "image_size": 56, "patch_size": 14, "projection_dim": 32},
        image_token_index=tok.image_token_id, image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]], image_seq_length=16,
    )  # fmt: skip
    images = tf.LlavaNextImageProcessor(
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]],
    )
    chat = {
        "mistral": template("[INST] ", "<image>\n", " [/INST]"),
        "vicuna": "A chat. " + template("USER: ", "<image>\n", " ", "ASSISTANT:"),
    }[base]
    processor = tf.LlavaNextProcessor(
        images,
        tok,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=chat,
        num_additional_image_tokens=1,
    )
    return tf.LlavaNextForConditionalGeneration(config), processor


def blip2() -> tuple[Any, Any]:
    tok = tokenizer("<image>")
    text = {"model_type": "opt", "vocab_size": len(tok), "hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": False,
            "bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id}  # fmt: skip
    config = tf.Blip2Config(
        vision_config={"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                       "image_size": 56, "patch_size": 14, "initializer_range": 0.02},
        qformer_config={"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                        "encoder_hidden_size": WIDTH, "vocab_size": 100},
        text_config=text, num_query_tokens=8, image_token_index=tok.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = tf.BlipImageProcessor(size={"height": 56, "width": 56})
    return tf.Blip2ForConditionalGeneration(config), tf.Blip2Processor(images, tok, num_query_tokens=8)


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "internvl": internvl,
    "idefics3": idefics3,
    "qwen2_vl": lambda: qwen("2"),
    "qwen2_5_vl": lambda: qwen("2.5"),
    "deepseek_vl_hybrid": deepseek,
    "llava_next_mistral": lambda: llava("mistral"),
    "llava_next_vicuna": lambda: llava("vicuna"),
    "blip2": blip2,
}


def build(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    model, processor = FAMILIES[family]()
    for weight in model.parameters():  # at the usual scale a random model repeats itself whatever it is shown
        if weight.ndim > 1:
            weight.data *= 8
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
