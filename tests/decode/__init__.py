"""Tests of pbs_jax.decode."""
