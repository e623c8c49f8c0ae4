"""`Models` at the path that examples and programs have used from the first version on."""

from jaxembed.server.registry.models import Models

__all__ = ["Models"]
