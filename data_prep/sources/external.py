"""The paper's out-of-domain sets in their publishers' folders: AML-Cytomorphology_LMU, APL (Kaggle), WBC_LISC.

    lmu   …/<CODE>/<CODE>_0001.tiff
    apl   …/Patient_NN/Signed slides/<type>/<name>.jpg
    lisc  …/Main Dataset/<class>/<n>.bmp, masks in …/Ground Truth Segmentation/<class>/areaforexpert1/<n>_expert.bmp

All of it is out-of-domain test data. Classes follow the paper's Table 7; the publisher's own type stays in `comments`.
LISC's pictures are fields: the expert's mask says where the cell is. The others hold one cell, which the finder finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.crops import decode_rgb
from data_prep.external_files import FileIndex, NotFound, mask_box
from data_prep.schema import OTHERS, WHITE_CELL_CLASSES, Box, DataError
from data_prep.sources import IMAGE_SUFFIXES, Listing, Reject, SourceCell, is_hidden, reject_clashes, relative

NAMES = {"lmu": "AML-Cytomorphology_LMU", "apl": "APL", "lisc": "WBC_LISC"}
LICENCES = {
    "lmu": ("AML-Cytomorphology_LMU, Matek et al. 2019, The Cancer Imaging Archive, CC BY 3.0",),
    "apl": ("APL, Sidhom et al. 2021, Kaggle: under the terms of its page",),
    "lisc": ("LISC, Rezatofighi et al. 2011: under the terms of its page",),
}
_N, _L, _M, _E, _B = WHITE_CELL_CLASSES
# Table 7: a folder -> our class, and what the publisher calls the type where that says more.
TABLE_7: dict[str, dict[str, tuple[str, str]]] = {
    "AML-Cytomorphology_LMU": {
        "bas": (_B, ""), "ebo": (OTHERS, "Erythroblast"), "eos": (_E, ""), "ksc": (OTHERS, "smudge cell"),
        "lya": (_L, "atypical"), "lyt": (_L, ""), "mmz": (OTHERS, "metamyelocyte"), "mob": (OTHERS, "monoblast"),
        "mon": (_M, ""), "myb": (OTHERS, "myelocyte"), "myo": (OTHERS, "myeloblast"), "ngb": (_N, "band"),
        "ngs": (_N, "segmented"), "pmb": (OTHERS, "bilobed promyelocyte"), "pmo": (OTHERS, "promyelocyte"),
    },
    "APL": {
        "band neutrophils": (_N, "band"), "segmented neutrophils": (_N, "segmented"), "basophil": (_B, ""),
        "eosinophils": (_E, ""), "lymphocyte": (_L, ""), "lymphocyte, variant": (_L, "variant"),
        "lymphocyte (variant)": (_L, "variant"), "monocyte": (_M, ""),
        "erythroblast": (OTHERS, "Erythroblast"),
    } | {name: (OTHERS, name) for name in (
        "artifact", "blast (no lineage spec)", "blast, no lineage spec", "giant thrombocyte", "metamyelocyte",
        "myelocyte", "plasma cells", "prolymphocyte", "promonocyte", "promyelocyte", "smudge cells",
        "thrombocyte aggregation", "unidentified", "young unidentified",
    )},
    "WBC_LISC": {"baso": (_B, ""), "eosi": (_E, ""), "lymp": (_L, ""), "mono": (_M, ""), "neut": (_N, "")},
}  # fmt: skip
SEVERAL = "mixt"  # LISC's folder of fields with cells of several types
MASKS = "Ground Truth Segmentation"
PATIENT = re.compile(r"Patient_\w+")


def recorded_class(dataset: str, path: str) -> str:
    """The class that a picture's folder (of LISC: its name or folder) records; "" for a set without one.

    A type that Table 7 does not name is Others.
    """
    parts = path.lower().split("/")
    match dataset:
        case "AML-Cytomorphology_LMU" | "APL" if len(parts) > 1:
            key = parts[-2]
        case "WBC_LISC":
            key = next((p[:4] for p in parts[-2:] if p[:4] in TABLE_7[dataset]), "")
        case _:
            return ""
    return TABLE_7[dataset].get(key, (OTHERS, ""))[0]


def recorded_patient(dataset: str, path: str) -> str:
    """The patient that a picture's path names; "" where it names none."""
    patient = PATIENT.search(path)
    return f"{dataset}:{patient.group()}" if patient else ""


def listing(root: Path, source: str) -> Listing:
    """The pictures of one of NAMES below `root`. Raises DataError when it is no folder or holds no usable picture."""
    if not root.is_dir():
        raise DataError(f"{root} is not a folder: give the one that {NAMES[source]} was unpacked into")
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and MASKS not in path.parts]
    masks = next((path for path in sorted(root.rglob(MASKS)) if path.is_dir()), None) if source == "lisc" else None
    found = list(_items(root, source, [path for path in paths if not is_hidden(path)], masks))
    cells, clashes = reject_clashes([item for item in found if isinstance(item, SourceCell)])
    rejects = [item for item in found if isinstance(item, Reject)] + clashes
    if not cells:
        reasons = "; ".join(reject.detail for reject in rejects[:3]) or "it is empty"
        raise DataError(f"{root} holds no usable picture of {NAMES[source]}: {reasons}")
    notes = (
        ["no expert masks below the folder: the finder looks for the cells"] if source == "lisc" and not masks else []
    )
    return Listing(cells, rejects, notes, LICENCES[source])


def _items(root: Path, source: str, paths: list[Path], masks: Path | None) -> Iterator[SourceCell | Reject]:
    known = TABLE_7[NAMES[source]]
    for path in paths:
        where, folder = relative(path, root), path.parent.name.lower()
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            continue  # publishers' tables and licences lie between the pictures
        if folder == SEVERAL:
            yield Reject(where, "several subtypes", f"{where} shows several types: which cell is which?")
        elif folder not in known:
            yield Reject(where, "unknown label folder", f'{where} lies in "{folder}", which Table 7 does not name')
        else:
            try:
                box = _marked(path, masks)
            except (NotFound, DataError, OSError) as error:
                yield Reject(where, "no usable mask", f"{where}: {error}")
                continue
            yield _cell(source, path, where, box)


def _marked(path: Path, masks: Path | None) -> Box | None:
    """The box of the expert's cell; None without masks."""
    if masks is None:
        return None
    folder = next((m for m in masks.iterdir() if m.name.lower() == path.parent.name.lower()), masks)
    mask = FileIndex(folder / "areaforexpert1" if (folder / "areaforexpert1").is_dir() else folder).find_mask(path.name)
    return mask_box(mask.read_bytes(), decode_rgb(path.read_bytes()).size)


def _cell(source: str, path: Path, where: str, box: Box | None) -> SourceCell:
    label, comments = TABLE_7[NAMES[source]][path.parent.name.lower()]
    patient = PATIENT.search(where)
    tail = f"All/All/{where[patient.start() :]}" if source == "apl" and patient else f"{path.parent.name}/{path.name}"
    return SourceCell(
        cell_id=f"{NAMES[source]}:{tail}",  # as in the release, so that its questions find their cells
        label=label,
        path=where,
        box=box,
        split="test",
        domain="ood",
        patient_id=recorded_patient(NAMES[source], where),
        comments=comments,
    )
