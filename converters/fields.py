"""Reads fields of config.json that several families have. Knows no family."""

from collections.abc import Sequence
from typing import Any

from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.spec import Activation

HF_ACTIVATIONS: dict[str, Activation] = {  # by transformers' names
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def require(hf: dict[str, Any], keys: Sequence[str]) -> None:
    """Raise CheckpointError, naming every key that has no integer, unless all keys have one."""
    missing = [key for key in keys if not isinstance(hf.get(key), int)]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")


def activation_of(hf: dict[str, Any], key: str, default: str = "gelu") -> Activation:
    """The activation that a key names. Raises UnsupportedModel for one that we do not have."""
    name = hf.get(key, default)
    if name not in HF_ACTIVATIONS:
        names = ", ".join(HF_ACTIVATIONS)
        raise UnsupportedModel(f"{key} {name!r} is not supported; known: {names}")
    return HF_ACTIVATIONS[name]
