"""Loads a model as the flags of a command ask."""

from typing import Any

from jaxembed.cli.jax_setup import configure_jax
from jaxembed.cli.options import POOLING_CHOICES
from jaxembed.cli.progress import compile_bar
from jaxembed.cli.settings import engine_config, model_source, text_config


def load_embedder(model: str | None, flags: dict[str, Any], **options: Any):
    """An Embedder of the model; `options` are further arguments of it. Raises JaxembedError."""
    configure_jax(flags["cache_dir"], flags["device_memory_fraction"])
    from jaxembed.embedder import Embedder

    return Embedder(
        model,
        **model_source(flags),
        pooling=POOLING_CHOICES[flags["pooling"]] if flags["pooling"] else None,
        config=engine_config(flags),
        text=text_config(flags),
        on_progress=compile_bar(),
        **options,
    )
