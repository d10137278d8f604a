"""Tests of pbs_jax.serve."""
