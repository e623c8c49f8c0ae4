"""Defines `Models` for programs that build a server themselves, such as examples/ray_serve.py."""

from collections.abc import Sequence
from typing import Any

from jaxembed.embedder import Embedder
from jaxembed.runtime.model import LoadedModel
from jaxembed.server.registry.models import Models as LoadedModels


class Models(LoadedModels):
    """The models of a server, given as Embedders or as LoadedModels."""

    def __init__(
        self, models: Sequence[Embedder | LoadedModel] = (), *arguments: Any, **options: Any
    ):
        loaded = [model.model if isinstance(model, Embedder) else model for model in models]
        super().__init__(loaded, *arguments, **options)
