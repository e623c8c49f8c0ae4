"""Compares a model with a reference implementation."""
