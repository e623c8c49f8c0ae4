"""Reads the settings of rotary positions in config.json, as transformers 4 and 5 write them."""

import math
from typing import Any

from converters.fields import GLOBAL_LAYER, LOCAL_LAYER, given, refuse_unknown
from jaxembed.errors import CheckpointError, UnsupportedModel

# By rope_type: the allowed keys besides rope_type, rope_theta and partial_rotary_factor.
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
    """Return rope_theta and rope_scaling of a backbone with the same angles in all layers.

    `head_width` is the dimension of a head, and `theta` the base of the angles if config.json has
    none. `ignored` are further allowed keys, which the caller reads itself. As in transformers,
    rope_scaling (version 4) takes precedence over rope_parameters (version 5). Raises
    UnsupportedModel for angles that no backbone computes, and CheckpointError for invalid values.
    """
    return read_parameters(
        hf, head_width, rope_parameters(hf), hf.get("rope_theta", theta), ignored
    )


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """Return rope_scaling, else rope_parameters, else an empty dict."""
    return hf.get("rope_scaling") or hf.get("rope_parameters") or {}


def rope_by_layers(hf: dict[str, Any]) -> dict[str, Any]:
    """Return rope_parameters, objects by layer type, or {} without it. Raises UnsupportedModel for
    unknown types."""
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
    parameters: dict[str, Any],
    theta: Any,
    ignored: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of `parameters`, the settings of all layers or of one type
    of layers. `theta` is the base of the angles if `parameters` has none. `head_width`, `ignored`
    and the errors are those of `rope_fields`."""
    rope = given(parameters)
    kind = rope.get("rope_type", rope.get("type", "default"))
    refuse_unknown("rope_type", kind, KEYS)
    known = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *KEYS[kind], *ignored}
    if others := sorted(set(rope) - known):
        raise UnsupportedModel(
            f"rope_parameters with {', '.join(others)} are not supported; known for rope_type "
            f"{kind!r}: {', '.join(['rope_theta', *KEYS[kind]])}"
        )
    fraction = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if fraction not in (None, 1):
        raise UnsupportedModel(
            f"partial_rotary_factor {fraction} is not supported: whole heads are rotated"
        )
    return {
        "rope_theta": _positive("rope_theta", rope.get("rope_theta", theta)),
        "rope_scaling": _scaling(kind, rope, hf, head_width),
    }


def scaled_positions(hf: dict[str, Any], scaling: dict[str, Any] | None) -> int:
    """Return the maximum number of tokens of a sequence. It is max_position_embeddings, or more if
    `scaling` is for longer texts (dynamic, YaRN)."""
    positions = hf["max_position_embeddings"]
    if scaling is None or scaling["kind"] not in ("dynamic", "yarn"):
        return positions
    return max(positions, int(scaling["factor"] * scaling["length"]))


def _scaling(
    kind: str, rope: dict[str, Any], hf: dict[str, Any], head_width: int
) -> dict[str, Any] | None:
    """Return the fields of a RopeScaling, by transformers' formulas; None if nothing is scaled.
    `kind` is the rope_type, and `rope` are rope_parameters without nulls. Raises CheckpointError
    for invalid values."""
    if kind == "default":
        return None
    if kind == "linear":
        return {"kind": kind, "factor": _positive("factor", rope.get("factor"))}
    positions = hf.get("max_position_embeddings")
    if kind == "dynamic":  # transformers ignores the original length here
        return {
            "kind": kind,
            "factor": _positive("factor", rope.get("factor")),
            "length": int(_positive("max_position_embeddings", positions)),
        }
    length = _positive(ORIGINAL, hf.get(ORIGINAL) or rope.get(ORIGINAL) or positions)
    factor = rope.get("factor")
    if factor is None and kind != "llama3":
        factor = _positive("max_position_embeddings", positions) / length
    factor = _positive("factor", factor)
    fields = {"kind": kind, "length": int(length)}
    if kind == "longrope":
        if length < 2:
            raise CheckpointError(f"{ORIGINAL} is {length}, wanted at least 2 for {kind}")
        magnitude = math.sqrt(1 + math.log(max(factor, 1.0)) / math.log(length))
        return fields | {
            "short": _factors(rope, "short_factor", head_width // 2),
            "long": _factors(rope, "long_factor", head_width // 2),
            "magnitude": _positive("attention_factor", rope.get("attention_factor", magnitude)),
        }
    fields["factor"] = factor
    if kind == "llama3":
        keys = {"low": "low_freq_factor", "high": "high_freq_factor"}
        bounds = {name: _positive(key, rope.get(key)) for name, key in keys.items()}
        if bounds["low"] >= bounds["high"]:
            raise CheckpointError(
                f"low_freq_factor is {bounds['low']}, wanted less than high_freq_factor, "
                f"{bounds['high']}"
            )
        return fields | bounds
    # YaRN
    growth = math.log(max(factor, 1.0))
    scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
    magnitude = 0.1 * growth + 1.0
    if scale and scale_all:
        magnitude = (0.1 * float(scale) * growth + 1.0) / (0.1 * float(scale_all) * growth + 1.0)
    return fields | {
        "magnitude": _positive("attention_factor", rope.get("attention_factor", magnitude)),
        "beta_fast": _positive("beta_fast", rope.get("beta_fast") or 32.0),
        "beta_slow": _positive("beta_slow", rope.get("beta_slow") or 1.0),
        "truncate": bool(rope.get("truncate", True)),
    }


def mrope_sections(
    parameters: dict[str, Any], otherwise: tuple[int, int, int], head_width: int
) -> list[int]:
    """Return mrope_section: the numbers of pairs of dimensions that rotate with a token's time, row
    and column; `otherwise` if `parameters` has none. Raises CheckpointError unless these are all
    pairs of a head that is `head_width` wide."""
    sections = parameters.get("mrope_section") or list(otherwise)
    if len(sections) != 3 or 2 * sum(sections) != head_width:
        raise CheckpointError(
            f"mrope_section is {sections}, wanted three numbers whose sum is {head_width // 2}, "
            "the pairs of a head's dimensions"
        )
    return sections


def _factors(rope: dict[str, Any], key: str, count: int) -> list[float]:
    """Return the list at `key`. Raises CheckpointError unless it has `count` numbers over 0."""
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"{key} is {values!r}, wanted a list of {count} numbers over 0")
    return [_positive(key, value) for value in values]


def _positive(key: str, value: Any) -> float:
    """Return the `value` of `key` as float. Raises CheckpointError unless it is a number over 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(f"{key} is {value!r}, wanted a number over 0")
    return float(value)
