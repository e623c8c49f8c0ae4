"""Converts jina-embeddings-v5-text: Qwen3's backbone (small) or EuroBERT's (nano), with an adapter
for each task. Repositories with one adapter merged are plain Qwen3 and EuroBERT models."""

from typing import Any

from converters.families import eurobert, qwen3
from converters.families.decoders import decoder_family
from jaxembed.errors import UnsupportedModel

DEFAULT_TASK = "retrieval"


def config(hf: dict[str, Any]) -> dict[str, Any]:
    """Convert config.json `hf` to Qwen3Config fields. Raises UnsupportedModel, CheckpointError."""
    # only nano's config.json, whose backbone is bidirectional, has is_decoder
    family = eurobert if hf.get("is_decoder") is False else qwen3
    return family.config(hf)


def tasks(hf: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the adapters, the default one first. Raises UnsupportedModel without the
    default one."""
    names = hf.get("task_names") or ()
    if DEFAULT_TASK not in names:
        raise UnsupportedModel(
            f"config.json: task_names {', '.join(names) or 'is missing'}; wanted the names of the "
            f"folders in adapters/, {DEFAULT_TASK} among them, because the model has no vectors "
            "without an adapter"
        )
    return (DEFAULT_TASK, *(name for name in names if name != DEFAULT_TASK))


FAMILY = decoder_family(
    classes=("JinaEmbeddingsV5Model",),
    own_code={"AutoModel": ("modeling_jina_embeddings_v5.JinaEmbeddingsV5Model",)},
    config=config,
    tasks=tasks,
)
