"""Live comparison with transformers and sentence-transformers: `make parity`."""
