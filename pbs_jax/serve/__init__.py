"""`pbs serve`: one small page and an OpenAI-compatible endpoint over finished checkpoints, on this machine alone by default."""
