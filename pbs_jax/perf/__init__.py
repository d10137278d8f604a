"""Measurements: FLOPs, step time and input rate, each beside a named peer."""
