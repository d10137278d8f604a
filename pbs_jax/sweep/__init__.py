"""Sweeps: many runs of one configuration with a few fields changed, and which of them is best."""
