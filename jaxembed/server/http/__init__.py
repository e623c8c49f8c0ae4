"""HTTP connections, bodies in bounded memory, and JSON answers."""
