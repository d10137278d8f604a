"""The networks: parameters in nnx modules, mathematics in plain functions, one implementation for all sizes (`sizes`)."""
