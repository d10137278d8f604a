"""Another laboratory's stain is matched on real cells: a known change is undone, few pictures are left alone, and a slide
job matches each slide by its own cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data_prep import slide_write, subtype
from data_prep.schema import DataError
from data_prep.stain_match import ENOUGH, Density, density_of, matched
from pbs_jax.train import handover


@pytest.fixture(scope="module")
def cells(shared: Path) -> np.ndarray:
    """uint8[24, 96, 96, 3] of the PBC set."""
    files = sorted((shared / "data/cells/pbc_barcelona").rglob("*.jpg"))
    return np.stack(
        [np.asarray(Image.open(file).convert("RGB").resize((96, 96))) for file in files[:: len(files) // 24]]
    )[:24]


def test_a_paler_and_warmer_stain_is_undone(cells: np.ndarray) -> None:
    # Densities of 0.8, 0.7 and 0.9 times, and a yellower lamp.
    density = -np.log((cells + 1.0) / 256.0) * [0.8, 0.7, 0.9] + [0.0, 0.05, 0.2]
    other = np.clip(np.round(256 * np.exp(-density) - 1), 0, 255).astype(np.uint8)
    learnt, own = density_of(cells), density_of(other)
    assert learnt and own
    back = np.stack([matched(picture, own, learnt) for picture in other]).astype(int)
    assert np.abs(other.astype(int) - cells).mean() > 10
    assert np.abs(back - cells).mean() < 1.5
    np.testing.assert_array_equal(matched(cells, learnt, learnt), cells)


def test_too_few_or_empty_pictures_have_no_stain(cells: np.ndarray) -> None:
    assert density_of(cells[: ENOUGH - 1]) is None
    assert density_of(np.full((ENOUGH, 8, 8, 3), 255, np.uint8)) is None
    assert isinstance(density_of(cells[:ENOUGH]), Density)


def test_a_slides_cells_are_matched_among_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Cell:
        slide_id: str
        image: bytes
        label: str = ""
        label_source: str = ""
        confidence: float = 0.0
        comments: str = ""

    @dataclasses.dataclass
    class Slide:
        found: list[Cell]

        def cells(self) -> Iterator[Cell]:
            return iter(self.found)

    asked = []

    def classifier(backbone: Path, *, match_stain: bool, target: str) -> Any:
        def classify(images: Iterable[bytes], alike: Iterable[bytes] = ()) -> Iterator[tuple[str, float]]:
            named = list(images)
            asked.append((named, list(alike)))
            yield from (("Monocyte", 0.9) for _ in named)

        assert match_stain
        return classify

    monkeypatch.setattr(slide_write.subtype, "classifier", classifier)
    slides = [Slide([Cell("a", b"1"), Cell("a", b"2")]), Slide([Cell("b", b"3")])]
    counted: dict[str, Any] = {"a": slide_write.Counter(), "b": slide_write.Counter()}
    job = slide_write.SlideJob(Path("out"), backbone=Path("0a"), match_stain=True)
    named = list(slide_write._named(job, slides, 3, counted))  # type: ignore[arg-type]
    assert [cell.label for cell in named] == ["Monocyte"] * 3 and counted["a"]["Monocyte"] == 2
    assert asked == [([b"1", b"2"], [b"1", b"2"]), ([b"3"], [b"3"])]
    assert job.config()["match_stain"] and "match_stain" not in slide_write.SlideJob(Path("out")).config()


def test_a_backbone_that_does_not_say_its_stain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "read", lambda workdir, phases: {"phase": "backbone", "facts": {"size": "nano"}})
    monkeypatch.setattr(handover, "load", lambda workdir, names: {"backbone": {}, "head": {}})
    with pytest.raises(DataError, match="old does not say how its training cells were stained"):
        subtype.classifier(Path("old"), match_stain=True)
