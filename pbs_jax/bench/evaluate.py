"""From replies to numbers: every (row, track, question type, task, profile, metric) with n, spread, interval and
signature.

A row is a model (one reply list per seed) or a blind baseline; all rows answer the same asked questions, so one
resampling of clusters serves all rows, profiles and metrics of a group. Errors are missing data: they lower coverage,
not the score.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from data_prep import stats
from data_prep.progress import progress
from data_prep.schema import QA, QUESTION_TYPES, DataError
from pbs_jax.bench import validity
from pbs_jax.bench.metrics import INVALID, METRICS, Metric, score_answer
from pbs_jax.bench.number import Columns, number
from pbs_jax.bench.records import CLUSTERS
from pbs_jax.bench.similarity import Similarity

SMALL = 10  # below it, an interval says nothing
RANKABLE = 20  # fewer answers of the rarer truth value can't rank models
QUESTION_DRAWS = 1000  # the paper's B is in the hundreds to a thousand
_PATIENT = re.compile(r"Patient_\w+")
ALL = "all"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """`replies[seed][k]` answers the k-th asked question, None where there is no answer. `kind`: blind or model."""

    name: str
    kind: str
    replies: tuple[tuple[str | None, ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One number. `seeds` are the single seeds' values, `sd` is by question, `low` to `high` the clustered interval."""

    row: str
    rank: int  # place of the row among all rows
    kind: str
    track: str
    question_type: str
    task: str
    profile: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    sd: float | None
    n: int
    clusters: int
    coverage: float
    design_effect: float | None
    seeds: tuple[float, ...]
    signature: str
    notes: tuple[str, ...] = ()
    t_low: float | None = None  # with few clusters also the interval by Student's t on C - 1 degrees of freedom
    t_high: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    profiles: tuple[str, ...] = ("paper", "robust")
    cluster: str = "auto"
    draws: int = stats.DRAWS
    seed: int = 0
    similarity: Similarity | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What else belongs to a number's signature; numbers with different ones must not share a table."""

    answer_modes: Mapping[str, str]  # by question type
    protocol: str
    dataset_id: str

    def signature(self, definition: str, question_type: str) -> str:
        return "|".join(
            (definition, self.answer_modes.get(question_type, "generate"), self.protocol, f"ds:{self.dataset_id[:12]}")
        )


def track_of(qa: QA) -> str:
    return f"{qa.level}_{qa.domain}"


def cluster_of(qa: QA, level: str) -> str:
    """Name of the unit whose questions stand or fall together. `auto`: patient, else slide, else image."""
    if level not in CLUSTERS:
        raise DataError(f'cluster "{level}" is unknown: use one of {", ".join(CLUSTERS)}')
    path = _PATIENT.search(str(qa.source.get("path", "")))
    patient = qa.source.get("patient_id") or (path.group() if path else "")
    slide = qa.source.get("slide_id") or (qa.image_id if qa.level == "slide" else "")
    names = {"patient": patient, "slide": slide, "image": qa.image_id, "question": qa.id}
    if level == "auto":
        return next(str(name) for name in names.values() if name)
    if not names[level]:
        raise DataError(f"question {qa.id} names no {level}: use --cluster image")
    return str(names[level])


def evaluate(asked: Sequence[QA], rows: Sequence[Row], origin: Origin, settings: Settings) -> list[Cell]:
    """All cells, in the order of tracks, question types, tasks, rows. `asked` holds options as shown.

    A question asked in several option orders (circular) counts once: its answers are averaged, `accuracy_strict`
    wants all right.
    """
    work = [
        (r, profile, s) for profile in settings.profiles for r, row in enumerate(rows) for s in range(len(row.replies))
    ]
    columns = {
        (r, profile, s): reply_columns(asked, rows[r].replies[s], profile, settings)
        for r, profile, s in progress(work, desc="scoring")
    }
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for k, qa in enumerate(asked):
        for task in (ALL, qa.task):
            groups[track_of(qa), qa.question_type, task].append(k)
    order = sorted(groups, key=lambda g: (g[0], QUESTION_TYPES.index(g[1]), g[2] != ALL, g[2]))
    doubts = validity.verdicts(asked)
    cells = []
    for track, question_type, task in progress(order, desc="intervals"):
        key = track, question_type, task
        group = _Group.of(asked, groups[key], key, settings, doubts.get((track, task, question_type), ()))
        cells += _cells(group, rows, columns, origin, settings)
    return cells


Key = tuple[int, str, int]  # row, profile, seed


def reply_columns(asked: Sequence[QA], replies: Sequence[str | None], profile: str, settings: Settings) -> Columns:
    """The scores of one row's replies in one seed, by column name over all asked questions."""
    values: Columns = defaultdict(lambda: np.full(len(asked), np.nan))
    scored: dict[tuple[str, ...], tuple[list[int], list[tuple[float, ...]]]] = {}  # by the columns' names
    for k, (qa, reply) in enumerate(zip(asked, replies, strict=True)):
        if reply is not None:
            columns = score_answer(profile, qa.question_type, reply, qa.answer, qa.options).columns
            places, numbers = scored.setdefault(tuple(columns), ([], []))
            places.append(k)
            numbers.append(tuple(columns.values()))
    for names, (places, numbers) in scored.items():
        for name, column in zip(names, np.array(numbers, np.float64).T, strict=True):
            values[name][places] = column
    if settings.similarity:
        spoken = [k for k, qa in enumerate(asked) if qa.question_type == "open" and replies[k] is not None]
        said, gold = [str(replies[k]) for k in spoken], [asked[k].answer for k in spoken]
        if spoken:
            values["similarity"][spoken] = settings.similarity.score(said, gold)
    return values


@dataclasses.dataclass(frozen=True)
class _Group:
    """The questions of one (track, type, task). `places[k]` is the question among `ids` that the k-th member asks."""

    track: str
    question_type: str
    task: str
    members: np.ndarray
    places: np.ndarray
    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    strata: tuple[str, ...]
    rarer_truth: int
    verdicts: tuple[str, ...]  # why the group does not measure what its task is called

    @classmethod
    def of(
        cls,
        asked: Sequence[QA],
        members: Sequence[int],
        key: tuple[str, str, str],
        settings: Settings,
        verdicts: tuple[str, ...] = (),
    ) -> _Group:
        first: dict[str, QA] = {}
        for k in members:
            first.setdefault(asked[k].id, asked[k])
        place = {id: k for k, id in enumerate(first)}
        return cls(
            *key,
            members=np.array(members),
            places=np.array([place[asked[k].id] for k in members]),
            ids=tuple(first),
            clusters=tuple(cluster_of(qa, settings.cluster) for qa in first.values()),
            strata=tuple(str(qa.source.get("dataset", "")) for qa in first.values()),
            rarer_truth=min(sum(qa.answer == truth for qa in first.values()) for truth in ("True", "False")),
            verdicts=verdicts,
        )

    @property
    def circular(self) -> bool:
        return len(self.ids) < len(self.members)

    def block(self, values: Columns, metrics: Sequence[Metric]) -> Columns:
        """The group's part of the columns that the metrics need, a row per question; empty if none was answered."""
        names = {name for metric in metrics for name in metric.columns if name in values}
        block = {name: values[name][self.members] for name in sorted(names)}
        if all(np.isnan(part).all() for part in block.values()):
            return {}
        if self.circular:
            counts = np.bincount(self.places, minlength=len(self.ids))
            block = {n: np.bincount(self.places, part, len(self.ids)) / counts for n, part in block.items()}
            if "right" in block:
                block["strict"] = np.where(np.isnan(block["right"]), np.nan, block["right"] > 1 - 1e-9)
        return block | {"n": np.where(np.isnan(next(iter(block.values()))), 0.0, 1.0)}


def _metrics(group: _Group, settings: Settings) -> list[Metric]:
    chosen = list(METRICS[group.question_type])
    if group.question_type == "open" and settings.similarity:
        definition = dict.fromkeys(settings.profiles, settings.similarity.definition)
        chosen.append(Metric("similarity", ("similarity",), lambda sums: sums["similarity"] / sums["n"], definition))
    if group.question_type == "multiple_choice" and group.circular:
        definition = {profile: f"strict-{text}" for profile, text in chosen[0].definition.items()}
        chosen.append(Metric("accuracy_strict", ("strict",), lambda sums: sums["strict"] / sums["n"], definition))
    return [*chosen, INVALID]


def _cells(
    group: _Group, rows: Sequence[Row], columns: Mapping[Key, Columns], origin: Origin, settings: Settings
) -> list[Cell]:
    metrics = _metrics(group, settings)
    blocks = {key: block for key, values in columns.items() if (block := group.block(values, metrics))}
    if not blocks:
        return []
    # One draw of clusters for every column: all rows are compared on the same resamples. Equal columns are drawn once.
    names = [(key, name) for key, block in blocks.items() for name in block]
    stacked = np.column_stack([np.nan_to_num(blocks[key][name]) for key, name in names])
    distinct, where = np.unique(stacked, axis=1, return_inverse=True)
    draws = stats.resampled_sums(
        distinct, group.clusters, strata=group.strata, draws=settings.draws, seed=settings.seed
    )
    question_draws = None
    if not all(metric.is_mean for metric in metrics):  # a mean's spread has a closed form
        question_draws = stats.resampled_sums(distinct, group.ids, draws=QUESTION_DRAWS, seed=settings.seed)
    samples: dict[Key, Columns] = defaultdict(dict)
    by_question: dict[Key, Columns] = defaultdict(dict)
    for (key, name), column in zip(names, where.ravel(), strict=True):
        samples[key][name] = draws[:, column]
        if question_draws is not None:
            by_question[key][name] = question_draws[:, column]
    clusters = len(set(zip(group.strata, group.clusters, strict=True)))
    cells = []
    for profile in settings.profiles:
        for r, row in enumerate(rows):
            keys = [key for key in blocks if key[:2] == (r, profile)]
            for metric in metrics if keys else ():
                answered = int(min(blocks[key]["n"].sum() for key in keys))
                notes = [*filter(None, [row.note]), *group.verdicts]
                if group.question_type == "true_false" and group.rarer_truth < RANKABLE:
                    notes.append(f"not rankable: {group.rarer_truth} of the rarer truth value")
                if answered < SMALL:
                    notes.append("small n")
                seeds = [(blocks[key], samples[key], by_question[key]) for key in keys]
                found = number(metric, seeds, clusters)
                cells.append(
                    Cell(
                        row=row.name,
                        rank=r,
                        kind=row.kind,
                        track=group.track,
                        question_type=group.question_type,
                        task=group.task,
                        profile=profile,
                        metric=metric.name,
                        n=answered,
                        clusters=clusters,
                        coverage=answered / len(group.ids),
                        signature=origin.signature(metric.definition[profile], group.question_type),
                        notes=tuple(notes),
                        **found,
                    )
                )
    return cells
