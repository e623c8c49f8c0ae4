"""`Models` at the path by which programs import it, as `examples/ray_serve.py` does."""

from jaxembed.server.registry.models import Models

__all__ = ["Models"]
