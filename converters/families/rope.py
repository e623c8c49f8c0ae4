"""Reads the rotary positions in config.json of transformers 4 and 5. Knows no family."""

import math
from typing import Any

from converters.fields import GLOBAL_LAYER, LOCAL_LAYER, refuse_unknown
from jaxembed.errors import CheckpointError, UnsupportedModel

# The keys of each kind besides its type, rope_theta and partial_rotary_factor.
KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}

ORIGINAL = "original_max_position_embeddings"


def rope_fields(
    hf: dict[str, Any], head_width: int, theta: float = 10_000.0, ignored: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read the fields rope_theta and rope_scaling of a tower with the same angles in all layers.

    `theta` is the family's default, `ignored` are keys that the family reads itself. As in
    transformers, rope_scaling of version 4 wins over rope_parameters of version 5 where a config
    has both. Raises UnsupportedModel for angles that no tower computes, and CheckpointError for
    values that make no sense.
    """
    return read_parameters(
        hf, head_width, rope_parameters(hf), hf.get("rope_theta", theta), ignored
    )


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """rope_scaling or, where there is none, rope_parameters; empty if there is neither.

    Raises CheckpointError if it is no JSON object.
    """
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters are {parameters!r}, wanted a JSON object")
    return parameters


def rope_by_layers(hf: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters of a family whose kinds of layers have angles of their own; empty without
    any. Raises UnsupportedModel for an unknown kind."""
    by_kind = hf.get("rope_parameters") or {}
    if others := sorted(set(by_kind) - {GLOBAL_LAYER, LOCAL_LAYER}):
        raise UnsupportedModel(
            f"rope_parameters of {', '.join(others)} are not supported; known: {GLOBAL_LAYER}, "
            f"{LOCAL_LAYER}"
        )
    return by_kind


def read_parameters(
    hf: dict[str, Any],
    head_width: int,
    parameters: Any,
    theta: Any,
    ignored: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The fields of `rope_fields`, from the dict of one kind of layers; `theta` if it has none."""
    if not isinstance(parameters, dict):
        raise CheckpointError(f"rope_parameters are {parameters!r}, wanted a JSON object")
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    refuse_unknown("rope_type", kind, KEYS)
    known = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *KEYS[kind], *ignored}
    if others := sorted(set(given) - known):
        raise UnsupportedModel(
            f"rope_parameters with {', '.join(others)} are not supported; known for rope_type "
            f"{kind!r}: {', '.join(['rope_theta', *KEYS[kind]])}"
        )
    share = given.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UnsupportedModel(
            f"partial_rotary_factor {share} is not supported: whole heads are rotated"
        )
    return {
        "rope_theta": _positive("rope_theta", given.get("rope_theta", theta)),
        "rope_scaling": _scaling(kind, given, hf, head_width),
    }


def scaled_positions(hf: dict[str, Any], scaling: dict[str, Any] | None) -> int:
    """The most tokens of a sequence: max_position_embeddings, or more where the kind of scaling is
    made for texts longer than that."""
    positions = hf["max_position_embeddings"]
    if scaling is None or scaling["kind"] not in ("dynamic", "yarn"):
        return positions
    return max(positions, int(scaling["factor"] * scaling["length"]))


def _scaling(
    kind: str, given: dict[str, Any], hf: dict[str, Any], head_width: int
) -> dict[str, Any] | None:
    """The fields of a RopeScaling; None if angles are not scaled."""
    if kind == "default":
        return None
    if kind == "linear":
        return {"kind": kind, "factor": _positive("factor", given.get("factor"))}
    positions = hf.get("max_position_embeddings")
    if kind == "dynamic":  # in transformers it takes no other length
        return {
            "kind": kind,
            "factor": _positive("factor", given.get("factor")),
            "length": int(_positive("max_position_embeddings", positions)),
        }
    length = _positive(ORIGINAL, hf.get(ORIGINAL) or given.get(ORIGINAL) or positions)
    factor = given.get("factor")
    if factor is None and kind != "llama3":
        factor = _positive("max_position_embeddings", positions) / length
    factor = _positive("factor", factor)
    fields = {"kind": kind, "length": int(length)}
    if kind == "longrope":
        if length < 2:
            raise CheckpointError(f"{ORIGINAL} is {length}, wanted at least 2 for {kind}")
        magnitude = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length))
        return fields | {
            "short": _factors(given, "short_factor", head_width // 2),
            "long": _factors(given, "long_factor", head_width // 2),
            "magnitude": _positive("attention_factor", given.get("attention_factor", magnitude)),
        }
    fields["factor"] = factor
    if kind == "llama3":
        names = {"low": "low_freq_factor", "high": "high_freq_factor"}
        bounds = {name: _positive(key, given.get(key)) for name, key in names.items()}
        if bounds["low"] >= bounds["high"]:
            raise CheckpointError(
                f"low_freq_factor is {bounds['low']}, wanted less than high_freq_factor, "
                f"{bounds['high']}"
            )
        return fields | bounds
    growth = math.log(max(factor, 1.0))  # of cosine and sine
    scale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    magnitude = 0.1 * growth + 1.0
    if scale and of_all:
        magnitude = (0.1 * float(scale) * growth + 1.0) / (0.1 * float(of_all) * growth + 1.0)
    return fields | {
        "magnitude": _positive("attention_factor", given.get("attention_factor", magnitude)),
        "beta_fast": _positive("beta_fast", given.get("beta_fast") or 32.0),
        "beta_slow": _positive("beta_slow", given.get("beta_slow") or 1.0),
        "truncate": bool(given.get("truncate", True)),
    }


def _factors(given: dict[str, Any], key: str, count: int) -> list[float]:
    values = given.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{key} is {values!r}, wanted a list of {count} numbers over 0")
    return [_positive(key, value) for value in values]


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{key} is {value!r}, wanted a number over 0")
    return float(value)
