"""Small models of transformers' own classes, which ours are compared with. torch is imported when one is made."""

from __future__ import annotations

from typing import Any


def spread(model: Any) -> Any:
    """Weights as uneven as trained ones, so that a missing norm or a swap shows; evaluation mode."""
    import torch

    for name, value in model.named_parameters():
        if value.ndim < 2 or "layer_scale" in name:
            value.data = 1 + 0.3 * torch.randn_like(value) if "weight" in name else 0.3 * torch.randn_like(value)
        else:
            value.data = torch.randn_like(value) * (0.7 if "embed" in name else 1.2 / value.shape[-1] ** 0.5)
    return model.eval()


def tiny_blip2() -> Any:
    """`Blip2ForImageTextRetrieval` with 5 queries."""
    import transformers

    q = transformers.Blip2QFormerConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, vocab_size=50,
        encoder_hidden_size=24, max_position_embeddings=20, use_qformer_text_input=True, pad_token_id=0,
    )  # fmt: skip
    v = transformers.Blip2VisionConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14
    )
    config = transformers.Blip2Config(
        vision_config=v.to_dict(), qformer_config=q.to_dict(), num_query_tokens=5, image_text_hidden_size=12
    )
    return spread(transformers.Blip2ForImageTextRetrieval(config))
