"""Slide questions: right answers from the counts, nothing unclear asked, text alone at chance, captions that fit."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep import crops, io, probe, slide_qa_bank, split, tokens
from data_prep.datasets import CELL_FEATURES, cell_record, record_qa
from data_prep.mosaic_plan import PATTERNS, draw_counts
from data_prep.records import Features
from data_prep.schema import QA, QUESTION_TYPES, WHITE_CELL_CLASSES, Cell, DataError
from data_prep.slide_caption import slide_caption
from data_prep.slide_datasets import SLIDE_FEATURES, Slide, slide_record
from data_prep.slide_derived import write_slide_questions
from data_prep.slide_qa import slide_questions
from data_prep.slide_qa_bank import SlideCells, facts
from data_prep.synthetic import sample_attributes

SPLIT_ENDS = {"train": 60, "val": 70, "test": 100}


def made_slides(count: int = 100) -> list[SlideCells]:
    """Slides without pixels: counts as mosaics draw them, attributes of the synthetic profiles."""
    slides = []
    for number in range(count):
        rng = np.random.default_rng(number)
        pattern = list(PATTERNS)[number % len(PATTERNS)]
        counts = draw_counts(pattern, rng)
        attributes = [sample_attributes(name, rng) for name, n in counts.items() for _ in range(n)]
        place = next(name for name, end in SPLIT_ENDS.items() if number < end)
        slides.append(SlideCells(f"made-{number:03d}", place, counts, "truth", pattern, attributes))
    return slides


@pytest.fixture(scope="module")
def slides() -> list[SlideCells]:
    return made_slides()


@pytest.fixture(scope="module")
def questions(slides: list[SlideCells]) -> list[QA]:
    return slide_questions(slides)


def test_all_formats_and_tasks_about_every_slide(slides: list[SlideCells], questions: list[QA]) -> None:
    assert {qa.question_type for qa in questions} == set(QUESTION_TYPES)
    assert {qa.task for qa in questions} == {"cell_differential", "morphology", "knowledge"}
    assert {qa.image_id for qa in questions} == {slide.slide_id for slide in slides}
    assert len({qa.id for qa in questions}) == len(questions) > 1000
    assert {(qa.level, qa.provenance["source"]) for qa in questions} == {("slide", "truth")}


def test_balance(questions: list[QA]) -> None:
    statements: dict[tuple, Counter[str]] = defaultdict(Counter)
    sets: dict[tuple, Counter[str]] = defaultdict(Counter)
    for qa in questions:
        if qa.question_type == "true_false":
            statements[qa.split, qa.question][qa.answer] += 1
        if qa.question_type == "multiple_choice":
            sets[qa.split, qa.options][qa.answer] += 1
    assert len(statements) > 100 and len(sets) > 30
    assert all(count["True"] == count["False"] > 0 for count in statements.values())
    assert all(len({count[option] for option in options}) == 1 for (_, options), count in sets.items())
    train, test = ([qa for qa in questions if qa.split == name] for name in ("train", "test"))
    probe.check_probe(probe.text_probe(train, test), "slide_qa")


def test_differential_answers_follow_from_the_counts(slides: list[SlideCells], questions: list[QA]) -> None:
    """Re-derived here from the counts alone, by other means than the bank's."""
    counts = {slide.slide_id: np.array([slide.counts[name] for name in WHITE_CELL_CLASSES]) for slide in slides}
    seen: Counter[str] = Counter()
    for qa in questions:
        n = counts[qa.image_id]
        plural = {f"{name}s": int(n[k]) for k, name in enumerate(WHITE_CELL_CLASSES)}
        words = qa.question.removeprefix("(True/False) ").rstrip(".?").replace(",", "").split()
        named = [word for word in words if word in plural]
        if qa.question_type == "true_false" and "than" in words:
            assert qa.answer == str(plural[named[0]] > plural[named[1]])
        elif qa.question_type == "true_false" and words[0] in plural and "second" not in words:
            assert qa.answer == str(plural[named[0]] == max(plural.values()))
        elif "nearest" in words:
            assert abs(100 * plural[named[0]] / n.sum() - int(qa.answer)) <= 5
        elif qa.question_type == "multiple_choice" and words[:2] == ["In", "which"]:
            share = 100 * plural[named[0]] / n.sum()
            low, high = {"below 5 percent": (0, 5), "above 35 percent": (35, 100)}.get(qa.answer, (5, 15))
            if qa.answer.startswith("15"):
                low, high = 15, 35
            assert low <= share <= high
        elif qa.question_type == "multiple_choice" and "second" in words:
            assert sorted(plural.values())[-2] == plural[f"{qa.answer}s"]
        else:
            continue
        seen[qa.question_type] += 1
    assert min(seen[kind] for kind in ("true_false", "multiple_choice", "fill_blank")) > 50


def test_morphology_answers_follow_from_the_cells(slides: list[SlideCells], questions: list[QA]) -> None:
    by_id = {slide.slide_id: slide for slide in slides}
    asked = [qa for qa in questions if qa.question.startswith("What is the most common nucleus shape")]
    assert len(asked) > 10
    for qa in asked:
        shapes = Counter(cell["nucleus_shape"] for cell in by_id[qa.image_id].attributes)
        assert shapes.most_common(1)[0][0].endswith(qa.answer)


def test_what_hangs_on_one_cell_is_not_asked() -> None:
    counts = dict.fromkeys(WHITE_CELL_CLASSES, 0) | {"Neutrophil": 10, "Lymphocyte": 10, "Basophil": 9}
    found = facts(SlideCells("s", "test", counts, "truth"))
    assert "dominant" not in found and "more Neutrophil Lymphocyte" not in found and "second" not in found
    assert "range Neutrophil" not in found  # 34.5 %: half a point from the edge of two ranges
    assert found["range Monocyte"] == "below 5 percent" and found["more Neutrophil Monocyte"] == "Neutrophil"
    assert "pattern" not in found


def test_a_slide_with_few_cells_is_asked_nothing(slides: list[SlideCells]) -> None:
    few = dataclasses.replace(slides[0], slide_id="few", counts={"Neutrophil": 9})
    assert not [qa for qa in slide_questions([*slides, few]) if qa.image_id == "few"]
    with pytest.raises(DataError, match="slide few has 9 white cells"):
        slide_caption(few)


def test_captions_fit_the_slot_and_tell_the_differential(slides: list[SlideCells], tmp_path: Path) -> None:
    tokenizer = tokens.train_tokenizer(tokens.tokenizer_texts((), ()), tmp_path)  # knows no slide words, only classes
    for slide in slides:
        for variant in (0, 1):
            caption = slide_caption(slide, variant)
            assert len(tokenizer.encode(caption)) <= 30
            found = facts(slide)
            assert caption.startswith(f"{slide.pattern}: ")
            for name in WHITE_CELL_CLASSES:
                assert f"count {name}" not in found or f"{name} {found[f'count {name}']}" in caption
            if variant == 0 and "dominant" in found:
                assert caption.split()[1] == found["dominant"]


def _slide_job(out: Path, slides: list[SlideCells], tiles: int = 9) -> None:
    records = [
        slide_record(
            Slide(
                slide.slide_id,
                slide.split,
                width=1536,
                height=1536,
                tiles_in=9,
                tiles_kept=tiles,
                pattern=slide.pattern,
                counts={"Neutrophil": 20, "Lymphocyte": 5, "Others": 50},
            )
        )
        for slide in slides
    ]
    _write(out, "slides", SLIDE_FEATURES, records, "slide_id")


def _write(out: Path, name: str, features: Features, records: list[dict[str, Any]], id: str) -> None:
    io.write_dataset(
        out, name, features, records, id_feature=id, config={}, inputs={}, records_in=len(records), split_level="slide"
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokens.train_tokenizer(tokens.tokenizer_texts((), ()), folder)
    return folder


def test_datasets_from_truth_and_from_counts(slides: list[SlideCells], tokenizer: Path, tmp_path: Path) -> None:
    out, truth = tmp_path / "out", tmp_path / "mosaic"
    few = slides[:8]
    _slide_job(out, few)
    (truth / "truth").mkdir(parents=True)
    for slide in few[:7]:
        record = {"counts": slide.counts, "cells": [{"attributes": a} for a in slide.attributes]}
        (truth / "truth" / f"{slide.slide_id}.json").write_text(json.dumps(record))
    outcome = write_slide_questions(out, tokenizer, truth=truth, say=lambda text: None)
    assert not outcome.rejects and not io.verify(out / "slide_qa") and not io.verify(out / "slide_qa_tokens")
    asked = [record_qa(record) for record in io.open_dataset(out / "slide_qa", "train")]
    assert {(qa.image_id, qa.provenance["source"]) for qa in asked} == {
        (slide.slide_id, "truth" if slide in few[:7] else "model") for slide in few
    }
    counted = {qa.answer for qa in asked if qa.image_id == few[7].slide_id and "is most common" in qa.question}
    assert counted == {"Neutrophil"}  # 20 of 25: `Others` are no part of the differential
    packed = [id for record in io.open_dataset(out / "slide_qa_tokens", "train") for id in record["qa_ids"]]
    assert sorted(packed) == sorted(qa.id for qa in asked)
    assert (out / "tokenizer" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_a_question_whose_slide_lies_in_another_split_is_a_leak(
    slides: list[SlideCells], tokenizer: Path, tmp_path: Path
) -> None:
    picture = crops.encode_jpeg(Image.new("RGB", (32, 32)))
    cell = cell_record(Cell("c", slides[0].split, "Neutrophil", "human", picture, slide_id=slides[0].slide_id))
    _write(tmp_path, "cells", CELL_FEATURES, [cell], "cell_id")
    _slide_job(tmp_path, slides[:1])
    write_slide_questions(tmp_path, tokenizer, truth=None, say=lambda text: None)
    assert split.leaks(tmp_path) == []
    _slide_job(tmp_path, [dataclasses.replace(slides[0], split="test")])
    assert f"slide_qa train: slide {slides[0].slide_id} is in split test" in split.leaks(tmp_path)


def test_a_damaged_truth_file_and_no_usable_slide(slides: list[SlideCells], tokenizer: Path, tmp_path: Path) -> None:
    _slide_job(tmp_path, slides[:1])
    (tmp_path / "truth").mkdir()
    (tmp_path / "truth" / f"{slides[0].slide_id}.json").write_text('{"counts": {}}')
    with pytest.raises(DataError, match="is no truth file"):
        write_slide_questions(tmp_path, tokenizer, truth=tmp_path, say=lambda text: None)
    _slide_job(tmp_path, slides[:1], tiles=0)
    with pytest.raises(DataError, match="nothing to ask about"):
        write_slide_questions(tmp_path, tokenizer, say=lambda text: None)


def test_the_bank_is_whole() -> None:
    """Every attribute that is asked about exists, and every statement of every fact is a sentence without a gap."""
    for fact in slide_qa_bank.STATED:
        for value in WHITE_CELL_CLASSES:
            assert "{" not in slide_qa_bank.statement(fact, value)
    assert len(set(slide_qa_bank.vocabulary())) > 100
