"""The benchmarks of jaxembed. Each is a program, such as `python -m benchmarks.bench_model`."""
