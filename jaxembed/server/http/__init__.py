"""HTTP connections, request bodies in bounded memory, and JSON responses."""
