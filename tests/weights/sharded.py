"""A synthetic sharded checkpoint streamed in a process of its own, its anonymous memory sampled; run as a script:

python -m tests.weights.sharded FOLDER MEBIBYTES   writes about so much, loads it, prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

LAYERS, DIM, FFN, VOCAB = 8, 512, 1024, 2048
MIB = 2**20


def write(folder: Path, mebibytes: int) -> dict[str, int]:
    """Eight shards of bfloat16 under Qwen2.5-VL's names, made wider until they are of the size; config.json beside."""
    width = max(1, round((mebibytes / 90) ** 0.5 * 4) / 4)
    dim, ffn, vocab = (int(width * side) // 64 * 64 for side in (DIM, FFN * 4, VOCAB * 4))
    text = {
        "vocab_size": vocab, "hidden_size": dim, "num_hidden_layers": LAYERS, "num_attention_heads": dim // 64,
        "num_key_value_heads": dim // 64, "intermediate_size": ffn, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "model_type": "qwen2_5_vl_text", "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "qwen2_5_vl", "tie_word_embeddings": False, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    shapes: list[dict[str, tuple[int, ...]]] = []
    for layer in range(LAYERS):
        names = {f"self_attn.{n}_proj.weight": (dim, dim) for n in "qkvo"}
        names |= {f"self_attn.{n}_proj.bias": (dim,) for n in "qkv"}
        names |= {
            "mlp.gate_proj.weight": (ffn, dim),
            "mlp.up_proj.weight": (ffn, dim),
            "mlp.down_proj.weight": (dim, ffn),
        }
        names |= {"input_layernorm.weight": (dim,), "post_attention_layernorm.weight": (dim,)}
        shapes.append({f"model.layers.{layer}.{name}": shape for name, shape in names.items()})
    shapes[0]["model.embed_tokens.weight"] = shapes[-1]["lm_head.weight"] = (vocab, dim)
    shapes[-1]["model.norm.weight"] = (dim,)
    weight_map, sizes = {}, {}
    for number, tensors in enumerate(shapes):
        file = folder / f"model-{number + 1:05d}-of-{LAYERS:05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, file.name)
        sizes[file.name] = _save(file, tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sizes


def _save(file: Path, tensors: dict[str, tuple[int, ...]]) -> int:
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with file.open("wb") as out:
        out.write(len(head).to_bytes(8, "little") + head)
        for number, shape in enumerate(tensors.values()):
            row = np.full(int(np.prod(shape)), number % 7 - 3, ml_dtypes.bfloat16)
            out.write(row.tobytes())
    return file.stat().st_size


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def main(folder: Path, mebibytes: int) -> None:
    if not (folder / "config.json").is_file():
        write(folder, mebibytes)
    import jax

    from pbs_jax.train import handover
    from pbs_jax.weights.importers import import_weights

    run = folder.parent / "run"
    import_weights("qwen2_5_vl", folder, run, size="7b")
    jax.block_until_ready(jax.numpy.zeros((8, 8)) @ jax.numpy.zeros((8, 8)))  # the runtime's own memory comes first
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    tree = jax.block_until_ready(handover.load(run, ["language_model"])["language_model"])
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    resident = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    found = {
        "checkpoint_mib": sum(files) // MIB,
        "largest_file_mib": max(files) / MIB,
        "resident_mib": resident / MIB,
        "peak_anonymous_over_start_mib": (peak - before) / MIB,
        "limit_mib": (1.2 * max(files) + resident) / MIB,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
