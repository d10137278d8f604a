"""Quality rules: each planted fault is caught under its own rule, and clean questions pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep import files, near_duplicates, quality
from data_prep.abnormality import abnormality_questions
from data_prep.claims import Facts, cell_facts
from data_prep.knowledge import knowledge_questions
from data_prep.qa import cell_questions
from data_prep.quality import ITEM_RULES, SET_RULES, screen
from data_prep.schema import OTHERS, QA, Cell, stable_hash
from data_prep.slide_qa import slide_questions
from data_prep.slide_qa_bank import SlideCells
from pbs_jax import cli
from tests.data_prep.cell_job import write_job
from tests.data_prep.wbcatt import expert_cells, made_cells

NEUTROPHIL = Facts(
    "Neutrophil", {"nucleus_shape": "segmented-bilobed", "cytoplasm_vacuole": "no", "granularity": "yes"}
)
SLIDE = Facts(diagnosis="Megaloblastic anemia", counts={"Neutrophil": 70, "Lymphocyte": 25, "Monocyte": 5})


def asked(question: str, answer: str, kind: str = "fill_blank", task: str = "morphology", **fields: Any) -> QA:
    level = fields.pop("level", "cell")
    return QA("q", "image", level, "id", "train", task, kind, question, answer, **fields)


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return made_cells(40)


@pytest.fixture(scope="module")
def facts(cells: list[Cell]) -> dict[str, Facts]:
    return {cell.cell_id: cell_facts(cell) for cell in cells}


@pytest.fixture(scope="module")
def clean(cells: list[Cell]) -> list[QA]:
    """200 template questions of every type, knowledge among them."""
    written = [*cell_questions(cells), *knowledge_questions(cells, 1.3)]
    return sorted(written, key=lambda qa: stable_hash("clean", qa.id))[:200]


def test_clean_records_pass(clean: list[QA], facts: dict[str, Facts]) -> None:
    screened = screen(clean, facts)
    assert len({(qa.task, qa.question_type) for qa in clean}) >= 8
    assert len(screened.rejected) <= 0.02 * len(clean), screened.rejected[:3]


@pytest.mark.slow
def test_all_template_questions_of_the_real_cells_pass(shared: Path) -> None:
    cells = expert_cells(shared)
    written = [*cell_questions(cells), *abnormality_questions(cells), *knowledge_questions(cells, 2.0)]
    screened = screen(written, {cell.cell_id: cell_facts(cell) for cell in cells})
    assert len(written) > 12_000 and len(screened.rejected) <= 0.02 * len(written), screened.counts()


@pytest.mark.slow
def test_slide_templates_pass() -> None:
    shares = [(50, 30, 10, 8, 2), (20, 55, 15, 5, 5), (70, 20, 5, 4, 1), (30, 25, 28, 10, 7)]
    names = ("Neutrophil", "Lymphocyte", "Monocyte", "Eosinophil", "Basophil")
    slides = [
        SlideCells(f"s{k}", "train", dict(zip(names, shares[k % 4], strict=True)), "truth", "ABCD"[k % 4])
        for k in range(20)
    ]
    written = slide_questions(slides)
    screened = screen(written, {slide.slide_id: Facts(counts=slide.counts) for slide in slides})
    assert len(screened.rejected) <= 0.02 * len(written), screened.rejected[:3]


def wrong_fact(qa: QA) -> QA | None:
    """The template's own statement with its answer turned, or another answer of the same options."""
    if qa.question_type == "true_false":
        return dataclasses.replace(qa, answer="False" if qa.answer == "True" else "True")
    if qa.question_type == "multiple_choice":
        return dataclasses.replace(qa, answer=next(option for option in qa.options if option != qa.answer))
    return None


def test_turned_answers_are_caught(clean: list[QA], facts: dict[str, Facts]) -> None:
    turned = [bad for qa in clean if qa.task != "knowledge" and (bad := wrong_fact(qa))]
    found = {item.qa.id for item in screen(turned, facts).rejected if item.rule == "wrong"}
    assert len(turned) > 80 and len(found) == len(turned)


PLANTED: list[tuple[str, QA, Facts]] = [
    ("not_smear", asked("Which drug lowers the blood pressure of this donor best?", "A diuretic", task="knowledge"), NEUTROPHIL),
    ("not_smear", asked("Which coagulation factor is lacking in hemophilia A?", "Factor VIII", task="knowledge"), NEUTROPHIL),
    ("not_smear", asked("What does the tissue architecture of the gland show?", "Loss of polarity"), NEUTROPHIL),
    ("wrong", asked("What type of white blood cell is this?", "Monocyte", task="cell_subtyping"), NEUTROPHIL),
    ("wrong", asked("Name the type of this cell.", "A lymphocyte", task="cell_subtyping"), NEUTROPHIL),
    ("wrong", asked("(True/False) The cell is agranular.", "True", "true_false"), NEUTROPHIL),
    ("wrong", asked("What can be said of the nucleus?", "The nucleus is hypersegmented.", "open"), NEUTROPHIL),
    ("wrong", asked("What stands out in the cytoplasm?", "There are many vacuoles.", "open"), NEUTROPHIL),
    ("wrong", asked("Which feature of this lymphocyte is seen?", "Fine chromatin"), NEUTROPHIL),
    ("wrong", asked("(True/False) Cytoplasmic vacuoles are absent.", "False", "true_false"), NEUTROPHIL),
    ("wrong", asked("Which cell type is most abundant?", "Lymphocytes", task="cell_differential", level="slide"), SLIDE),
    ("wrong", asked("What share do lymphocytes have?", "60%", task="cell_differential", level="slide"), SLIDE),
    ("wrong", asked("Which condition fits this smear?", "Acute leukemia", task="diagnosis", level="slide"), SLIDE),
    ("not_visible", asked("What does the patient's age say about this cell?", "Nothing certain"), NEUTROPHIL),
    ("not_visible", asked("Which treatment made the cytoplasm of this cell look so?", "Chemotherapy"), NEUTROPHIL),
    ("not_visible", asked("What is the hemoglobin level behind this nucleus?", "Low"), NEUTROPHIL),
    ("not_visible", asked("Which mutation shows in these nuclei?", "SF3B1", level="slide"), SLIDE),
    ("not_visible", asked("What is the differential count of this smear's cells?", "Mostly round ones"), NEUTROPHIL),
    ("not_visible", asked("How does the nucleus look?", "Folded", provenance={"evidence": ["diagnosis"]}), NEUTROPHIL),
    ("leaks", asked("Which shape does the folded nucleus of this cell have?", "Folded"), NEUTROPHIL),
    ("leaks", asked("What supports the diagnosis of MDS in this smear?", "Few lobes", task="diagnosis", level="slide"), SLIDE),
    ("leaks", asked("Which cells of this megaloblastic anemia are large?", "The neutrophils", level="slide"), SLIDE),
    (
        "leaks",
        asked("Which nuclear feature is seen?", "Several lobes that thin filaments of chromatin connect", "multiple_choice",
              options=("One lobe", "Two lobes", "Several lobes that thin filaments of chromatin connect", "A ring")),
        NEUTROPHIL,
    ),
    (
        "leaks",
        asked("Which feature shows irregular cytoplasmic borders?", "Irregular cytoplasmic edges", "multiple_choice",
              options=("Round dense nucleus", "Irregular cytoplasmic edges", "Clumped chromatin mass")),
        NEUTROPHIL,
    ),
    ("subtype_of_others", asked("Which cell type is this?", "Blast", task="cell_subtyping"), Facts(OTHERS)),
    ("format", asked("What does the nucleus look like?", "one two three four five six seven eight nine ten"), NEUTROPHIL),
    ("format", asked("Which nucleus is it?", "Round", "multiple_choice", options=("Round", "Bilobed")), NEUTROPHIL),
    ("format", asked("Which nucleus is it?", "All of the above", "multiple_choice",
                     options=("Round", "Dense", "All of the above")), NEUTROPHIL),
    ("format", asked("How does the nucleus look?", "It is round. It is dense. It is dark.", "open"), NEUTROPHIL),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "qa", "known"), PLANTED, ids=[f"{rule}-{k}" for k, (rule, _, _) in enumerate(PLANTED)]
)
def test_each_planted_fault_is_caught_by_its_rule(rule: str, qa: QA, known: Facts) -> None:
    screened = screen([qa], {"image": known})
    assert [item.rule for item in screened.rejected] == [rule]
    assert screened.rejected[0].detail and screened.rejected[0].qa == qa and not screened.kept


SOUND: list[tuple[QA, Facts]] = [
    (asked("Is the cytoplasm granular or agranular?", "granular"), NEUTROPHIL),
    (asked("How big is this cell?", "big"), NEUTROPHIL),
    (asked("Are vacuoles present in the cytoplasm?", "absent"), NEUTROPHIL),
    (asked("How do normal monocytes differ from this cell?", "Their nucleus is indented.", "open"), NEUTROPHIL),
    (asked("(True/False) The nucleus of this cell is not round.", "True", "true_false"), NEUTROPHIL),
    (asked("What sets this cell apart from a lymphocyte?", "A bilobed nucleus"), NEUTROPHIL),
    (asked("Which cell type is most abundant?", "Neutrophils", task="cell_differential", level="slide"), SLIDE),
    (asked("What share do lymphocytes have?", "20–30%", task="cell_differential", level="slide"), SLIDE),
    (asked("Which condition fits the cells of this smear?", "Megaloblastic anemia", task="diagnosis", level="slide"), SLIDE),
    (asked("What does a raised count of these cells suggest?", "Infection", task="knowledge"), NEUTROPHIL),
]  # fmt: skip


@pytest.mark.parametrize(("qa", "known"), SOUND, ids=range(len(SOUND)))
def test_sound_questions_pass(qa: QA, known: Facts) -> None:
    assert screen([qa], {"image": known}).rejected == ()


def test_repeats_within_an_image_are_caught() -> None:
    base = asked("What is the shape of the nucleus?", "round", provenance={})
    again = [
        dataclasses.replace(base, id="1", question="What shape does the nucleus have?"),
        dataclasses.replace(base, id="2", question="What is the shape of the nuclei?"),
        dataclasses.replace(base, id="3", question="What is the shape of this cell's nucleus?"),
    ]
    other = [
        dataclasses.replace(base, id="4", image_id="other"),
        dataclasses.replace(base, id="5", question="What is the colour of the nucleus?"),
        dataclasses.replace(base, id="6", question_type="open"),
        dataclasses.replace(base, id="7", question="What is the shape of the cell?"),
    ]
    assert set(near_duplicates.within_images([base, *again, *other])) == {"1", "2", "3"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("The nucleus is hypersegmented.", "The nucleus is hyposegmented."),
        ("The cytoplasm is granular.", "The cytoplasm is agranular."),
        ("The nucleus has 3 lobes.", "The nucleus has 5 lobes."),
        ("The cytoplasm color is blue.", "The cytoplasm color is light blue."),
        ("Lymphocytes are more common than monocytes.", "Monocytes are more common than lymphocytes."),
    ],
)
def test_opposite_statements_are_no_repeats(a: str, b: str) -> None:
    first, second = (asked(f"(True/False) {text}", "True", "true_false") for text in (a, b))
    assert near_duplicates.within_images([first, dataclasses.replace(second, id="2")]) == {}


def test_wordings_with_one_answer_recur_only_so_often() -> None:
    def many(text: str, answers: tuple[str, ...]) -> list[QA]:
        return [
            dataclasses.replace(asked(text, answers[k % len(answers)]), id=f"{text}{k}", image_id=str(k))
            for k in range(60)
        ]

    constant = many("Which cell type is most abundant in this smear?", ("Neutrophils",))
    varied = many("What is the shape of the nucleus?", ("round", "bilobed"))
    found = near_duplicates.across_images([*constant, *varied])
    assert len(found) == 60 - near_duplicates.KEPT and all(id.startswith("Which") for id in found)


def test_minhash_finds_near_equal_texts() -> None:
    base = "Several neutrophils in this smear exhibit hypersegmented nuclei with more than five lobes."
    texts = [base, base.replace("Several", "Some"), base.replace("this", "the"), "What is the color of the granules?"]
    a, b, c, d = near_duplicates.clusters(texts)
    assert a == b == c != d


def test_text_that_tells_the_answer_is_trivial(cells: list[Cell], facts: dict[str, Facts]) -> None:
    """Statements with a word that stands in true ones only, among balanced ones."""
    clean = [qa for qa in cell_questions(cells) if qa.question_type == "true_false"]
    tell = [
        dataclasses.replace(qa, id=f"{qa.id}t", question=f"{qa.question[:-1]} indeed.")
        for qa in clean
        if qa.answer == "True"
    ]
    lie = [
        dataclasses.replace(qa, id=f"{qa.id}f", question=f"{qa.question[:-1]} allegedly.")
        for qa in clean
        if qa.answer == "False"
    ]
    found = quality.SET_RULES["trivial"]([*clean, *tell, *lie])
    assert len(found) > 0.9 * len([*tell, *lie]) and not set(found) & {qa.id for qa in clean}


def test_the_command_judges_a_file_by_the_facts_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = write_job(tmp_path / "job", 1)[0]
    wrong = dataclasses.replace(asked("What type of white blood cell is this?", "Basophil"), image_id=cell.cell_id)
    files.write_jsonl(tmp_path / "q.jsonl", [wrong])
    command = ["data", "quality", str(tmp_path / "q.jsonl")]
    assert cell.label != "Basophil" and cli.main(command) == 0
    assert cli.main([*command, "--root", str(tmp_path / "job"), "--rejects", str(tmp_path / "r.jsonl")]) == 3
    assert json.loads((tmp_path / "r.jsonl").read_text())["reject_rule"] == "wrong"
    assert cli.main([*command, "--root", str(tmp_path)]) == 1
    assert "holds neither cells nor slides" in capsys.readouterr().err


def test_every_rule_is_named_and_every_reject_kept_whole() -> None:
    assert set(quality.TITLES) == set(ITEM_RULES) | set(SET_RULES)
    qa = asked("Which shape does the folded nucleus of this cell have?", "Folded")
    record = quality.reject_record(screen([qa], {}).rejected[0])
    assert record["reject_rule"] == "leaks" and "Folded" in record["reject_detail"]
    assert {name: record[name] for name in ("id", "question", "answer")} == {
        "id": "q",
        "question": qa.question,
        "answer": "Folded",
    }
