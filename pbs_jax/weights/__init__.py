"""Torch weights in and out: one table a model family (`tables`), applied in both directions by `convert`."""
