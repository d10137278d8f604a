"""Tests of pbs_jax.ask."""
