"""`pbs data evaluate --task white_cell`: the first stage of paper 3.1.2, white cell or not, on a source other than the one it
was trained on: a cell job, or the annotated boxes of BCCD's fields, which hold both classes.

Cells of one patient, slide or picture stand or fall together: intervals are over resampled ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_prep import crops
from data_prep.io import open_dataset, read_manifest
from data_prep.progress import progress
from data_prep.schema import NO_WHITE_CELL, OTHERS, WHITE_CELL, Box, DataError
from data_prep.sources.bccd import FOLDER, read_boxes
from data_prep.stats import clustered_ci, percentile_interval, resampled_sums
from data_prep.subtype import classifier

BINS = 10  # of confidence
KINDS = {"WBC": 1, "Platelets": 0, "RBC": 0}  # BCCD's boxes


@dataclasses.dataclass(frozen=True, slots=True)
class Labelled:
    """A crop, whether it is of a white cell (1 or 0), its type by the source, and what it shares its fate with."""

    image: bytes
    white: int
    kind: str
    cluster: str


def white_cell(root: Path, workdir: Path | None, match_stain: bool = False) -> list[str]:
    """What to print of the classifier in `workdir` on the test cells of the job `root`, or on the test fields of BCCD below it.

    Raises DataError without `workdir`, and where one of the two classes is missing.
    """
    if workdir is None:
        raise DataError("--task white_cell needs --backbone, the workdir of a finished classifier of target white_cell")
    of_job = (root / "cells").is_dir() and not (root / FOLDER).is_dir()
    cells = list(_of_job(root) if of_job else _of_bccd(root))
    if {cell.white for cell in cells} != {0, 1}:
        where = f"the test split of {root}/cells" if of_job else f"{root}/{FOLDER}"
        raise DataError(
            f"{where} lacks {'other cells' if cells and cells[0].white else 'white cells'}: the task needs both; "
            "PBC's cells, APL's and LMU's hold both, and so do BCCD's fields (--root the folder that holds fields/bccd)"
        )
    images = [cell.image for cell in cells]
    named = list(classifier(workdir, match_stain=match_stain, target="white_cell")(images, images))
    probability = np.asarray([p if name == WHITE_CELL else 1 - p for name, p in named])
    note = ["note: it was trained on cells of this very dataset"] if of_job and _learnt_from(root, workdir) else []
    return white_cell_lines(cells, probability) + note


def _learnt_from(root: Path, workdir: Path) -> bool:
    from pbs_jax.train import handover

    return handover.read(workdir)["facts"]["datasets"]["cells"] == read_manifest(root / "cells")["content_id"]


def _of_job(root: Path) -> Iterator[Labelled]:
    from pbs_jax.train.classifier import label_of

    for record in open_dataset(root / "cells", "test"):
        if (white := label_of(record, "white_cell")) is not None:
            kind = record["comments"] if record["label"] == OTHERS else record["label"]
            cluster = record["patient_id"] or record["slide_id"] or record["cell_id"]
            yield Labelled(record["image"], white, kind, cluster)


def _of_bccd(root: Path) -> Iterator[Labelled]:
    """All boxes of the fields of BCCD's test list, cut as every source's cells are."""
    names = root / FOLDER / "ImageSets" / "Main" / "test.txt"
    if not names.is_file():
        raise DataError(f"{root} holds neither cells nor {names.relative_to(root)}: give a cell job, or BCCD's root")
    listed = names.read_text().split()
    for name in progress(listed, len(listed), "bccd test"):
        picture = crops.decode_rgb((root / FOLDER / "JPEGImages" / f"{name}.jpg").read_bytes())
        for kind, white in KINDS.items():
            for edges in read_boxes(root / FOLDER / "Annotations" / f"{name}.xml", kind):
                box = Box(*map(round, edges))
                if box.width > 0 and box.height > 0:
                    yield Labelled(crops.encode_jpeg(crops.context_crop(picture, box)), white, kind, name)


def white_cell_lines(cells: Sequence[Labelled], probability: np.ndarray) -> list[str]:
    """Cells and the probability float[n] that each is a white one -> what to print."""
    from sklearn.metrics import roc_auc_score

    white = np.asarray([cell.white for cell in cells])
    kinds, clusters = np.asarray([cell.kind for cell in cells]), np.asarray([cell.cluster for cell in cells])
    right = (probability > 0.5) == white
    confidence = np.maximum(probability, 1 - probability)

    def recall(of: np.ndarray) -> str:
        found = clustered_ci(right[of], clusters[of].tolist())
        return f"recall {found} (n {found.n} of {found.clusters})"

    columns = np.column_stack([right * white, white, right * (1 - white), 1 - white])
    sums = resampled_sums(columns, clusters.tolist())
    low, high = percentile_interval((sums[:, 0] / sums[:, 1] + sums[:, 2] / sums[:, 3]) / 2)
    balanced = (right[white == 1].mean() + right[white == 0].mean()) / 2
    lines = [
        f"white cell or not: balanced accuracy {balanced:.3f} [{low:.3f}, {high:.3f}], "
        f"AUC {roc_auc_score(white, probability):.3f}, n {len(cells)} of {len(set(clusters.tolist()))} pictures or patients"
    ]
    for label, name in ((1, WHITE_CELL), (0, NO_WHITE_CELL)):
        lines.append(f"  {name}: {recall(white == label)}")
        lines += [
            f"    {kind}: {recall((white == label) & (kinds == kind))}" for kind in sorted({*kinds[white == label]})
        ]
    return [*lines, calibration(right, confidence)]


def calibration(right: np.ndarray, confidence: np.ndarray) -> str:
    """bool[n] and the probability of what was chosen float[n] in [0, 1] -> a line: what it says of itself, and its error."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(right[bins == b].sum() - confidence[bins == b].sum()) for b in range(BINS)]
    return f"  calibration: mean confidence {confidence.mean():.3f}, error {sum(gaps) / len(right):.3f} ({BINS} bins)"
