"""Embedding and reranking on JAX/XLA. Public names load on first use: importing starts no
device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxembed.config import EngineConfig, TextConfig
    from jaxembed.data.inputs import ChunkedText, ChunkSize, Parts
    from jaxembed.embedder import Embedder
    from jaxembed.errors import JaxembedError
    from jaxembed.runtime.entities import Entity
    from jaxembed.runtime.options import Label, Ranked

__version__ = "0.1.0"

_PUBLIC = {
    "ChunkSize": "jaxembed.data.inputs",
    "ChunkedText": "jaxembed.data.inputs",
    "Embedder": "jaxembed.embedder",
    "EngineConfig": "jaxembed.config",
    "Entity": "jaxembed.runtime.entities",
    "JaxembedError": "jaxembed.errors",
    "Label": "jaxembed.runtime.options",
    "Parts": "jaxembed.data.inputs",
    "Ranked": "jaxembed.runtime.options",
    "TextConfig": "jaxembed.config",
}
__all__ = [
    "ChunkSize",
    "ChunkedText",
    "Embedder",
    "EngineConfig",
    "Entity",
    "JaxembedError",
    "Label",
    "Parts",
    "Ranked",
    "TextConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use. Raises ImportError if its module lacks it."""
    if name in _PUBLIC:
        try:
            return getattr(import_module(_PUBLIC[name]), name)
        except AttributeError as error:  # Python would only say that the name cannot be imported
            raise ImportError(f"jaxembed.{name} cannot be loaded: {error}") from error
    raise AttributeError(f"module 'jaxembed' has no attribute {name!r}")
