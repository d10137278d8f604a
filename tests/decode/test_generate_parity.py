"""Greedy tokens equal transformers' `generate` of a tiny Qwen2.5-VL with visual tokens: alone, batched, padded, penalised."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pbs_jax.decode.generate import generate, read_prefix
from tests.models.test_hf_parity import IMAGE, STRIP, TEXT, decoder, exact, spread

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.torch]
__all__ = ["exact"]
HEAD = [5, 52, *[IMAGE] * STRIP, 53]
BRANCHES = ([6, 7], [8, 9, 10, 11, 12], [13], [14, 15, 16, 17, 18, 19, 20])
NEW = 24


@pytest.mark.parametrize("penalty", [1.0, 1.05])
def test_tokens_of_qwen2_5_vl(tmp_path: Path, penalty: float) -> None:
    text = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6}}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision | {"spatial_merge_size": 1}, image_token_id=IMAGE, video_token_id=51,
        vision_start_token_id=52, vision_end_token_id=53, tie_word_embeddings=False,
    )  # fmt: skip
    model = spread(transformers.Qwen2_5_VLForConditionalGeneration(config))
    model.save_pretrained(tmp_path)
    _, graph, tree = decoder(tmp_path)
    visual = np.random.default_rng(1).standard_normal((2, STRIP, 32), np.float32)
    owners = [0, 1, 1, 0]

    expected = []
    for branch, owner in zip(BRANCHES, owners, strict=True):
        ids = torch.tensor([[*HEAD, *branch]])
        kinds = (ids == IMAGE).long()
        images = transformers.modeling_outputs.BaseModelOutputWithPooling(
            pooler_output=(torch.from_numpy(visual[owner]),)
        )
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_encoder_outputs={"image": images},
            image_grid_thw=torch.tensor([[1, 1, STRIP]]), mm_token_type_ids=kinds, do_sample=False, max_new_tokens=NEW,
            repetition_penalty=penalty, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        row = out[0, ids.shape[1] :].tolist()
        expected.append(row[: row.index(2)] if 2 in row else row)
    assert len(set(map(tuple, expected))) > 1, "the cases must tell the images and questions apart"

    def ours(rows, images, **more):
        return generate(
            graph, tree, rows, images, pad_id=0, slot_id=IMAGE, stop_ids=(2,), max_new=NEW, penalty=penalty, **more
        )[0]

    full = [[*HEAD, *branch] for branch in BRANCHES]
    assert ours(full, jnp.asarray(visual[owners])) == expected
    assert [ours([row], jnp.asarray(visual[[o]]))[0] for row, o in zip(full, owners, strict=True)] == expected
    prefix = read_prefix(graph, tree, HEAD, jnp.asarray(visual), IMAGE)
    assert ours(BRANCHES, None, prefix=prefix, owners=owners) == expected
