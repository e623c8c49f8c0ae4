"""Reads fields of config.json that several families have. Knows no family."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxembed.data.spec import Activation
from jaxembed.errors import CheckpointError, UnsupportedModel

GLOBAL_LAYER, LOCAL_LAYER = "full_attention", "sliding_attention"  # of layer_types

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


def given(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are there and not null."""
    return {key: value for key, value in hf.items() if value is not None}


def refuse_unknown(what: str, value: Any, known: Collection[Any]) -> None:
    """Raise UnsupportedModel, which names all that is known, for a value that is not among it."""
    if value not in known:
        names = ", ".join(map(str, known))
        raise UnsupportedModel(f"{what} {value!r} is not supported; known: {names}")


def chosen(what: str, name: Any, table: Mapping[Any, Any]) -> Any:
    """The entry of a table. Raises UnsupportedModel as `refuse_unknown` does."""
    refuse_unknown(what, name, table)
    return table[name]


def activation_of(hf: dict[str, Any], key: str, default: str = "gelu") -> Activation:
    """The activation that a key names. Raises UnsupportedModel for one that we do not have."""
    return chosen(key, hf.get(key, default), HF_ACTIVATIONS)


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


def layers_of_kind(hf: dict[str, Any], kind: str) -> list[int] | None:
    """The numbers of the layers that layer_types says are of this kind; None if it is missing, as
    transformers 4 leaves it out.

    Raises UnsupportedModel for an unknown kind, and CheckpointError unless each layer has one.
    """
    kinds, layers = hf.get("layer_types"), hf["num_hidden_layers"]
    if kinds is None:
        return None
    if unknown := sorted({str(kind) for kind in kinds} - {GLOBAL_LAYER, LOCAL_LAYER}):
        raise UnsupportedModel(
            f"layer_types {', '.join(unknown)} are not supported; known: {GLOBAL_LAYER}, "
            f"{LOCAL_LAYER}"
        )
    if len(kinds) != layers:
        raise CheckpointError(f"{len(kinds)} layer_types for num_hidden_layers {layers}")
    return [number for number, one in enumerate(kinds) if one == kind]


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
