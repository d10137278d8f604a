"""What every phase shares. A phase file overrides a few lines; nothing is copied.

The argument after the colon, as in `--config=phase3_cell_qa:size=7b,recipe=official`:
  size    nano (default) | small | 3b | 7b     DESIGN section 5; 3b: Qwen2.5-VL-3B in place of 7B
  recipe  paper (default) | official      official: the released code's epochs and batches
  debug   flag: a few steps of a few examples, to see a run end
Values are typed: write 1e-4 or 1.0 for a float. Any of them can be set with `--config.optimizer.lr=1e-4`.
"""

from __future__ import annotations

import difflib

from ml_collections import ConfigDict

SIZES = ("nano", "small", "3b", "7b")
FULL = ("3b", "7b")  # of published weights; the others are stand-ins
RECIPES = ("paper", "official")


def parse_arg(arg: str | None) -> tuple[str, str, bool]:
    """`key=value,...` -> (size, recipe, debug). Raises ValueError, one sentence, for a key or value that is unknown."""
    values = {"size": "nano", "recipe": "paper", "debug": "false"}
    choices = {"size": SIZES, "recipe": RECIPES, "debug": ("true", "false")}
    for item in filter(None, (arg or "").split(",")):
        key, _, value = item.partition("=")
        value = value or ("true" if key == "debug" else "")
        if key not in choices:
            near = difflib.get_close_matches(key, choices, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f'config argument "{key}" is unknown, the keys are {", ".join(choices)}{hint}')
        if value not in choices[key]:
            raise ValueError(f'config argument {key}="{value}" is not one of {", ".join(choices[key])}')
        values[key] = value
    return values["size"], values["recipe"], values["debug"] == "true"


def get_config(arg: str | None = None) -> ConfigDict:
    """Defaults of a run. Returns an unlocked ConfigDict, so that a phase file can add its own fields."""
    size, recipe, debug = parse_arg(arg)
    return ConfigDict(
        {
            "phase": "",  # set by the phase file
            "size": size,  # picks the model shapes; they are not spelt out here
            "recipe": recipe,
            "debug": debug,
            "seed": 42,  # initialisation, dropout, masking (official: 42)
            "data_seed": 42,  # order of examples; apart from `seed`, so that seeds can be compared on one order
            "data": {
                "root": "",  # what `pbs data run --out` wrote: cells, cell_qa_tokens, tokenizer, cell_features
                "features": "",  # the folder that `pbs data features --out` wrote; empty = under `root`
                "slides": "",  # phase 0b: a slide job's folder, whose questions are learnt beside those about cells
                "threads": 0,  # reading threads; 0 = `pbs_jax.data.order.reading_threads`
                "prefetch": 64,  # examples read ahead
            },
            # Finished phases to start from: their workdirs (each holds handover.json). Empty = this phase needs none.
            "init_from": {"backbone": "", "language_model": "", "qformer": "", "projector": ""},
            # Query tokens of phase 1's Q-Former and of phase 4's slide Perceiver, which are the tokens of the language model's
            # slot; phases 2 and 3 take phase 1's. 0 = 32, the paper's.
            "queries": 0,
            "words": "",  # phase 1: folder of a tokenizer for captions alone; small: nano's, a head 12 times smaller
            "int8": False,  # frozen language model with int8 kernels; see what it costs with `pbs perf int8`
            # What the backward pass computes again, for want of memory: "none", "dots" (all but matrix products), "full" (whole
            # layers); "" = as the size does (nano, small: none; 3b, 7b: full). `pbs compile --remat` finds the least that fits.
            "remat": "",
            "attention": "",  # "cudnn": the language model's by cuDNN's fused kernel, on GPUs at 3b and 7b (no GPU has run it here)
            "images_per_row": 1,  # of question bins: several fill rows better; 0 = one question a row, as the released code
            "weighting": "token",  # of answer losses: "token" (official, ForCausalLM's mean) or "answer" (each alike)
            "batch_size": 32,  # examples per step over all hosts
            "accumulate": 1,  # parts that a step's batch is worked off in, for want of memory; phases 0b, 3 and 4
            "steps": 1000,  # optimiser updates
            "epochs": 0,  # > 0: passes over the train split; `steps` is then computed from it
            "log_every": 10,  # steps between lines of metrics.jsonl
            "eval_every": 200,  # steps between evaluations on val; 0 = only at the end, -1 = after every pass over the train split
            # Ends a run after `patience` evaluations without a better metric ("auc"; "-loss": one that shall fall) and hands over
            # the best one's step; "" = off. `steps` is then the longest a run may take, and the schedule's length.
            "early_stopping": {"metric": "", "patience": 5},
            "save_every": 200,  # steps between Orbax checkpoints
            "profile_at": 0,  # > 0: this step and the next two are traced into workdir/profile, for TensorBoard or XProf
            "keep": 2,  # checkpoints kept; the last one is always among them
            # AdamW of the paper (section 4.2) and of the official trainer; cosine to 0 after a linear warm-up.
            "optimizer": {
                "name": "adamw",  # or "muon", for nets trained from scratch
                "lr": 5e-5,
                "weight_decay": 0.01,  # not on biases and norms
                "warmup_fraction": 0.1,  # of `steps`
                "clip": 1.0,  # global norm of the gradient
                "b1": 0.9,
                "b2": 0.999,
                "eps": 1e-8,
            },
            # Devices per axis; -1 = all that are left. At 7b the frozen weights are split over all of them.
            "mesh": {"data": 1, "fsdp": -1, "tensor": 1} if size in FULL else {"data": -1, "fsdp": 1, "tensor": 1},
        }
    )


def official(config: ConfigDict, *, epochs: int, batch_size: int) -> None:
    """Applies the released code's run length and optimiser when `recipe=official`."""
    if config.recipe == "official":
        config.epochs, config.batch_size = epochs, batch_size
        config.optimizer.name, config.optimizer.lr = "adamw", 5e-5
        config.images_per_row, config.eval_every = 0, -1


def finish(config: ConfigDict) -> ConfigDict:
    """Last call of a phase file: shrinks a `debug` run."""
    if config.debug:
        config.steps, config.epochs, config.batch_size = 4, 0, 8
        config.log_every, config.eval_every, config.save_every = 1, 0, 2
        config.early_stopping.metric = ""
    return config
