"""Every transformers family of the baselines, as a tiny random model of its real class, on real cells."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from data_prep.schema import DataError
from pbs_jax.bench.adapters import ANSWER_TOKENS, Options, Request, load_adapter

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed: pip install pbs-jax[hf]"
)
pytestmark = [pytest.mark.slow, pytest.mark.torch, needs_torchvision]
FAMILIES = (
    "internvl", "idefics3", "qwen2_vl", "qwen2_5_vl", "deepseek_vl_hybrid", "llava_next_mistral", "llava_next_vicuna",
    "blip2",
)  # fmt: skip
CPU = Options(device="cpu", batch=3)
QUESTIONS = (
    ("Is it big?", "true_false", ()),
    ("Which nucleus does the cell in the middle of the picture have?", "multiple_choice", ("Round", "Bilobed", "Band")),
    ("Which type?", "fill_blank", ()),
    ("Describe the cell.", "open", ()),
)


@pytest.fixture(scope="module")
def cells(shared: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((shared / "data/cells/pbc_barcelona").rglob("*.jpg"))[:2]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for k, kind in enumerate(ANSWER_TOKENS):
        monkeypatch.setitem(ANSWER_TOKENS, kind, 3 + k)


@pytest.fixture
def folder(request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.bench.tiny_models import build

    family = request.param
    if family not in built:
        built[family] = tmp_path_factory.mktemp(family)
        build(family, built[family])
    return built[family]


def requests(images: tuple[bytes, ...]) -> list[Request]:
    return [Request(f"q{k}", (), images, q, t, o, q) for k, (q, t, o) in enumerate(QUESTIONS)]


@pytest.mark.parametrize("folder", FAMILIES, indirect=True, ids=str)
def test_family_answers_sees_and_repeats(folder: Path, cells: list[bytes]) -> None:
    model = load_adapter(f"hf:{folder}", CPU)
    first, other, blind = (requests(images) for images in ((cells[0],), (cells[1],), ()))
    answers = model.generate(first, "generate")
    assert {a.status for a in answers} <= {"ok", "truncated"} and any(a.text for a in answers)
    assert all(a.detail["output_tokens"] <= ANSWER_TOKENS[q.question_type] for a, q in zip(answers, first, strict=True))
    assert [model.generate([q], "generate")[0] for q in first] == answers  # padding and company change nothing
    assert model.generate(blind, "generate") != answers != model.generate(other, "generate")
    closed = model.generate(first[:2], "letter_likelihood")
    assert closed[0].text in ("true", "false") and closed[1].text in ("A", "B", "C")
    json.dumps(model.card)
    assert model.card["remarks"] == [] and str(model.card["revision"]).startswith("sha256:")
    assert str(folder.parent) not in json.dumps(model.card)


@pytest.mark.parametrize("folder", ["qwen2_5_vl"], indirect=True)
def test_checkpoint_sampling_settings_are_overridden(folder: Path, cells: list[bytes], tmp_path: Path) -> None:
    plain = load_adapter(f"hf:{folder}", CPU).generate(requests((cells[0],)), "generate")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    settings |= {"do_sample": True, "temperature": 9.0, "repetition_penalty": 1.5}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    model = load_adapter(f"hf:{tmp_path}", CPU)
    assert model.generate(requests((cells[0],)), "generate") == plain
    overridden = model.card["decoding"]["overridden"]
    assert overridden["do_sample"] is True and overridden["repetition_penalty"] == 1.5


@pytest.mark.parametrize("folder", ["llava_next_mistral"], indirect=True)
def test_missing_weights_and_templates_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("weights", "template"):
        (tmp_path / name).mkdir()
        for file in folder.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    dropped = next(name for name in weights if "multi_modal_projector" in name)
    save_file(
        {k: v for k, v in weights.items() if k != dropped}, tmp_path / "weights/model.safetensors", {"format": "pt"}
    )
    with pytest.raises(DataError, match=r"1 missing keys on loading, first .*multi_modal_projector"):
        load_adapter(f"hf:{tmp_path / 'weights'}", CPU)
    (tmp_path / "template/chat_template.jinja").unlink()
    with pytest.raises(DataError, match="has no chat template"):
        load_adapter(f"hf:{tmp_path / 'template'}", CPU)
    with pytest.raises(DataError, match="does not load with transformers"):
        load_adapter(f"hf:{tmp_path / 'nowhere'}", CPU)


@pytest.mark.parametrize("folder", ["qwen2_vl"], indirect=True)
def test_many_pictures_in_one_question(folder: Path, cells: list[bytes]) -> None:
    model = load_adapter(f"hf:{folder}", CPU)
    both, one = requests((cells[0], cells[1]))[:1], requests((cells[0],))[:1]
    assert model.generate(both, "generate") != model.generate(one, "generate")
    assert model.generate(both + one, "generate") == model.generate(both, "generate") + model.generate(one, "generate")


@pytest.mark.parametrize("folder", ["blip2"], indirect=True)
def test_blip2_takes_one_picture(folder: Path, cells: list[bytes]) -> None:
    with pytest.raises(DataError, match="takes one picture, and a question shows 2"):
        load_adapter(f"hf:{folder}", CPU).generate(requests((cells[0], cells[1])), "generate")
