"""The records of a release: questions and captions from its files, and the pictures that they are about."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep import released
from data_prep.files import sha256_file
from data_prep.materialize_units import SIDE, Picture
from data_prep.schema import QA, SPLITS, Box, DataError
from data_prep.sources import Reject

SLIDES = "S-BIAD440"


@dataclasses.dataclass(slots=True)
class Release:
    """The records of all files: questions by id, captions and the source of each picture by image id."""

    questions: dict[str, QA] = dataclasses.field(default_factory=dict)
    captions: dict[str, str] = dataclasses.field(default_factory=dict)
    splits: dict[str, str] = dataclasses.field(default_factory=dict)  # of pictures; the most held-out one named
    domains: dict[str, str] = dataclasses.field(default_factory=dict)
    sources: dict[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> sha256


def read_release(paths: Sequence[Path]) -> Release:
    """Reads question and caption files. Raises DataError naming file and line, or two questions of one id."""
    release = Release()
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not files:
        raise DataError(f"--records {', '.join(map(str, paths))}: no .jsonl file there")
    for file in files:
        if _holds_captions(file):
            _read_captions(file, release)
        else:
            for qa in released.read_jsonl(file):
                if release.questions.setdefault(qa.id, qa) != qa:
                    raise DataError(f"{file}: question {qa.id} also stands elsewhere, with other content")
                _place(release, qa.image_id, qa.split, qa.domain, qa.source)
        name = f"{file.parent.name}/{file.name}" if file.name in release.files else file.name
        release.files[name] = sha256_file(file)
    return release


def _holds_captions(file: Path) -> bool:
    if not file.is_file():
        raise DataError(f"--records {file} does not exist")
    with file.open(encoding="utf-8") as lines:
        return '"caption"' in (first := next(lines, "")) and '"question"' not in first


def _read_captions(file: Path, release: Release) -> None:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            id, source = str(record["image_id"]), dict(record["source"])
            release.captions[id] = str(record["caption"])
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{file}:{number} is no caption record ({error!r})") from error
        _place(release, id, record.get("split", "train"), record.get("domain", "id"), source)


def _place(release: Release, id: str, split: str, domain: str, source: Mapping[str, Any]) -> None:
    """The first record of a picture says where it lies (as the official code); the most held-out split wins."""
    if split not in SPLITS:
        raise DataError(f'{id}: split "{split}" is not one of {", ".join(SPLITS)}')
    release.sources.setdefault(id, source)
    release.domains.setdefault(id, domain)
    release.splits[id] = max(release.splits.get(id, split), split, key=SPLITS.index)


def release_pictures(release: Release) -> tuple[list[Picture], list[Reject]]:
    """The cells that the records are about, in id order, and those whose record does not say where they lie."""
    facts = released.released_facts(release.questions.values())
    pictures, rejects = [], []
    slides = {qa.image_id for qa in release.questions.values() if qa.level == "slide"}
    for id in sorted(release.sources.keys() - slides):
        try:
            picture = _picture(id, release)
        except KeyError as error:
            rejects.append(
                Reject(id, "unusable source", f"{id}: its source does not say where it lies: no {error.args[0]}")
            )
            continue
        except (TypeError, ValueError) as error:
            rejects.append(Reject(id, "unusable source", f"{id}: its source does not say where it lies: {error}"))
            continue
        label = facts[id].label if id in facts else ""
        pictures.append(dataclasses.replace(picture, label=label))
    return pictures, rejects


def _picture(id: str, release: Release) -> Picture:
    source = release.sources[id]
    common = Picture(
        image_id=id,
        dataset=str(source["dataset"]),
        path=str(source["path"]),
        split=release.splits[id],
        domain=release.domains[id],
        caption=release.captions.get(id, ""),
    )
    if not common.dataset:
        raise ValueError("no data set")
    if "bbox" not in source and common.dataset != SLIDES:
        return common
    slide_id, x, y = str(source["slide_id"]), int(source["patch_x"]), int(source["patch_y"])
    if int(source["patch_size"]) != SIDE:
        raise ValueError(f"patch_size {source['patch_size']}, not {SIDE}")
    if id != f"{common.dataset}:{slide_id}:{x}_{y}:{int(source['object_index']):04d}":
        raise ValueError("the id names another place than the source")
    box = Box(*(int(source["bbox"][side]) for side in ("left", "top", "right", "bottom")))
    return dataclasses.replace(common, slide_id=f"{common.dataset}:{slide_id}", x=x, y=y, box=box)
