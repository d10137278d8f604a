"""A small dataset of template questions about made cells, and a stand-in model that answers from a table."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from PIL import Image

from data_prep.datasets import CELL_FEATURES, QA_FEATURES, cell_record, qa_record
from data_prep.io import write_dataset
from data_prep.qa import cell_questions
from data_prep.schema import QA, stable_hash
from pbs_jax.bench.adapters import Constant, Request, Response
from tests.data_prep.wbcatt import made_cells


def picture(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, shade, shade)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT with `cells` and `cell_qa`: 125 made cells in three splits, each with a picture of its own shade."""
    out = tmp_path_factory.mktemp("bench")
    cells = [dataclasses.replace(cell, image=picture(k)) for k, cell in enumerate(made_cells(25))]
    questions = cell_questions(cells)
    write_dataset(out, "cells", CELL_FEATURES, map(cell_record, cells), id_feature="cell_id", config={}, inputs={})
    write_dataset(out, "cell_qa", QA_FEATURES, map(qa_record, questions), id_feature="id", config={}, inputs={})
    return out


class Table:
    """Answers by looking the question up: `wrong` in ten answers are another's, as a seeded hash decides."""

    at_once = 512

    def __init__(self, questions: Sequence[QA], wrong: int = 0, seed: int = 0):
        self.name, self.seed, self.card = "table", seed, {}
        self._gold = {qa.id: qa.answer for qa in questions}
        self._wrong = wrong
        self.asked: list[Request] = []

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        self.asked += requests
        return [Response(self._answer(request)) for request in requests]

    def _answer(self, request: Request) -> str:
        gold = self._gold[request.id]
        if stable_hash("wrong", self.seed, request.id) % 10 < self._wrong:
            return {"true_false": "false" if gold == "True" else "true"}.get(request.question_type, "E")
        if request.question_type == "multiple_choice":
            return "ABCD"[request.options.index(gold)]
        return gold


class Counting(Constant):
    """Counts what it is asked; `status` decides what it answers."""

    def __init__(self, status: str = "ok"):
        super().__init__("A")
        self.asked: list[Request] = []
        self.status = status

    def generate(self, requests: Sequence[Request], mode: str) -> list[Response]:
        self.asked += requests
        return [Response("A", self.status) for _ in requests]


@pytest.fixture
def use_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Lets `bench run` ask the given adapter, whatever --model says."""

    def use(model: object) -> None:
        monkeypatch.setattr("pbs_jax.bench.run.load_adapter", lambda spec, options: model)

    return use
