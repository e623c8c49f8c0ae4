"""Rotary position embeddings: the angles of each token, and the kinds of scaling for long texts.

Su et al. 2021, arXiv:2104.09864. Frequencies are computed on the host in float32, in the order of
operations of transformers' modeling_rope_utils, so that nearly all of the values equal torch's.
Scalings that depend on the length of a text use the length of its segment, so that the vector of a
text does not depend on the other texts in the same row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxembed.models.tokens import PackedTokens, Segments

Frequencies = Float[np.ndarray, " half"]
Places = Segments | Float[Array, "rows length"]


class LinearRope(msgspec.Struct, frozen=True, tag_field="kind", tag="linear"):
    """Every angle is divided by `factor`. Chen et al. 2023, arXiv:2306.15595."""

    factor: float


class DynamicRope(msgspec.Struct, frozen=True, tag_field="kind", tag="dynamic"):
    """For a text longer than `length` tokens, the base of the angles grows with the text's length.

    For n tokens `theta` is multiplied by growth^(width / (width - 2)), where growth is
    factor * n / length - (factor - 1).
    """

    factor: float
    length: int


class YarnRope(msgspec.Struct, frozen=True, tag_field="kind", tag="yarn"):
    """Low frequencies are divided by `factor`, and high frequencies are not. Peng et al. 2023,
    arXiv:2309.00071."""

    factor: float
    length: int  # maximum tokens of a text before the model was trained for longer texts
    magnitude: float  # cosines and sines are multiplied by this, which increases the scores
    # Dimensions that turn more than `beta_fast` times in `length` tokens are not divided, those
    # that turn less than `beta_slow` times are divided by `factor`, and a ramp lies between.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # whether the ends of the ramp are rounded to whole dimensions


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="kind", tag="llama3"):
    """Low frequencies are divided by `factor`, and high frequencies are not, as in Llama 3.1.

    A wave is the number of tokens in which a pair of dimensions turns once.
    """

    factor: float
    length: int  # maximum tokens of a text before the model was trained for longer texts
    low: float  # the frequencies of waves longer than length / low are divided by `factor`
    high: float  # the frequencies of waves shorter than length / high are unchanged


class LongRope(msgspec.Struct, frozen=True, tag_field="kind", tag="longrope"):
    """Each frequency is divided by its own factor. Ding et al. 2024, arXiv:2402.13753."""

    short: tuple[float, ...]  # factors for texts of at most `length` tokens
    long: tuple[float, ...]  # factors for longer texts
    length: int
    magnitude: float  # cosines and sines are multiplied by this


RopeScaling = LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope


def read_scaling(fields: Mapping[str, Any] | None) -> RopeScaling | None:
    """Return the scaling of a config, whose `fields` are a `kind` and the fields of that class.
    Returns None for None: no scaling. Raises msgspec.ValidationError for an unknown kind, and for
    fields that do not fit the kind."""
    return None if fields is None else msgspec.convert(fields, RopeScaling)


@no_type_check  # JAX creates instances with leaves of other types
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """The cosines and sines by which rotary position embeddings rotate each token's heads.

    Cosines and sines are float32 even if the parameters are bfloat16, in which position 257 would
    be rounded to 256.
    """

    cos: Float[Array, "rows length half"]
    sin: Float[Array, "rows length half"]

    @classmethod
    def of(
        cls,
        tokens: PackedTokens,
        width: int,
        theta: float,
        scaling: RopeScaling | None = None,
        sections: Sequence[int] = (),
        *,
        interleaved: bool = False,
    ) -> "Rotation":
        """Return the rotation by position / theta^(2k / width) for the k-th pair of dimensions.

        `width` is the number of dimensions of a head. `sections` is empty or holds three numbers:
        the first sections[0] pairs use a token's time instead of its position, the next sections[1]
        pairs its row, and the last sections[2] pairs its column. Time, row and column are the
        position plus the token's first three numbers in `tokens.places`. Wang et al. 2024,
        arXiv:2409.12191. If the sections are `interleaved`, time, row and column take turns, as in
        Qwen3-VL, until row and column have as many pairs as their sections say; time has the rest.
        """
        positions = tokens.positions[:, :, None]
        if sections:
            assert tokens.places is not None
            positions = (positions + tokens.places)[:, :, _axes(sections, interleaved)]
        angles = positions.astype(jnp.float32) * _frequencies(tokens, width, theta, scaling)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        magnitude = scaling.magnitude if isinstance(scaling, YarnRope | LongRope) else 1.0
        return cls(cos, sin) if magnitude == 1.0 else cls(cos * magnitude, sin * magnitude)

    @classmethod
    def of_grid(cls, row: Places, column: Places, width: int, theta: float) -> "Rotation":
        """Return the rotation of image patches by their places on the grid of an image.

        `row` and `column` are `[rows, length]` like segment numbers, but hold the grid row and grid
        column of each token, from 0, perhaps as fractions. `width` is the number of dimensions of a
        head. The grid row rotates the first half of the pairs of dimensions, and the grid column
        the second half, both with the same frequencies.
        """
        frequencies = jnp.asarray(_plain(width // 2, theta))[None, None]
        axes = (axis[:, :, None].astype(jnp.float32) * frequencies for axis in (row, column))
        angles = jnp.concatenate(list(axes), axis=-1)
        return cls(jnp.cos(angles), jnp.sin(angles))

    def __call__(
        self, x: Float[Array, "rows length heads width"]
    ) -> Float[Array, "rows length heads width"]:
        """Rotate the pairs of dimensions (k, k + width / 2), as transformers' rotate_half does."""
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _axes(sections: Sequence[int], interleaved: bool) -> np.ndarray:
    """Return for each pair of dimensions 0, 1 or 2, if a token's time, row or column rotates it."""
    axes = np.repeat(np.arange(len(sections)), sections)
    if interleaved:
        pair = np.arange(len(axes))
        axes = np.where(pair // 3 < np.array(sections)[pair % 3], pair % 3, 0)
    return axes


def segment_lengths(tokens: PackedTokens) -> Segments:
    """Return for each token the number of tokens in its segment, int `[rows, length]`."""
    segments, index = tokens.segments, jnp.arange(tokens.segments.shape[1])[None]
    ends = jnp.ones_like(segments, bool).at[:, :-1].set(segments[:, 1:] != segments[:, :-1])
    last = lax.cummin(jnp.where(ends, index, segments.shape[1]), axis=1, reverse=True)
    first = index - tokens.positions
    return last - first + 1


def _frequencies(
    tokens: PackedTokens, width: int, theta: float, rope: RopeScaling | None
) -> Float[Array, "..."]:
    """Return the angle of position 1 for each pair of dimensions, after the scaling `rope`. The
    result is `[rows, length, half]`, or `[1, 1, half]` if all tokens have the same angles."""
    plain = _plain(width, theta)
    if isinstance(rope, DynamicRope):
        # The base is theta * growth^(width / (width - 2)), so the angle of pair k is plain[k] *
        # growth^(-2k / (width - 2)). A power of the new base itself would lose more digits.
        lengths = jnp.maximum(segment_lengths(tokens), rope.length)
        growth = rope.factor * (lengths.astype(jnp.float32) / rope.length) - (rope.factor - 1)
        powers = jnp.asarray(np.arange(0, width, 2) / max(width - 2, 1), jnp.float32)
        return jnp.asarray(plain)[None, None] * jnp.exp(
            -jnp.log(growth)[:, :, None] * powers[None, None]
        )
    if isinstance(rope, LongRope):
        periods = theta ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
        short, long = (1 / (np.array(x, np.float32) * periods) for x in (rope.short, rope.long))
        is_long = segment_lengths(tokens)[:, :, None] > rope.length
        return jnp.where(is_long, long[None, None], short[None, None])
    if isinstance(rope, LinearRope):
        plain = plain / np.float32(rope.factor)
    elif isinstance(rope, YarnRope):
        plain = _yarn(plain, width, theta, rope)
    elif isinstance(rope, Llama3Rope):
        wave = np.float32(2 * math.pi) / plain
        smooth = (rope.length / wave - rope.low) / (rope.high - rope.low)
        between = (1 - smooth) * plain / rope.factor + smooth * plain
        scaled = np.where(wave > rope.length / rope.low, plain / np.float32(rope.factor), between)
        plain = np.where(wave < rope.length / rope.high, plain, scaled).astype(np.float32)
    return jnp.asarray(plain)[None, None]


def _plain(width: int, theta: float) -> Frequencies:
    """Return the unscaled angle of position 1 for each pair of dimensions."""
    # If the power is rounded before its reciprocal is taken, 127 of 128 values equal torch's.
    return 1 / (theta ** (np.arange(0, width, 2) / width)).astype(np.float32)


def _yarn(plain: Frequencies, width: int, theta: float, rope: YarnRope) -> Frequencies:
    """Return YaRN's frequencies: a mix of the scaled and the `plain` frequencies, whose shares
    follow a ramp over the dimensions."""

    def dimension(turns: float) -> float:
        """Return the number of the pair of dimensions that makes `turns` turns in rope.length
        tokens. The number need not be whole."""
        return width * math.log(rope.length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001  # as in transformers
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    unscaled_share = 1 - ramp.astype(np.float32)
    scaled = 1 / (np.float32(rope.factor) * (1 / plain))
    return scaled * (1 - unscaled_share) + plain * unscaled_share
