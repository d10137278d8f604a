"""The registry of baselines: complete, consistent with the paper's tables, and honest about what can't be run."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest

from data_prep.schema import DataError
from pbs_jax import cli
from pbs_jax.bench.adapters import Options
from pbs_jax.bench.baselines import baselines, find_baseline, load_baseline


def test_every_model_of_tables_2_and_3_is_there_under_the_papers_name(shared: Path) -> None:
    text = (shared / "reference/paper.txt").read_text()
    second = text[text.index("Table 2:") : text.index("3.3 PBSBench")]
    rows = re.findall(r"^([A-Z][^\t\n]*)\t0\.", second, re.MULTILINE)
    third = next(line for line in text[text.index("Table 3:") :].splitlines() if line.startswith("\t\tGPT-4o"))
    found = baselines()
    assert [b.name for b in found if 2 in b.tables] == [name for name in rows if "Ours" not in name]
    assert len(third.split("\t")) - 3 == sum(3 in b.tables for b in found) == 5
    assert len(found) == len({b.key for b in found}) == 18


def test_entries_are_consistent() -> None:
    for entry in baselines():
        assert entry.backend in ("hf", "openai", "subprocess")
        assert bool(entry.revision) == bool(entry.revision_evidence)
        assert bool(entry.retires) == bool(entry.retires_evidence) == (entry.backend == "openai")
        if entry.backend == "hf" and entry.revision:
            assert re.fullmatch("[0-9a-f]{40}", entry.revision)  # a prefix is no revision to the hub


def test_retired_and_foreign_models_say_what_to_do() -> None:
    day = datetime.date(2026, 11, 30)
    with pytest.raises(DataError, match=r"Claude-4.5-Sonnet .* retired on 2026-11-30: the paper's row stands frozen"):
        load_baseline("claude-4.5-sonnet", Options(), day)
    assert not find_baseline("claude-4.5-sonnet").retired(day - datetime.timedelta(1))
    with pytest.raises(DataError, match=r"child\.py there, then --model 'subprocess:"):
        load_baseline("llava-med", Options(), day)
    with pytest.raises(DataError, match='"gpt-5" is unknown: use one of gpt-4o, '):
        load_baseline("gpt-5", Options(), day)


def test_a_baseline_carries_the_papers_name_and_its_pinned_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    from pbs_jax.bench.adapters import Constant

    asked = []

    def load(spec: str, options: Options) -> Constant:
        asked.append(spec)
        return Constant("A")

    monkeypatch.setattr("pbs_jax.bench.baselines.load_adapter", load)
    with pytest.raises(
        DataError, match=r"has nothing for its revision: give the full commit .* as --model baseline:blip2"
    ):
        load_baseline("blip2-opt-6.7b", Options())
    with pytest.raises(DataError, match="has 1d33d60 for its revision"):
        load_baseline("blip2-opt-6.7b@1d33d60", Options())  # the hub takes no short one
    load_baseline(f"blip2-opt-6.7b@{'0' * 40}", Options())
    assert asked.pop() == f"hf:Salesforce/blip2-opt-6.7b@{'0' * 40}"
    model = load_baseline("qwen2.5-vl-7b", Options())
    assert asked == ["hf:Qwen/Qwen2.5-VL-7B-Instruct@cc594898137f460bfe9f0759e9844b3ce807cfb5"]
    assert model.name == "Qwen2.5-VL-7B" and model.card["licence"] == "apache-2.0"


def test_command_prints_the_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "baselines"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(lines) == 18 + 2 and "| LLaVA-Med | llava-med | 2 | subprocess |" in "\n".join(lines)
    assert cli.main(["bench", "baselines", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 18
