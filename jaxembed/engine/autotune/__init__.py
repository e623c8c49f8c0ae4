"""Measures bucket costs, and chooses dtypes, kernels and the order of compilation."""
