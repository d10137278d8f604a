"""Mesh, partition rules and compilation for TPU topologies."""
