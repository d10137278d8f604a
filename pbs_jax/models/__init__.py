"""The networks: parameters in nnx modules, maths in plain functions, one implementation for all sizes (`sizes`)."""
