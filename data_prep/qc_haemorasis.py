"""Tile quality as the paper has it: Haemorasis's DenseNet121, or the scores its authors' tool left in `_quality_control`.

The network comes from `pbs weights import qc` and sees a tile as RGB / 255; with its own files no network runs. A tile is
kept from a probability of 0.5 (paper 9.1). Needs jax for the network only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from data_prep.files import sha256_file
from data_prep.schema import Box, DataError
from data_prep.sources import is_hidden

NAME = "haemorasis"
Score = Callable[[Box, np.ndarray], float | None]  # (tile, uint8[h, w, 3]) -> P(good); None: the files do not tell


def source_sha256(source: Path) -> str:
    """Identity of the scores: of the network's weights, or of the folder's files. Raises DataError."""
    if not (source / "handover.json").is_file():
        return " ".join(map(sha256_file, _files(source)))
    from pbs_jax.train import handover
    from pbs_jax.train.state import tree_sha256

    handover.read(source, ("qc",))
    return tree_sha256(handover.load(source, ["densenet"]))


def scorer(source: Path, slide_id: str) -> Score:
    """Scores the tiles of one slide. Raises DataError when `source` is neither, or has not one file of the slide."""
    if (source / "handover.json").is_file():
        return lambda tile, rgb: network(source)(rgb)
    path = file_of(source, slide_id)
    scores = _read_once(path, path.stat().st_mtime_ns)
    return lambda tile, rgb: scores.get((tile.left, tile.top))


def file_of(folder: Path, slide_id: str, listed: Sequence[Path] = ()) -> Path:
    """The scores of a slide: the file below the folder whose path is its id, with or without an ending; for an id with
    folders else the file that lies in the folder itself and has the name of the id's last part.

    listed: the files, where the caller asks for many slides. Raises DataError when there is none, or more than one.
    """
    files = [PurePosixPath(path.relative_to(folder)) for path in listed or _files(folder)]
    for id, among in ((slide_id, files), (PurePosixPath(slide_id).name, [p for p in files if len(p.parts) == 1])):
        for found in ([p for p in among if str(p) == id], [p for p in among if str(p.with_suffix("")) == id]):
            if len(found) > 1:
                names = ", ".join(map(str, found))
                raise DataError(f"{folder} has several files of slide {slide_id}: {names}; leave one")
            if found:
                return folder / found[0]
    raise DataError(f"{folder} has no file of slide {slide_id}: it holds {', '.join(map(str, files[:5]))}")


def refuse_shared(source: Path, slide_ids: Iterable[str]) -> None:
    """Raises DataError when one file of `source` would score two slides: ids in several folders, or unlike in an ending."""
    if (source / "handover.json").is_file():
        return
    files = _files(source)
    first: dict[Path, str] = {}
    for slide_id in slide_ids:
        try:
            file = file_of(source, slide_id, files)
        except DataError:
            continue  # the slide's own reject
        if first.setdefault(file, slide_id) != slide_id:
            raise DataError(f"--qc-source {file} may be of slide {first[file]} or {slide_id}: name it by the whole id")


@functools.cache
def network(workdir: Path) -> Callable[[np.ndarray], float]:
    """uint8[h, w, 3] -> P(good), by the network of a finished `pbs weights import qc`; one a process."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from pbs_jax.weights.qc import load_qc

    graph, params = load_qc(workdir)

    @jax.jit
    def probability(pixels: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(nnx.merge(graph, params)(pixels[None].astype(jnp.float32) / 255))[0]

    return lambda rgb: round(float(probability(rgb)), 6)


def read_scores(path: Path) -> Mapping[tuple[int, int], float]:
    """(left, top) -> P(good) of a `_quality_control` file: lines `OUT,x,y,flag,probability`, others are the tool's talk.

    Raises DataError for a line that is none, naming it, and for a file without any.
    """
    scores = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.startswith("OUT,"):
            continue
        try:
            _, x, y, _, probability = line.split(",")
            scores[int(x), int(y)] = float(probability)
        except ValueError as error:
            raise DataError(f"{path}:{number} is not OUT,x,y,flag,probability: {line[:60]}") from error
    if not scores:
        raise DataError(f"{path} holds no line OUT,x,y,flag,probability: it is no _quality_control file")
    return scores


@functools.lru_cache(maxsize=2)
def _read_once(path: Path, stamp: int) -> Mapping[tuple[int, int], float]:
    """A slide's bands follow each other, and each asks for its scores. `stamp`: of the file, which may be written anew."""
    return read_scores(path)


def _files(folder: Path) -> list[Path]:
    files = (
        sorted(path for path in folder.rglob("*") if path.is_file() and not is_hidden(path)) if folder.is_dir() else []
    )
    if not files:
        raise DataError(
            f"--qc-source {folder} is neither the --out of `pbs weights import qc` nor a folder of _quality_control files"
        )
    return files
