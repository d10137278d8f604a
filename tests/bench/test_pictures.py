"""What models are shown: the seeded patches of slides, and images that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.datasets import QA_FEATURES, qa_record
from data_prep.io import write_dataset
from data_prep.schema import QA, DataError
from data_prep.slide_datasets import PATCH_FEATURES, Patch, patch_record
from pbs_jax.bench import pictures, run
from pbs_jax.bench.records import load_questions
from tests.bench.conftest import Counting, picture

FIRST = ["20_0", "44_0", "11_0", "46_0"]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides of 60, 20 and 40 patches, each patch of its own shade, and a question about each slide."""
    out = tmp_path_factory.mktemp("slides")
    patches, questions = [], []
    for s, count in enumerate((60, 20, 40)):
        for k in range(count):
            patches.append(Patch(f"S:{s}:{k}_0", f"S:{s}", "test", k, 0, 0.9, picture(4 * k + s)))
        questions.append(QA(f"q{s}", f"S:{s}", "slide", "id", "test", "diagnosis", "open", "What is it?", "AML"))
    for name, features, records, key in (
        ("patches", PATCH_FEATURES, map(patch_record, patches), "patch_id"),
        ("slide_qa", QA_FEATURES, map(qa_record, questions), "id"),
    ):
        write_dataset(out, name, features, records, id_feature=key, config={}, inputs={})
    return out


def test_slides_show_the_same_seeded_patches_to_every_model(
    slides: Path, tmp_path: Path, use_model: Callable[[object], None]
) -> None:
    shown = {}
    for count in (15, 30, 50):
        model = Counting()
        use_model(model)
        assert run.run("x", slides, tmp_path / str(count), patches=count) == 0
        shown[count] = json.loads((tmp_path / f"{count}/patches.json").read_text())
        assert [len(r.images) for r in model.asked] == [count, min(count, 20), min(count, 40)]
        assert len(set(model.asked[0].images)) == count
        card = json.loads((tmp_path / f"{count}/run.json").read_text())
        few = [f"{count} patches of a slide were asked for, but slides have 20 to {count}."] if count > 20 else []
        assert (card["patches"], card["model"]["remarks"]) == (count, few)
    for slide in ("S:0", "S:1", "S:2"):
        assert shown[50][slide][:15] == shown[15][slide] and shown[50][slide][:30] == shown[30][slide]
    assert [id.rpartition(":")[2] for id in shown[15]["S:0"]][:4] == FIRST  # frozen: another list is another benchmark
    blank = Counting()
    use_model(blank)
    run.run("x", slides, tmp_path / "blank", modality="blank", patches=15)
    assert [len(r.images) for r in blank.asked] == [15] * 3 and len({i for r in blank.asked for i in r.images}) == 1
    wrong = Counting()
    use_model(wrong)
    run.run("x", slides, tmp_path / "wrong", modality="mismatched", patches=15)
    theirs = json.loads((tmp_path / "wrong/patches.json").read_text())
    assert all(not set(theirs[s]) & set(shown[50][s]) for s in theirs)


def test_pictures_that_are_not_there_are_named(slides: Path, dataset: Path) -> None:
    cell = load_questions(dataset, "test").items[0]
    slide = load_questions(slides).items[0]
    with pytest.raises(DataError, match="cell and slide questions are asked in runs of their own"):
        pictures.load_pictures(slides, "image", [cell, slide])
    with pytest.raises(DataError, match="patches 0 shows nothing"):
        run.run("x", slides, slides, patches=0)
    lost = QA("q", "S:9", "slide", "id", "test", "diagnosis", "open", "What is it?", "AML")
    with pytest.raises(DataError, match=r"has no picture of S:9 \(1 of 2 images asked about\)"):
        pictures.load_pictures(slides, "image", [slide, lost])


def test_a_model_that_takes_fewer_pictures_is_refused_before_it_is_asked(
    slides: Path, tmp_path: Path, use_model: Callable[[object], None]
) -> None:
    model = Counting()
    model.card = {"max_images": 20}
    use_model(model)
    with pytest.raises(DataError, match="takes 20 pictures, 30 are to be shown: give --patches"):
        run.run("x", slides, tmp_path / "r")
    assert not model.asked
