"""The released PBSInstr and PBSBench files: read without loss, their recorded facts, and a balanced derivative.

As released, the right option comes first in nine of ten choices and 98 % of the cell statements are true
(reference/data_prep.md). `rebalance` shuffles options and replaces surplus true statements by statements about the
record's own options; the originals stay as they are, for comparison with the paper.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.claims import Facts
from data_prep.files import atomic_write, canonical_json, read_jsonl, write_jsonl
from data_prep.schema import QA, DataError, option_order, question_id, released_record, stable_hash
from data_prep.sources.external import recorded_class

VERSION = "1"  # of the balancing; part of the derivative's version id


def recorded_label(qa: QA) -> str:
    """The class that an out-of-domain image's folder or name records (Table 7 of the paper); "" for other images."""
    dataset, _, path = qa.image_id.partition(":")
    return recorded_class(dataset, path)


def released_facts(questions: Iterable[QA]) -> dict[str, Facts]:
    """Facts by image id, of the images whose label is known.

    A picture that lies under two folders with different labels (two APL files do) has no known label.
    """
    labels: dict[str, str] = {}
    by_file: dict[str, set[str]] = {}
    for qa in questions:
        if label := recorded_label(qa):
            labels[qa.image_id] = label
            by_file.setdefault(_file(qa), set()).add(label)
    unsure = {name for name, found in by_file.items() if len(found) > 1}
    return {id: Facts(label) for id, label in labels.items() if id.rpartition("/")[2] not in unsure}


def _file(qa: QA) -> str:
    return qa.image_id.rpartition("/")[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Rebalanced:
    """`dropped`: surplus true statements of images without a choice left to make a statement from."""

    questions: tuple[QA, ...]
    version: str
    counts: Mapping[str, int]


def rebalance(questions: Sequence[QA], seed: int = 0) -> Rebalanced:
    """Options in seeded order and as many false as true statements in every (level, domain, split).

    A surplus statement of the commoner answer is replaced by one about an option of a choice question of the same
    image, in turn the right option and a rejected one, so that neither the form nor the number tells the answer. False
    ones carry `unreviewed_negative`: nobody has checked that a rejected option is not also true of the picture.
    """
    version = f"rebalanced-{VERSION}-{_content(questions)[:12]}-{seed}"
    counts: Counter[str] = Counter()
    replaced: dict[str, QA | None] = {}
    groups: dict[tuple[str, str, str], list[QA]] = {}
    for qa in questions:
        groups.setdefault((qa.level, qa.domain, qa.split), []).append(qa)
    for group in groups.values():
        replaced |= _replacements(group, version, seed)
    out = []
    for qa in questions:
        if qa.id in replaced:
            new = replaced[qa.id]
            counts["replaced" if new else "dropped"] += 1
            if new:
                counts["unreviewed_negative"] += new.answer == "False"
                out.append(new)
        elif qa.question_type == "multiple_choice":
            order = option_order(qa.id, len(qa.options), stable_hash("rebalance", seed))
            shown = tuple(qa.options[k] for k in order)
            out.append(dataclasses.replace(qa, options=shown, provenance=_origin(qa, version)))
            counts["shuffled"] += 1
        else:
            out.append(dataclasses.replace(qa, provenance=_origin(qa, version)))
            counts["kept"] += 1
    return Rebalanced(tuple(out), version, dict(counts))


def _replacements(group: Sequence[QA], version: str, seed: int) -> dict[str, QA | None]:
    """Id of each surplus statement -> what stands in its place (None: nothing can)."""
    sides = {
        answer: [qa for qa in group if qa.question_type == "true_false" and qa.answer == answer]
        for answer in ("True", "False")
    }
    common, rare = sorted(sides.values(), key=len, reverse=True)
    ranked = sorted(common, key=lambda qa: stable_hash("surplus", seed, qa.id))
    choices: dict[str, list[QA]] = {}
    for qa in group:
        if qa.question_type == "multiple_choice":
            choices.setdefault(qa.image_id, []).append(qa)
    for found in choices.values():
        found.sort(key=lambda qa: stable_hash("stem", seed, qa.id))
    out: dict[str, QA | None] = {}
    turn = 0
    for qa in ranked[len(rare) :]:
        left = choices.get(qa.image_id)
        out[qa.id] = _about_option(left.pop(), turn % 2 == 0, version, seed) if left else None
        turn += bool(left is not None and out[qa.id])
    if turn % 2:  # one true statement too many
        last = next(id for id in reversed(out) if out[id] is not None)
        out[last] = None
    return out


def _about_option(choice: QA, true: bool, version: str, seed: int) -> QA:
    """A statement that an option is (or isn't) the answer; the false one nearest in length to the right option."""
    rejected = [option for option in choice.options if option != choice.answer]
    near = min(rejected, key=lambda o: (abs(len(o) - len(choice.answer)), stable_hash(seed, choice.id, o)))
    option = choice.answer if true else near
    question = f'(True/False) The answer to "{choice.question}" is "{option}"'
    return dataclasses.replace(
        choice,
        id=question_id("rebalanced", choice.id, question),
        question_type="true_false",
        question=question,
        answer=str(true),
        options=(),
        provenance=_origin(choice, version) | {"from": choice.id} | ({} if true else {"unreviewed_negative": True}),
    )


def _origin(qa: QA, version: str) -> dict[str, Any]:
    return {"writer": "release", **qa.provenance, "version": version}


def _content(questions: Sequence[QA]) -> str:
    return hashlib.sha256(canonical_json([released_record(qa) for qa in questions]).encode()).hexdigest()


def write_rebalanced(path: Path, out: Path, seed: int = 0) -> Iterator[str]:
    """Writes a derivative of each released file under `out` and out/rebalanced.json; yields a line per file."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .jsonl file")
    if out.resolve() in {file.resolve().parent for file in files}:
        raise DataError(f"--rebalance {out} is the folder of the originals: name another, they stay as they are")
    card = {}
    for file in files:
        made = rebalance(read_jsonl(file), seed)
        write_jsonl(out / file.name, made.questions)
        truth = Counter(qa.answer for qa in made.questions if qa.question_type == "true_false")
        source = hashlib.sha256(file.read_bytes()).hexdigest()
        card[file.name] = {
            "version": made.version, "source_sha256": source, "seed": seed,
            "counts": dict(made.counts), "true_false": dict(truth),
        }  # fmt: skip
        yield (
            f"{file.name}: {len(made.questions)} questions, {truth['True']} true and {truth['False']} false statements, "
            f"{made.counts.get('replaced', 0)} replaced, {made.counts.get('dropped', 0)} dropped, version {made.version}"
        )
    atomic_write(out / "rebalanced.json", canonical_json(card))
