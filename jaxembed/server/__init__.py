"""The HTTP server: dialects over loaded models. Knows nothing of devices, buckets or tokenizers."""
