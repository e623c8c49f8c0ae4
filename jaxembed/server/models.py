"""`Models` at the path by which programs import it, as `examples/ray_serve.py` does."""

from collections.abc import Sequence
from typing import Any

from jaxembed.embedder import Embedder
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.registry.models import Models as LoadedModels


class Models(LoadedModels):
    """The models of a server, which may be Embedders."""

    def __init__(
        self, models: Sequence[Embedder | LoadedModel] = (), *arguments: Any, **options: Any
    ):
        loaded = [one.model if isinstance(one, Embedder) else one for one in models]
        super().__init__(loaded, *arguments, **options)
