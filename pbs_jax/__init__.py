"""Accelerator side of pbs_jax: models, training, benchmark and export for peripheral blood smear interpretation.

Shape letters used in docstrings: B batch, I images, P patches, Q queries, L latents, T text tokens, S sequence,
D width, H/K query and key heads, V vocabulary. The command line is `pbs` (pbs_jax/cli.py).
"""

__version__ = "0.1.0"
