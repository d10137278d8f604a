"""`pbs weights verify` passes what is the same and fails each planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data_prep.schema import DataError
from data_prep.tokens import prompt_tokens
from pbs_jax import cli
from pbs_jax.bench import run as bench
from pbs_jax.bench.records import load_predictions, load_questions
from tests.weights.conftest import Chain, rewritten

pytestmark = pytest.mark.torch
LAYER = "model.visual.encoder.qformer.Qformer.bert.encoder.layer.0"


def swap(tensors: dict[str, Any], one: str, two: str) -> None:
    for kind in ("weight", "bias"):
        a, b = f"{one}.{kind}", f"{two}.{kind}"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def test_what_was_exported_is_the_same_in_torch(
    exported: Path, chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "torch.json"
    command = [
        "weights",
        "verify",
        "--export",
        str(exported),
        "--data",
        str(chain.root),
        "--n",
        "60",
        "--out",
        str(out),
    ]
    assert cli.main(command) == 0
    found = json.loads(out.read_text())
    assert found["verdict"] == "equal" and found["identical_answers"] == found["questions"] == 60
    assert found["same_first_token"] == 60 and found["mean_logit_kl"] < 1e-9
    for stage in ("backbone_tokens", "qformer_queries", "visual_tokens", "prompt_logits"):
        assert 0 < found[f"{stage}_relative"] < 1e-5 and found[f"{stage}_mean_abs"] <= found[f"{stage}_max_abs"]
    assert "answers identical 60 of 60" in capsys.readouterr().out


def test_bench_gets_the_same_answers_as_from_jax(exported: Path, chain: Chain, tmp_path: Path) -> None:
    found = {}
    for name, model in (("jax", f"pbs:{chain.runs['cell_qa']}"), ("torch", f"torch:{exported}")):
        with jax.default_matmul_precision("highest"):  # as verify: its programs are used again
            assert bench.run(model, chain.root, tmp_path / name, mode="letter_likelihood", limit=40) == 0
        answers = load_predictions(tmp_path / name / "predictions.jsonl")
        found[name] = [(item.key, item.prediction, item.answer_mode) for item in answers]
    assert found["jax"] == found["torch"] and len({prediction for _, prediction, _ in found["jax"]}) > 8
    card = json.loads((tmp_path / "torch" / "run.json").read_text())
    assert card["name"] == "pbs nano (PyTorch)" and card["model"]["phase"] == "cell_qa"


def test_a_planted_swap_fails(exported: Path, chain: Chain, tmp_path: Path) -> None:
    """Keys and values of the first cross-attention, exchanged in the file."""
    keys = f"{LAYER}.crossattention.self"
    wrong = rewritten(
        exported, tmp_path / "x", "model.safetensors", lambda tensors: swap(tensors, f"{keys}.key", f"{keys}.value")
    )
    out = tmp_path / "torch.json"
    command = ["weights", "verify", "--export", str(wrong), "--data", str(chain.root), "--n", "60", "--out", str(out)]
    assert cli.main(command) == 1
    found = json.loads(out.read_text())
    assert found["verdict"] == "different" and found["identical_answers"] < 60 and found["parted"] != "none"
    assert found["backbone_tokens_relative"] < 1e-5 < 1e-2 < found["qformer_queries_relative"]


PART_STAGES = {
    "backbone": ("backbone_tokens", "head_logits"),
    "language_model": ("logits",),
    "cell_representation": ("qformer_queries",),
    "cell_patch_alignment": ("patch_tokens", "projections"),
    "classifier": ("head_logits",),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PART_STAGES)
def test_a_phase_that_answers_nothing_is_compared_network_by_network(chain: Chain, tmp_path: Path, phase: str) -> None:
    """And a file changed in one entry, text half included, is not what the workdir holds."""
    out, report = tmp_path / "export", tmp_path / "torch.json"
    assert cli.main(["weights", "export", "--workdir", str(chain.runs[phase]), "--out", str(out)]) == 0
    assert cli.main(["weights", "verify", "--export", str(out), "--out", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["verdict"] == "equal" and found["equal_tensors"] == found["tensors"] > 0
    assert {name.removesuffix("_relative") for name in found if name.endswith("_relative")} == set(PART_STAGES[phase])
    assert all(found[f"{stage}_relative"] < 1e-5 for stage in PART_STAGES[phase])

    def one_entry(tensors: dict[str, Any]) -> None:
        name = max(tensors, key=lambda name: tensors[name].size)
        tensors[name] = tensors[name] + np.eye(*tensors[name].shape[-2:], dtype=np.float32) * 1e-3

    wrong = rewritten(out, tmp_path / "wrong", "model.safetensors", one_entry)
    assert cli.main(["weights", "verify", "--export", str(wrong)]) == 1


def scaled(part: str, name: str, factor: float) -> Callable[[Any], None]:
    def change(parts: Any) -> None:
        parts[part].get_parameter(name).mul_(factor)

    return change


def other_sections(parts: Any) -> None:
    parts["language_model"].shape.mrope_section = (1, 1, 2)  # t and h are alike throughout, so w must move


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (scaled("backbone", "blocks.1.ls2.gamma", 1.001), "backbone_tokens"),
        (scaled("qformer", "Qformer.bert.encoder.layer.1.output_query.dense.weight", 1.001), "qformer_queries"),
        (scaled("projector", "bias", float("nan")), "visual_tokens"),
        (other_sections, "prompt_logits"),
    ],
    ids=["layer scale", "feed-forward", "not a number", "rotary sections"],
)
def test_each_stage_is_watched(exported: Path, chain: Chain, change: Callable[[Any], None], stage: str) -> None:
    """A fault is seen at its own stage, and not before it."""
    from pbs_jax.decode.answer import load_answerer
    from pbs_jax.weights import verify
    from pbs_jax.weights.torch_answer import load_export

    ours = load_export(exported, verify.BATCH)
    change(ours.parts)
    asked = [qa for qa in verify.draw(chain.root, "test", 60) if qa.question_type == "true_false"]
    picture = bench.load_pictures(chain.root, "image", asked)
    images = {qa.image_id: picture(qa)[0] for qa in asked}
    with jax.default_matmul_precision("highest"):
        found = verify.compare(load_answerer(chain.runs["cell_qa"], verify.BATCH), ours, asked, images)
    assert found["verdict"] == "different"
    stages = list(verify.LIMITED)
    for name in stages[: stages.index(stage)]:
        assert found[f"{name}_relative"] < 1e-5
    assert not found[f"{stage}_relative"] <= verify.TOLERANCE


def test_weights_trained_on_since_are_another_model(exported: Path, chain: Chain, tmp_path: Path) -> None:
    from pbs_jax.weights.verify import verify

    card = json.loads((exported / "export.json").read_text())
    wrong = rewritten(exported, tmp_path / "x", "model.safetensors", lambda tensors: None)
    card["trees"]["qformer"] = "0" * 64
    (wrong / "export.json").write_text(
        json.dumps(card | {"files": json.loads((wrong / "export.json").read_text())["files"]})
    )
    with pytest.raises(DataError, match=r"was not exported from the weights that .* now holds"):
        verify(wrong, chain.root)


def test_a_tie_is_measured_where_two_answers_part(exported: Path, chain: Chain) -> None:
    from pbs_jax.weights.torch_answer import load_export
    from pbs_jax.weights.verify import margin

    ours = load_export(exported)
    prompt = prompt_tokens(ours.tokenizer, load_questions(chain.root, "test").items[0], ())
    visual = np.zeros((1, 32, chain.size.decoder.dim), np.float32)
    (answer,), _ = ours.generate([prompt], visual, "open")
    _, logits = ours.generate([[*prompt, *answer[:2]]], visual, "open")
    other = (answer[2] + 1) % chain.size.decoder.vocab
    expected = float((logits[0, answer[2]] - logits[0, other]).abs())
    assert margin(ours, prompt, visual[0], answer, [*answer[:2], other, *answer[3:]]) == pytest.approx(
        expected, rel=1e-4
    )
