"""Compiled programs are kept between runs, so that a resumed phase or another seed starts in seconds."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compile_cache() -> None:
    """Points jax at $XDG_CACHE_HOME/pbs_jax (default ~/.cache/pbs_jax) unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "pbs_jax"))
