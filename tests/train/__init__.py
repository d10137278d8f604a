"""Tests of pbs_jax.train."""
