"""The 18 baselines of the paper's Tables 2 and 3: where each lies, how it is asked, what it may, until when it answers.

baselines.json is the registry; what is not known there is null. `--model baseline:KEY` runs an entry, if it has a class
or a server; a retired one is refused, and the paper's row stands in for it behind its dagger. A revision is never
guessed: `baseline:KEY@COMMIT` names it where the registry has none.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.resources
import json
import re
from collections.abc import Sequence
from typing import Any

from data_prep.schema import DataError
from pbs_jax.bench.adapters import Adapter, Options, load_adapter
from pbs_jax.bench.tables import Table

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """`max_images` None: as many as fit. `gated`: False, or what one must ask for. `revision_evidence`: how it is known."""

    key: str
    name: str
    group: str
    tables: list[int]
    backend: str
    repository: str
    revision: str | None
    revision_evidence: str | None
    loader: str
    template: str
    images: str
    max_images: int | None
    licence: str | None
    gated: bool | str
    retires: str | None
    notes: list[str]
    retires_evidence: str | None = None

    def retired(self, today: datetime.date) -> bool:
        return self.retires is not None and today >= datetime.date.fromisoformat(self.retires)


def baselines() -> tuple[Baseline, ...]:
    """The registry, in the order of the paper's tables."""
    text = importlib.resources.files("pbs_jax.bench").joinpath("baselines.json").read_text()
    return tuple(Baseline(**entry) for entry in json.loads(text)["models"])


def find_baseline(key: str) -> Baseline:
    known = {entry.key: entry for entry in baselines()}
    if key not in known:
        raise DataError(f'baseline "{key}" is unknown: use one of {", ".join(known)}')
    return known[key]


def load_baseline(value: str, options: Options, today: datetime.date | None = None) -> Adapter:
    """The model of KEY or KEY@COMMIT, under the paper's name.

    Raises DataError for a retired one, one without a class here, or one without a full commit.
    """
    key, _, asked = value.partition("@")
    entry = find_baseline(key)
    if entry.retired(today or datetime.date.today()):
        raise DataError(
            f"{entry.name} ({entry.repository}) was retired on {entry.retires}: the paper's row stands frozen behind its "
            f"dagger; a server that still answers is asked with --model openai:{entry.repository}"
        )
    if entry.backend == "subprocess":
        raise DataError(
            f"{entry.name} needs an environment of its own ({entry.loader}): write its answer function with "
            "pbs_jax/bench/child.py there, then --model 'subprocess:ENVIRONMENT/bin/python SCRIPT'"
        )
    source = entry.repository
    if entry.backend == "hf":
        commit = asked or entry.revision or "nothing"
        if not COMMIT.fullmatch(commit):
            raise DataError(
                f"{entry.name} has {commit} for its revision: give the full commit of {entry.repository}, 40 digits, as "
                f"--model baseline:{key}@COMMIT ({' '.join(entry.notes)})"
            )
        source += f"@{commit}"
    model = load_adapter(f"{entry.backend}:{source}", options)
    model.name = entry.name
    model.card = {**model.card, "baseline": entry.key, "max_images": entry.max_images, "licence": entry.licence}
    return model


def to_table(entries: Sequence[Baseline], today: datetime.date) -> Table:
    """What `pbs bench baselines` prints."""
    rows = tuple(
        (
            entry.name,
            entry.key,
            ", ".join(map(str, entry.tables)),
            entry.backend,
            f"{entry.repository}@{(entry.revision or 'not pinned')[:10]}"
            if entry.backend != "openai"
            else entry.repository,
            "no limit" if entry.max_images is None else f"{entry.max_images}",
            entry.licence or "not known",
            str(entry.gated or "no"),
            f"{entry.retires}{' †' if entry.retired(today) else ''}" if entry.retires else "",
        )
        for entry in entries
    )
    header = (
        "Model",
        "--model baseline:",
        "Table",
        "Backend",
        "Repository@revision",
        "Pictures",
        "Licence",
        "Gated",
        "Retires",
    )
    notes = (
        f"{sum(e.backend == 'hf' for e in entries)} run in transformers here, {sum(e.backend == 'openai' for e in entries)} behind a "
        f"server, {sum(e.backend == 'subprocess' for e in entries)} need an environment of their own (subprocess:).",
        "† retired: the paper's row stands in, frozen.",
    )
    return Table("Baselines of the paper's Tables 2 and 3", header, rows, notes)


def to_json(entries: Sequence[Baseline]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(entry) for entry in entries]
