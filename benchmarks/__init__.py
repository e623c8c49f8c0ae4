"""Measurements of jaxembed, each a program of its own: `python -m benchmarks.bench_model`."""
