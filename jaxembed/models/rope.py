"""Rotary position embeddings: the angles of each token, and the kinds of scaling for long texts.

Su et al. 2021, arXiv:2104.09864. Frequencies are computed on the host in float32, in the order of
transformers' modeling_rope_utils, so that they have torch's values. Kinds that depend on the length
of a text take the length of each segment, so that its vector does not depend on its neighbours.
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


class LinearRope(msgspec.Struct, frozen=True, tag_field="kind", tag="linear"):
    """Every angle is divided by `factor`. Chen et al. 2023, arXiv:2306.15595."""

    factor: float


class DynamicRope(msgspec.Struct, frozen=True, tag_field="kind", tag="dynamic"):
    """The base grows with the length of a text that is longer than `length` tokens."""

    factor: float
    length: int


class YarnRope(msgspec.Struct, frozen=True, tag_field="kind", tag="yarn"):
    """Low frequencies are divided by `factor`, high ones are not. Peng et al. 2023,
    arXiv:2309.00071."""

    factor: float
    length: int  # of the texts that the model was trained on first
    magnitude: float  # factor of cosine and sine, by which scores grow
    beta_fast: float = 32.0  # dimensions that turn this often within `length` are not scaled
    beta_slow: float = 1.0  # those that turn less often than this are scaled in full
    truncate: bool = True  # whether the ramp between them begins and ends at whole dimensions


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="kind", tag="llama3"):
    """Long waves are divided by `factor`, short ones are not. Llama 3.1."""

    factor: float
    length: int  # of the texts that the model was trained on first
    low: float  # waves longer than length / low are scaled in full
    high: float  # waves shorter than length / high are not scaled


class LongRope(msgspec.Struct, frozen=True, tag_field="kind", tag="longrope"):
    """Each frequency is divided by a factor of its own. Ding et al. 2024, arXiv:2402.13753."""

    short: tuple[float, ...]
    long: tuple[float, ...]  # of texts that are longer than `length` tokens
    length: int
    magnitude: float  # factor of cosine and sine


RopeScaling = LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope
"""How angles are scaled."""


def read_scaling(fields: Mapping[str, Any] | None) -> RopeScaling | None:
    """The scaling that a tower's config names by `kind` and its fields; None: there is none."""
    return None if fields is None else msgspec.convert(fields, RopeScaling)


@no_type_check  # JAX rebuilds it with other leaves
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """The angles by which rotary position embeddings rotate each token's heads.

    They are float32 whatever the parameters' dtype, because bfloat16 rounds position 257 to 256.
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
    ) -> "Rotation":
        """Compute the angles: position / theta^(2k / width) for the k-th pair of dimensions.

        `width` is the width of a head. With `sections` the first so many pairs take the time of a
        token for its position, the next its row, the others its column: its position plus the
        number in `places`. Wang et al. 2024, arXiv:2409.12191.
        """
        positions = tokens.positions[:, :, None]
        if sections:
            assert tokens.places is not None
            axes = np.repeat(np.arange(len(sections)), sections)
            positions = (positions + tokens.places)[:, :, axes]
        angles = positions.astype(jnp.float32) * _frequencies(tokens, width, theta, scaling)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        magnitude = scaling.magnitude if isinstance(scaling, YarnRope | LongRope) else 1.0
        return cls(cos, sin) if magnitude == 1.0 else cls(cos * magnitude, sin * magnitude)

    @classmethod
    def of_grid(cls, row: Segments, column: Segments, width: int, theta: float) -> "Rotation":
        """Compute the angles of tokens in a plane: the first half of the pairs of dimensions is
        rotated by the row, the second by the column, both by the same frequencies."""
        frequencies = jnp.asarray(_plain(width // 2, theta))[None, None]
        axes = (axis[:, :, None].astype(jnp.float32) * frequencies for axis in (row, column))
        angles = jnp.concatenate(list(axes), axis=-1)
        return cls(jnp.cos(angles), jnp.sin(angles))

    def __call__(
        self, x: Float[Array, "rows length heads width"]
    ) -> Float[Array, "rows length heads width"]:
        """Rotate dimensions k and k + width / 2 together, as transformers' rotate_half does."""
        cos, sin = self.cos[:, :, None], self.sin[:, :, None]
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def segment_lengths(tokens: PackedTokens) -> Segments:
    """The number of tokens of each token's segment."""
    segments, index = tokens.segments, jnp.arange(tokens.segments.shape[1])[None]
    ends = jnp.ones_like(segments, bool).at[:, :-1].set(segments[:, 1:] != segments[:, :-1])
    last = lax.cummin(jnp.where(ends, index, segments.shape[1]), axis=1, reverse=True)
    first = index - tokens.positions
    return last - first + 1


def _frequencies(
    tokens: PackedTokens, width: int, theta: float, rope: RopeScaling | None
) -> Float[Array, "..."]:
    """The angle of position 1 in each pair of dimensions, for all tokens or for each."""
    plain = _plain(width, theta)
    if isinstance(rope, DynamicRope):
        # those of theta * growth^(width / (width - 2)), computed as plain * growth^(-2k / (width -
        # 2)): the power of the whole base would lose more digits on the device
        longer = jnp.maximum(segment_lengths(tokens), rope.length)
        growth = rope.factor * (longer.astype(jnp.float32) / rope.length) - (rope.factor - 1)
        powers = jnp.asarray(np.arange(0, width, 2) / max(width - 2, 1), jnp.float32)
        return jnp.asarray(plain)[None, None] * jnp.exp(
            -jnp.log(growth)[:, :, None] * powers[None, None]
        )
    if isinstance(rope, LongRope):
        waves = theta ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
        short, long = (1 / (np.array(x, np.float32) * waves) for x in (rope.short, rope.long))
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
    # rounding the power before its reciprocal gives torch's values: 127 of 128 bit for bit
    return 1 / (theta ** (np.arange(0, width, 2) / width)).astype(np.float32)


def _yarn(plain: Frequencies, width: int, theta: float, rope: YarnRope) -> Frequencies:
    def dimension(turns: float) -> float:
        """The dimension that turns this often within the original length."""
        return width * math.log(rope.length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp.astype(np.float32)
    scaled = 1 / (np.float32(rope.factor) * (1 / plain))
    return scaled * (1 - keep) + plain * keep
