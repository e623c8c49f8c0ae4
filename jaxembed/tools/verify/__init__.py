"""Compares a model with a reference implementation. Only the command line uses it."""
