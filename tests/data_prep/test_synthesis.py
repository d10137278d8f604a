"""Captions and questions by templates and by a (fake) language model: forms, repair, balance, and what stays private."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from data_prep import cards, derived, prompt_files, providers, quality, synthesis, written
from data_prep.datasets import read_cells, read_questions
from data_prep.io import write_dataset
from data_prep.knowledge import TOPICS, knowledge_questions
from data_prep.llm import open_client
from data_prep.schema import WHITE_CELL_CLASSES, Cell, DataError
from data_prep.slide_datasets import SLIDE_FEATURES, Slide, slide_record
from pbs_jax import cli
from pbs_jax.bench.adapters import Request as BenchRequest
from tests.data_prep.cell_job import picture, write_job
from tests.data_prep.llm_server import Action, Service, asked, completion, failure, serving
from tests.data_prep.test_llm import FAST
from tests.data_prep.wbcatt import made_cells

pytest.importorskip("openai")
SECRET = "hypolobated zebra"  # keyword comments: context for the writer only


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("job")
    write_job(out, 4)
    return out


def caption(**fields: Any) -> str:
    plain = {"appearance": "A cell with a folded nucleus and pale cytoplasm.", "normal": True}
    return json.dumps({**plain, "abnormalities": [], "conditions": [], **fields})


def question(kind: str, text: str, answer: str, **fields: Any) -> dict[str, Any]:
    base = {"question_type": kind, "task": "morphology", "question": text, "answer": answer, "options": []}
    return {**base, "opposite": "", "evidence": ["appearance"], **fields}


def questions(*items: dict[str, Any]) -> str:
    plain = [
        question("true_false", "The cytoplasm border is smooth.", "True", opposite="The cytoplasm border is ragged."),
        question("open", "How does the cytoplasm border look?", "It is smooth all around."),
        question("multiple_choice", "Which border is seen?", "Smooth membrane",
                 options=["Smooth membrane", "Ragged membrane", "Double membrane"]),
    ]  # fmt: skip
    return json.dumps({"questions": [*plain, *items]})


def sound(text: str, nth: int, body: Mapping[str, Any]) -> Action:
    return completion(caption() if "Describe this cell" in text else questions())


def model(store: Path, service: Service, **options: Any) -> providers.Model:
    client = open_client(store, provider="openai", base_url=service.url, retry=FAST, timeout=2.0)
    return providers.Model(client, "fake", **options)


def cases(count: int = 4) -> list[Cell]:
    return [dataclasses.replace(cell, image=picture(), comments=SECRET) for cell in made_cells(3)[:count]]


def test_a_models_answers_become_balanced_records(tmp_path: Path) -> None:
    with serving(Service(sound)) as service:
        found = model(tmp_path, service).questions(cases(10), {})
    records = [qa for result in found for qa in result.value or ()]
    truth = Counter(qa.answer for qa in records if qa.question_type == "true_false")
    assert truth == {"True": 5, "False": 5} and len(records) == 30
    for qa in records:
        assert "opposite" not in qa.provenance and qa.provenance["evidence"] == ["appearance"]
        if qa.question_type == "true_false":
            assert ("smooth" in qa.question) == (qa.answer == "True")


def test_context_never_reaches_the_record(tmp_path: Path) -> None:
    """Type, keywords and caption go to the writer; the record and the benchmark's request hold none of it."""
    with serving(Service(sound)) as service:
        cell = cases(1)[0]
        found = model(tmp_path, service).questions([cell], {cell.cell_id: "A caption of context."})
        told = json.dumps(service.bodies)
    assert SECRET in told and "A caption of context" in told and f"Cell type: {cell.label}" in told
    exported = json.dumps([dataclasses.asdict(qa) for qa in found[0].value or ()])
    for context in (SECRET, "A caption of context", f'"{cell.label}"', "cell_type"):
        assert context not in exported.replace(cell.cell_id, "")
    asked_with = {field.name for field in dataclasses.fields(BenchRequest)}
    assert not asked_with & {"label", "comments", "caption", "diagnosis", "answer", "provenance", "source", "image_id"}


def test_no_id_leaves_the_machine(tmp_path: Path) -> None:
    named = dataclasses.replace(
        cases(1)[0], cell_id="PBC:x/BA_101611", slide_id="SLIDE_77", patient_id="P-4711", patch_id="SLIDE_77:0_0"
    )
    with serving(Service(sound)) as service:
        writer = model(tmp_path, service)
        writer.captions([named])
        writer.questions([named], {})
        sent = json.dumps(service.bodies) + json.dumps(service.headers)
        with pytest.raises(DataError, match="may not leave the machine"):
            writer.questions([named], {named.cell_id: "A cell of P-4711."})
    assert not [word for word in providers.private_words(named) if word in sent]


@pytest.mark.parametrize("comments", ["seen on 3.4.2019", "patient is 60", "mail a@b.c", "case 104711", "long " * 30])
def test_comments_that_are_no_keywords_are_not_sent(comments: str) -> None:
    with pytest.raises(DataError, match="no keywords"):
        prompt_files.keywords(comments)


def test_fields_outside_the_allow_list_are_refused() -> None:
    with pytest.raises(DataError, match="patient_id may not leave"):
        prompt_files.load("cell_caption").render({"cell_type": "x", "comments": "y", "patient_id": "1"})


def test_pictures_are_sent_without_what_a_camera_wrote() -> None:
    with Image.open(io.BytesIO(picture())) as plain:
        out = io.BytesIO()
        exif = Image.Exif()
        exif[0x010E] = "patient P-4711"
        plain.save(out, "JPEG", exif=exif, comment=b"P-4711")
    cleaned = prompt_files.clean_image(out.getvalue())
    assert b"P-4711" in out.getvalue() and b"P-4711" not in cleaned
    with Image.open(io.BytesIO(cleaned)) as a, Image.open(io.BytesIO(out.getvalue())) as b:
        assert a.tobytes() == b.convert("RGB").tobytes()
    assert prompt_files.clean_image(picture()) == picture()


BROKEN = {
    "cut short": '{"appearance": "A cell wi',
    "no JSON": "It is a nice cell.",
    "wrong field": caption(colour="blue"),
    "condition without finding": caption(conditions=["sepsis"]),
    "called normal with a finding": caption(abnormalities=["torn membrane"]),
    "nothing": None,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_one_repair_try_then_invalid(tmp_path: Path, fault: str) -> None:
    """The second case is mended at the repair; the first never is. Neither is asked a third time."""
    cells = cases(2)

    def plan(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        repair = len(body["messages"]) > 2
        mends = f"Cell type: {cells[1].label}" in text
        return completion(caption() if repair and mends else BROKEN[fault])

    with serving(Service(plan)) as service:
        bad, good = model(tmp_path, service).captions(cells)
        bodies = service.bodies
    assert (bad.status, good.status) == ("invalid", "ok") and bad.detail and good.value
    assert len(bodies) == 4
    assert "could not be used" in bodies[-1]["messages"][-1]["content"]


def test_a_code_fence_around_json_is_let_pass() -> None:
    found = written.parse("cell_caption", f"```json\n{caption()}\n```")
    assert isinstance(found, written.CellCaption)


@pytest.mark.parametrize(
    "bad",
    [
        question("true_false", "The nucleus is round.", "True"),
        question("true_false", "The nucleus is round.", "False", opposite="The nucleus is oval."),
        question("multiple_choice", "Which nucleus is it?", "Round", options=["Round", "Oval"]),
        question("multiple_choice", "Which nucleus is it?", "round", options=["Round", "Oval", "Folded"]),
        question("fill_blank", "What is the nucleus like?", "a b c d e f g h i j"),
        question("fill_blank", "What is the nucleus like?", "round", options=["a", "b", "c"]),
        question("open", "What is the nucleus like?", "It is round. It is dark. It is big."),
        question("open", "Which diagnosis fits?", "None.", task="diagnosis"),
        question("essay", "What is the nucleus like?", "Round"),
    ],
)
def test_questions_of_the_wrong_form_are_named(bad: dict[str, Any]) -> None:
    found = written.parse("cell_qa", json.dumps({"questions": [bad]}))
    assert isinstance(found, str) and found.startswith("questions.0")


def test_conditions_are_put_in_non_committal_words() -> None:
    found = written.parse(
        "cell_caption", caption(normal=False, abnormalities=["many lobes"], conditions=["folate deficiency"])
    )
    assert isinstance(found, written.CellCaption)
    assert found.text().endswith("Unusual: many lobes. Such changes may be seen in folate deficiency.")


def test_a_slides_caption_has_three_parts_and_no_differential_of_few_cells(tmp_path: Path) -> None:
    many = Slide("S1", "train", 10, 10, 4, 4, diagnosis="Anemia", counts={"Neutrophil": 60, "Lymphocyte": 40})
    few = dataclasses.replace(many, slide_id="S2", diagnosis="", counts={"Neutrophil": 5})
    slides = [providers.SlideCase(slide, ("A cell with a folded nucleus.",)) for slide in (many, few)]
    summary = json.dumps({"summary": "Most described cells look ordinary."})
    with serving(Service(lambda *_: completion(summary))) as service:
        first, second = model(tmp_path, service).captions(slides)
        told = [asked(body) for body in service.bodies]
    assert first.value == (
        "Recorded diagnosis: Anemia. Estimated differential: Neutrophil 60.0 % (50.2-69.1), Lymphocyte 40.0 % "
        "(30.9-49.8), Monocyte 0.0 % (0.0-3.7), Eosinophil 0.0 % (0.0-3.7), Basophil 0.0 % (0.0-3.7) of 100 cells. "
        "Most described cells look ordinary."
    )
    assert "no differential: 5 classified white cells" in str(second.value)
    assert any("Neutrophil 60.0 %" in text for text in told) and not any("S1" in text for text in told)


def test_summaries_are_written_from_the_captions_of_the_slides_cells(tmp_path: Path) -> None:
    slides = [slide_record(Slide(f"S{k}", "train", 9, 9, 4, 4)) for k in range(2)]
    common: dict[str, Any] = {"config": {}, "inputs": {}, "split_level": "slide"}
    job = synthesis.InstructJob(tmp_path, tmp_path / "out", level="slide")
    write_dataset(tmp_path, "slides", SLIDE_FEATURES, slides, id_feature="slide_id", records_in=2, **common)
    cells = [dataclasses.replace(cell, slide_id="S1", caption="", image=picture()) for cell in made_cells(1)]
    derived.write_cells(tmp_path, cells, [], records_in=5, **common)
    assert [case.captions for case in synthesis.load_cases(job)] == [(), ()]  # type: ignore[union-attr]
    captioned = [dataclasses.replace(cell, caption=f"A {cell.label}.") for cell in cells]
    derived.write_cells(tmp_path / "written", captioned, [], records_in=5, **common)
    _, second = synthesis.load_cases(dataclasses.replace(job, captions=tmp_path / "written"))
    assert isinstance(second, providers.SlideCase) and set(second.captions) == {cell.caption for cell in captioned}
    assert "- A Basophil." in providers.context(second, "slide_caption", "", {})["captions"]
    with pytest.raises(DataError, match=r"--captions .* has no cells"):
        synthesis.load_cases(dataclasses.replace(job, captions=tmp_path / "none"))


def test_a_recorded_diagnosis_is_asked_for_and_never_named() -> None:
    names = ("Megaloblastic anemia", "Myelodysplastic syndrome", "No anemia")
    slides = [
        Slide(f"S{k}", "train", 9, 9, 4, 4, diagnosis=names[k % 3], counts={"Neutrophil": 60 + k, "Lymphocyte": 40})
        for k in range(9)
    ]
    cases = [providers.SlideCase(slide) for slide in slides]
    found = providers.Template().questions(cases, {})
    asked = [qa for result in found for qa in result.value or () if qa.task == "diagnosis"]
    assert {qa.question_type for qa in asked} == {"fill_blank", "multiple_choice"}
    assert {qa.image_id: qa.answer for qa in asked} == {slide.slide_id: slide.diagnosis for slide in slides}
    assert not [qa for qa in asked for name in names if name.split()[0].lower() in qa.question.lower()]
    assert not quality.screen(asked, synthesis.facts_of(cases)).rejected


def test_a_prompts_version_follows_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prompt_files.load("cell_qa")
    text = (prompt_files.FOLDER / "cell_qa.v1.txt").read_text()
    (tmp_path / "cell_qa.v1.txt").write_text(text + " ")
    monkeypatch.setattr(prompt_files, "FOLDER", tmp_path)
    assert prompt_files.load("cell_qa").version != before.version
    with pytest.raises(DataError, match=r"there is no prompt cell_caption\.v1"):
        prompt_files.load("cell_caption")


def test_knowledge_follows_the_type_and_is_balanced() -> None:
    cells = made_cells(24)
    found = knowledge_questions(cells, 1.5)
    label = {cell.cell_id: cell.label for cell in cells}
    assert {qa.question_type for qa in found} == {"true_false", "multiple_choice", "fill_blank"}
    golds: dict[tuple[str, ...], Counter[str]] = {}
    for qa in found:
        topic = next(
            t for t in TOPICS.values() if qa.question in (t.choice, t.blank) or qa.question_type == "true_false"
        )
        if qa.question_type != "true_false":
            assert qa.answer == topic.phrase(label[qa.image_id])
        if qa.question_type == "multiple_choice":
            golds.setdefault((qa.split, qa.question, *qa.options), Counter())[qa.answer] += 1
    for counts in golds.values():
        assert max(counts.values()) - min(counts.values()) <= 1
    assert all(len(set(topic.phrases)) == len(WHITE_CELL_CLASSES) for topic in TOPICS.values())


def test_the_command_by_template_writes_a_job_of_its_own(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["data", "instruct", "--root", str(root), "--out", str(out), "--provider", "template", "--knowledge", "1.5"]
    assert cli.main(args) in (0, 3)
    kept = list(read_questions(out))
    summary = json.loads((out / synthesis.SUMMARY).read_text())["questions"]
    rejects = (out / synthesis.REJECTS).read_text().splitlines()
    assert summary["in"] == summary["kept"] + len(rejects) and summary["kept"] == len(kept) > 60
    assert any(qa.task == "knowledge" for qa in kept) and len(list(read_cells(out))) == 20
    assert cli.main(["data", "card", str(out)]) == 0
    card = (out / "CARD.md").read_text()
    assert all(title in card for title in ("Cohort", "Noisy labels", "Surrogate differential", "Closed loop"))
    assert cli.main(["data", "card", str(root), "--out", str(tmp_path / "job.md")]) == 0
    assert "cells: content id" in (tmp_path / "job.md").read_text()
    assert cli.main(["data", "instruct", "--root", str(out), "--out", str(out), "--provider", "template"]) == 1


def test_the_command_by_model_is_resumed_replayed_and_never_pays_twice(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "store")

    def command(out: str, provider: str, *more: str) -> list[str]:
        args = ["data", "instruct", "--root", str(root), "--out", str(tmp_path / out), "--store", store]
        return [*args, "--provider", provider, "--model", "fake", "--limit", "4", *more]

    with serving(Service(sound)) as service:
        base = ("--base-url", service.url)
        assert cli.main(command("a", "openai", *base, "--dry-run")) == 0
        assert "4 to send" in capsys.readouterr().out and not service.seen
        assert cli.main(command("a", "openai", *base, "--max-requests", "5")) == 3
        assert "the same command goes on" in capsys.readouterr().err
        assert cli.main(command("a", "openai", *base)) in (0, 3)
        assert sum(service.paid.values()) == 8
        assert cli.main(command("b", "openai", *base)) in (0, 3)
        assert sum(service.paid.values()) == 8
    assert cli.main(command("c", "replay")) in (0, 3)
    a, b, c = ((tmp_path / name / synthesis.QUESTIONS).read_text() for name in "abc")
    assert a == b == c and len(a.splitlines()) == 12
    assert [cell.caption for cell in read_cells(tmp_path / "a")] == [
        "A cell with a folded nucleus and pale cytoplasm."
    ] * 4


def test_with_every_fault_each_case_is_kept_or_in_the_rejects(root: Path, tmp_path: Path) -> None:
    """Twenty cells, most of them in trouble: kept questions, rule rejects and lacking answers add up."""
    faults: dict[str, Action] = {
        "Monocyte": failure(400, "content_filter"), "Basophil": completion('{"appear', "length"),
        "Eosinophil": failure(500), "Lymphocyte": completion(None),
    }  # fmt: skip

    def plan(text: str, nth: int, body: Mapping[str, Any]) -> Action:
        type_ = next(line.split()[-1] for line in text.splitlines() if line.startswith("Cell type"))
        if "Describe this cell" in text:
            return faults[type_] if type_ in ("Monocyte", "Basophil") else completion(caption())
        worse = question("fill_blank", "Which age does the patient have, given this cell?", "Sixty")
        return faults.get(type_) or completion(questions(worse))

    with serving(Service(plan)) as service:
        client = open_client(tmp_path / "store", provider="openai", base_url=service.url, retry=FAST)
        job = synthesis.InstructJob(root, tmp_path / "out")
        outcome = synthesis.run(job, providers.Model(client, "fake"), say=lambda line: None)
    kept = [json.loads(line) for line in (job.out / synthesis.QUESTIONS).read_text().splitlines()]
    rejects = [json.loads(line) for line in (job.out / synthesis.REJECTS).read_text().splitlines()]
    summary = json.loads((job.out / synthesis.SUMMARY).read_text())
    lacking = [line for line in rejects if "question" not in line]
    broken = Counter(line["reject_rule"] for line in rejects if "question" in line)
    assert summary["cases"] == 20 and summary["statuses"] == {
        "captions": {"ok": 12, "refusal": 4, "invalid": 4},
        "questions": {"ok": 4, "error": 4, "invalid": 4},
    }
    assert Counter(line["reject_rule"] for line in lacking) == {"refusal": 4, "invalid": 8, "error": 4}
    assert all(line["reject_detail"] for line in lacking) and outcome.unfinished == 4
    assert broken["not_visible"] == 4 and len(kept) == summary["questions"]["kept"] == outcome.kept
    assert summary["questions"]["in"] == len(kept) + sum(broken.values()) == 4 * 4
    assert len(list(read_cells(job.out))) == 12


def test_captions_or_questions_alone(root: Path, tmp_path: Path) -> None:
    with serving(Service(sound)) as service:
        writer = model(tmp_path / "store", service)
        only_captions = synthesis.InstructJob(root, tmp_path / "c", limit=3, parts="captions")
        synthesis.run(only_captions, writer, say=lambda line: None)
        only_questions = dataclasses.replace(only_captions, out=tmp_path / "q", parts="questions")
        synthesis.run(only_questions, writer, say=lambda line: None)
        asked_for = [("Describe this cell" in asked(body)) for body in service.bodies]
    assert asked_for == [True] * 3 + [False] * 3
    assert {cell.caption for cell in read_cells(only_captions.out)} == {
        "A cell with a folded nucleus and pale cytoplasm."
    }
    before = {cell.cell_id: cell.caption for cell in read_cells(root)}
    assert all(before[cell.cell_id] == cell.caption for cell in read_cells(only_questions.out))
    assert not (only_captions.out / "cell_qa").exists() and len(list(read_questions(only_questions.out))) == 9


def test_a_failed_gate_is_said_and_the_paid_answers_are_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(questions: object, say: object) -> None:
        raise DataError("the text alone answers too much")

    monkeypatch.setattr(synthesis.derived, "run_probe", fail)
    args = ["data", "instruct", "--root", str(root), "--out", str(tmp_path), "--provider", "template"]
    assert cli.main(args) == 1
    assert "text alone answers too much" in capsys.readouterr().err
    assert json.loads((tmp_path / synthesis.SUMMARY).read_text())["gate"] == "the text alone answers too much"
    assert (tmp_path / synthesis.QUESTIONS).read_text()


def test_cards_carry_the_limits() -> None:
    data = cards.data_card("x", {"provider": "openai"}, [cards.RELEASED_NOTE])
    model = cards.model_card("y", {"size": "nano"})
    for words in ("Cohort", "Noisy labels", "Surrogate differential", "Closed loop", "Hallucination"):
        assert words in data
    assert "Hallucination" in model and "Not a diagnostic device" in data and "Not a diagnostic device" in model
