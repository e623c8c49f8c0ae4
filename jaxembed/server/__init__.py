"""The HTTP server: dialects over one Embedder. Knows nothing of devices, buckets or tokenizers."""
