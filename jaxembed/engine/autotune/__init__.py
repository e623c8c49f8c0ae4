"""Measures costs and chooses kernels, dtypes and what to compile first."""
