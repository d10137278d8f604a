"""The report: one page with everything in it, case studies, slices, the question set without cell names."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import stats
from data_prep.schema import QA, DataError
from pbs_jax import cli
from pbs_jax.bench import cases, compare, remarks, report, score, slices, tables, validity, variant
from pbs_jax.bench.records import Questions, load_questions
from tests.bench.conftest import picture
from tests.bench.test_score import FAST, as_run, cell_of, closed


@pytest.fixture(scope="module")
def released(shared: Path) -> Questions:
    return load_questions(shared / "data/pbsbench", "test")


def page_data(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_one_page_with_pictures_and_all_answers(dataset: Path, tmp_path: Path) -> None:
    questions = load_questions(dataset, "test")
    gold = as_run(questions.items, [qa.answer for qa in questions.items], "net")
    blind = as_run(questions.items, ["<b>no</b>"] * len(questions.items), "net", modality="blind")
    report.write(tmp_path, [gold, blind], FAST, data=dataset)
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page) and "http" not in page
    data = page_data(page)
    assert data["rows"] == ["net", "net, blind"] and len(data["items"]) == len(questions.items)
    assert data["images"].keys() == {qa.image_id for qa in questions.items}
    assert all(text.startswith("data:image/jpeg;base64,") for text in data["images"].values())
    answers = [item["answers"] for item in data["items"]]
    assert {mine[1] for mine, _ in answers} == {"right"} and {none[1] for _, none in answers} <= {"wrong", "invalid"}
    assert "<b>no</b>" not in page  # replies are data, never markup
    csv = (tmp_path / "tables.csv").read_text()
    for number in (2, 3, 5, 6, 8, 9, 10, 11, 12):
        assert f"Table {number}:" in csv and f"Table {number}:" in (tmp_path / "report.md").read_text()
    assert "net" not in re.findall(r"\nTable 2[^\n]*", csv)[1]  # other questions than the paper's: no row of ours


def asks(kind: str, question: str, answer: str, options: tuple[str, ...] = (), id: str = "q") -> QA:
    return QA(id, "i", "cell", "ood", "test", "morphology", kind, question, answer, options)


def test_right_and_wrong_words_are_marked() -> None:
    mine = asks("fill_blank", "What is the shape of the nucleus?", "Round")
    other = asks("fill_blank", "And here?", "Bilobed", id="r")
    words = cases.Vocabulary.of([mine, other])
    said = cases.marked(mine, "A round, <i>bilobed</i> nucleus", words)
    assert said == ('A <mark class="right">round</mark>, &lt;i&gt;<mark class="wrong">bilobed</mark>&lt;/i&gt; nucleus')
    choice = asks("multiple_choice", "Which?", "Round", ("Bilobed", "Round"))
    assert cases.marked(choice, "B", words) == '<mark class="right">B: Round</mark>'
    assert cases.marked(choice, "A", words) == '<mark class="wrong">A: Bilobed</mark>'
    assert cases.marked(choice, "either", words) == "either"
    assert cases.verdict(mine, "The nucleus is round.").text == "holds the answer"


def test_cases_are_those_where_models_differ() -> None:
    items = closed(40)
    good = [qa.answer for qa in items]
    poor = [qa.answer if k != 7 else "E" for k, qa in enumerate(items)]
    answers = score.gather([as_run(items, good, "a"), as_run(items, poor, "b")])
    assert cases.choose(answers, ["a", "b"], per_type=1) == [7]
    (article,) = cases.studies(answers, ["a", "b"], lambda qa: picture(90), per_type=1)
    assert "data:image/jpeg" in article and "can&#x27;t be read" in article


@pytest.mark.parametrize(
    ("named", "plain"),
    [
        ("What is the shape of the nucleus in this neutrophil?", "What is the shape of the nucleus in this cell?"),
        ("(True/False) The segmented neutrophil is normal.", "(True/False) This cell is normal."),
        ("Does a normal monocyte have granules?", "Does a normal cell have granules?"),
        ("What do such lymphocytes suggest?", "What do such cells of this type suggest?"),
        ("Is the lymphocyte's cytoplasm scant?", "Is this cell's cytoplasm scant?"),
        ("What do eosinophilic granules hold?", "What do eosinophilic granules hold?"),
    ],
)
def test_cell_names_are_replaced(named: str, plain: str) -> None:
    assert variant.without_names(named) == plain


def test_the_variant_names_no_cell_and_pairs_by_id(released: Questions, tmp_path: Path) -> None:
    ood = [qa for qa in released.items if qa.domain == "ood"]
    count = variant.write(ood, tmp_path / "variant.jsonl")
    plain = load_questions(tmp_path / "variant.jsonl")
    assert count == len(plain.items) > 4000 and {qa.id for qa in plain.items} < {qa.id for qa in ood}
    assert not [qa for qa in plain.items if re.search(r"\b(?:neutrophil|lymphocyte|monocyte)s?\b", qa.question, re.I)]
    with pytest.raises(DataError, match="no question names"):
        variant.write([asks("open", "Why?", "So")], tmp_path / "none.jsonl")


def test_with_and_without_the_name() -> None:
    items = [dataclasses.replace(qa, question=f"What colour is this monocyte, {k}?") for k, qa in enumerate(closed(40))]
    plain = variant.variant(items)
    named = score.gather([as_run(items, [qa.answer for qa in items], "net")])
    bare = score.gather([as_run(plain, ["E" if k % 2 else qa.answer for k, qa in enumerate(plain)], "net")])
    articles, counts = cases.without_names(named, bare, lambda qa: None, FAST)
    ((name, with_name, without, gap),) = counts
    assert (name, with_name, without, gap.value) == ("net", 40, 20, 0.5)
    assert len(articles) == 4 and all("this cell" in text and "this monocyte" in text for text in articles)


def test_out_of_domain_by_data_set_and_class(released: Questions) -> None:
    """Questions per class as counted from the files' folders (official_code.md 1.5)."""
    ood = [qa for qa in released.items if qa.domain == "ood"]
    names = slices.sources(ood)
    assert {name: names.count(name) for name in sorted(set(names))} == {
        "AML-Cytomorphology_LMU: Basophil": 6,
        "AML-Cytomorphology_LMU: Lymphocyte": 886,
        "AML-Cytomorphology_LMU: Monocyte": 588,
        "AML-Cytomorphology_LMU: Neutrophil": 1114,
        "APL: Basophil": 18,
        "APL: Lymphocyte": 762,
        "APL: Monocyte": 296,
        "APL: Neutrophil": 429,
        "WBC_LISC: Basophil": 189,
        "WBC_LISC: Lymphocyte": 42,
        "WBC_LISC: Monocyte": 111,
        "WBC_LISC: Neutrophil": 54,
    }
    choice = [qa for qa in ood if qa.question_type == "multiple_choice"]
    answers = score.gather([as_run(choice, ["A"] * len(choice), "letter")])
    (table,) = slices.to_tables(slices.by_source(answers, FAST), "data set and class")
    assert table.header == ("", 'best without image: always "A"', "letter")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["all (n=1493)"][0].startswith("0.886 [")
    assert rows["APL: Basophil (n=8)"] == ("0.750 (n=8)", "0.750 (n=8)")


def test_question_texts_seen_in_training_are_scored_apart(shared: Path, released: Questions) -> None:
    train = load_questions(shared / "data/pbsbench/cell_val.jsonl").items
    mine = [qa for qa in released.items if (qa.level, qa.domain) == ("cell", "id")]
    names = slices.texts(mine, train)
    assert (names.count(slices.SEEN), len(names)) == (450, 3289)  # official_code.md 1.8
    some = [qa for qa in mine if qa.question_type == "multiple_choice"][:200]
    answers = score.gather([as_run(some, [qa.answer for qa in some], "gold")])
    cells = [c for c in slices.by_text(answers, train, FAST) if (c.row, c.metric) == ("gold", "accuracy")]
    sizes = {name: slices.texts(some, train).count(name) for name in (slices.SEEN, slices.NEW)}
    assert {c.task: c.n for c in cells} == sizes | {"all": 200}


def test_notes_under_the_releases_tables(released: Questions) -> None:
    notes = remarks.by_track(released.items)
    assert "all 189 test slides also feed training" in notes["cell_id"][0]
    assert "at least 18 of the 23 test slides are seen in phase 3" in notes["slide_id"][0]
    slide = [qa for qa in released.items if qa.level == "slide"]
    scores = score.score_runs([as_run(slide, [qa.answer for qa in slide], "gold")], FAST)
    shown = tables.all_tables(scores.cells, notes=scores.notes)
    assert notes["slide_id"][0] in shown[0].notes
    (choice,) = [t for t in shown if "MCQ by task" in t.title and "robust" in t.title]
    assert any(note.startswith("MCQ cell_differential: " + validity.INVALID) for note in choice.notes)
    assert any(note.startswith("MCQ diagnosis: " + validity.INVALID) for note in choice.notes)


def test_the_questions_writer_is_marked(released: Questions, tmp_path: Path) -> None:
    some = released.items[:40]
    for model, marked in (("gpt-4o-2024-11-20", True), ("gpt-4o-mini", False), ("gpt-4", False)):
        assert remarks.wrote_them({"model": {"model": model}}, "it", some) is marked
    assert not remarks.wrote_them({}, "GPT-4o", [asks("open", "Why?", "So")])
    run = dataclasses.replace(as_run(some, ["A"] * 40, "GPT-4o"), closed_loop=True)
    assert run.label == "GPT-4o ‡"
    notes = score.score_runs([run], FAST).notes
    assert remarks.CLOSED_LOOP_NOTE in notes["cell_id"]


def test_few_clusters_also_get_students_interval() -> None:
    items = closed(40)  # 20 images
    replies = ["A" if k % 4 else "B" for k in range(40)]
    cell = cell_of(score.score_runs([as_run(items, replies)], FAST), "model", "accuracy")
    assert cell.clusters == 20 and cell.t_low is not None and cell.low is not None and cell.t_low < cell.low
    assert "; t 0." in tables.show(cell)
    many = cell_of(score.score_runs([as_run(closed(90), ["A"] * 90)], FAST), "model", "accuracy")
    assert many.clusters == 45 and many.t_low is None


def test_holm_takes_a_family_together() -> None:
    items = [*closed(60), *(dataclasses.replace(qa, id=f"t{qa.id}") for qa in closed(60, "true_false"))]
    rng = np.random.default_rng(0)
    good = [qa.answer if rng.random() < 0.85 else "E" for qa in items]
    poor = [qa.answer if rng.random() < 0.6 else "E" for qa in items]
    answers = score.gather([as_run(items, good, "a"), as_run(items, poor, "b"), as_run(items, poor, "c")])
    pairs = [("a", "b"), ("a", "c")]
    for family, size in (("track", 4), ("metric", 2)):
        found = compare.compare(answers, pairs, FAST, family=family)
        groups = [found] if size == 4 else [found[:2], found[2:]]
        for group in groups:
            assert [item.p_holm for item in group] == stats.holm([item.difference.p for item in group])
    with pytest.raises(DataError, match='family "all" is unknown'):
        compare.compare(answers, pairs, FAST, family="all")


def test_comparing_rotations_counts_a_question_once() -> None:
    from pbs_jax.bench.run import presentations

    items = [item for qa in closed(30) for item in presentations(qa, "circular")]
    runs = [
        score.Run(
            name, 0, "image", "circular", "d" * 64, tuple(dataclasses.replace(i, prediction=reply) for i in items)
        )
        for name, reply in (("a", "A"), ("b", "B"))
    ]
    (found,) = compare.compare(score.gather(runs), [("a", "b")], FAST)
    assert found.difference.n == 30 and found.difference.value == pytest.approx(0)


def test_embeddings_are_kept_by_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pbs_jax.bench.similarity import Similarity

    class Encoder:
        def encode(self, texts: Sequence[str], **_: Any) -> np.ndarray:
            return np.array([[1.0, 0.0] if "same" in text else [0.0, 1.0] for text in texts], np.float32)

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    monkeypatch.setattr(Similarity, "_encoder", Encoder())
    first = Similarity(tmp_path, tmp_path / "cache")
    assert first.score(["same", "other"], ["same too", "same"]).tolist() == [1, 0] and first.embedded == 3
    again = Similarity(tmp_path, tmp_path / "cache")
    assert again.score(["other", "same"], ["same", "same too"]).tolist() == [0, 1] and again.embedded == 0
    assert "other-" in first.definition and not first.pinned
    (tmp_path / "model.safetensors").write_bytes(b"other weights")  # another revision: nothing of the old one
    assert Similarity(tmp_path, tmp_path / "cache").score(["same"], ["same"]).tolist() == [1]
    for kept in (tmp_path / "cache").iterdir():
        kept.write_bytes(b"cut")
    with pytest.raises(DataError, match="is no cache of embeddings"):
        Similarity(tmp_path, tmp_path / "cache")


def test_the_variant_command(shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "v.jsonl"
    assert cli.main(["bench", "variant", str(shared / "data/pbsbench/cell_ood_test.jsonl"), "--out", str(out)]) == 0
    assert "of 4,495 questions name a cell" in capsys.readouterr().out


def test_unreadable_replies_are_said() -> None:
    items = closed(50)
    scores = score.score_runs([as_run(items, ["who knows"] * 10 + ["A"] * 40, "vague")], FAST)
    table = tables.overview(scores.cells, "cell_id", "robust")
    assert "vague: 20.0% of the MCQ replies can't be read (robust profile)" in table.notes
