"""Reads fields of config.json that several families have. Knows no family."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxembed.data.spec import Activation
from jaxembed.errors import CheckpointError, UnsupportedModel

HF_ACTIVATIONS: dict[str, Activation] = {  # by transformers' names
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
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


def either(hf: dict[str, Any], first: str, second: str, default: Any = None) -> Any:
    """The value of a field that has two names; `default` if it has neither.

    Raises CheckpointError if both are there and differ.
    """
    values = [hf[key] for key in (first, second) if hf.get(key) is not None]
    if values[1:] and values[0] != values[1]:
        raise CheckpointError(
            f"config.json: {first} is {values[0]!r} and {second} {values[1]!r}, which are one "
            "setting"
        )
    return values[0] if values else default


def even_head_width(hidden: int, heads: int) -> int:
    """The width of a head, whose pairs of elements are rotated. Raises CheckpointError if `hidden`
    is no even width for each head."""
    width, rest = divmod(hidden, heads)
    if rest or width % 2:
        raise CheckpointError(
            f"hidden_size {hidden} does not split into num_attention_heads {heads} of even width"
        )
    return width


def refuse_unless(hf: dict[str, Any], supported: Mapping[str, Sequence[Any]]) -> None:
    """Raise UnsupportedModel, naming the field, for a value that is not among the supported ones.

    A missing field is supported.
    """
    for key, values in supported.items():
        if key in hf and hf[key] not in values:
            known = ", ".join(str(value) for value in values if value is not None)
            raise UnsupportedModel(f"{key} {hf[key]!r} is not supported; known: {known or 'none'}")
