"""Turns the flags of a command into the source of a model, and settings of engine and tokenizer.

`flags` are the values of the flags by name, with underscores.
"""

import os
from typing import Any

from jaxembed.checkpoints.source import ModelSource
from jaxembed.cli.options import POOLING_CHOICES
from jaxembed.config import EngineConfig, TextConfig


def model_source(model: str | None, flags: dict[str, Any]) -> ModelSource:
    """Where a model comes from, and how it is converted. Raises CheckpointError.

    Sets the environment variable HF_HUB_CACHE if --huggingface-hub-cache is given.
    """
    if flags["huggingface_hub_cache"]:
        os.environ["HF_HUB_CACHE"] = str(flags["huggingface_hub_cache"])
    return ModelSource(
        model,
        revision=flags["revision"],
        offline=flags["offline"],
        token=flags["hf_token"],
        cache_dir=flags["cache_dir"],
        dense_path=flags["dense_path"],
        adapters=flags["adapter"],
        pooling=flags["pooling"] and POOLING_CHOICES[flags["pooling"]],
    )


def engine_config(flags: dict[str, Any]) -> EngineConfig:
    """The settings of the engine.

    Only `serve` has the flags that limit how much work is admitted, and how much is cached. Without
    such a flag the setting is the default of EngineConfig.
    """
    of_server = {
        name: flags[name]
        for name in (
            "max_concurrent_requests",
            "max_queue_tokens",
            "max_queue_bytes",
            "cache_bytes",
        )
        if flags.get(name) is not None
    }
    return EngineConfig(
        dtype=flags["dtype"],
        devices=flags["devices"],
        parallel=flags["parallel"],
        warmup=flags["warmup"],
        kernels=flags["kernels"],
        max_batch_tokens=flags["max_batch_tokens"],
        max_batch_requests=flags["max_batch_requests"],
        buckets=flags["buckets"],
        max_input_tokens=flags["max_input_length"],
        null_model=flags["null_model"],
        **of_server,
    )


def text_config(flags: dict[str, Any]) -> TextConfig:
    """The settings by which texts are tokenized if a request does not say otherwise."""
    return TextConfig(
        truncate=flags["auto_truncate"],
        default_prompt=flags["default_prompt"],
        default_prompt_name=flags["default_prompt_name"],
        workers=flags["tokenization_workers"],
    )
