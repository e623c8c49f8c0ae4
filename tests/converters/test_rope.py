"""Rotary positions: the angles of every kind of scaling, and how configs name them."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from converters.families import rope
from converters.families.rope import scaled_positions
from jaxembed.errors import CheckpointError, UnsupportedModel
from jaxembed.models.rope import Rotation, read_scaling
from jaxembed.models.tokens import PackedTokens

WIDTH, THETA = 16, 10_000.0
PLAIN = THETA ** (-np.arange(0, WIDTH, 2) / WIDTH)  # float64
POSITIONS = {"max_position_embeddings": 64}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64, "beta_fast": 8.0, "beta_slow": 1.0}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def rope_fields(hf: dict[str, Any], theta: float = THETA) -> dict[str, Any]:
    return rope.rope_fields(hf, WIDTH, theta)


def tokens_of(*lengths: int, room: int = 64) -> PackedTokens:
    """One row with a segment of each length, two tokens of padding after each."""
    positions, segments = np.zeros((2, 1, room), np.int32)
    at = 0
    for number, length in enumerate(lengths):
        positions[0, at : at + length] = np.arange(length)
        segments[0, at : at + length] = number + 1
        at += length + 2
    row, segments = jnp.asarray(positions), jnp.asarray(segments)
    return PackedTokens(row, row, segments, row, jnp.zeros((1, 1, 2), jnp.int32))


def angles(scaling: dict[str, Any] | None, *lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """The angle and the magnitude of each pair of dimensions at each token."""
    rotation = Rotation.of(tokens_of(*lengths), WIDTH, THETA, read_scaling(scaling))
    cos, sin = np.array(rotation.cos[0], np.float64), np.array(rotation.sin[0], np.float64)
    return np.arctan2(sin, cos), np.hypot(cos, sin)


def assert_turned(got: np.ndarray, frequencies: np.ndarray, length: int) -> None:
    wanted = np.arange(length)[:, None] * frequencies
    difference = got[:length] - wanted
    # float32 at 64 radians; angles are known up to whole turns
    assert np.abs(difference - 2 * np.pi * np.round(difference / (2 * np.pi))).max() < 2e-5


def test_linear_divides_every_angle():
    got, _ = angles({"kind": "linear", "factor": 2.5}, 40)
    assert_turned(got, PLAIN / 2.5, 40)


def dynamic(length: int, factor: float = 2.0, trained: int = 16) -> np.ndarray:
    """The frequencies of transformers' formula in float64."""
    growth = max(factor * length / trained - (factor - 1), 1)
    return (THETA * growth ** (WIDTH / (WIDTH - 2))) ** (-np.arange(0, WIDTH, 2) / WIDTH)


def test_dynamic_takes_the_length_of_each_segment_of_a_row():
    scaling = {"kind": "dynamic", "factor": 2.0, "length": 16}
    got, _ = angles(scaling, 16, 40)
    assert_turned(got, PLAIN, 16)
    assert_turned(got[18:], dynamic(40), 40)
    assert np.abs(dynamic(40) - PLAIN).max() > 0.01


def test_longrope_takes_the_length_of_each_segment_of_a_row():
    factors = [np.linspace(1, end, WIDTH // 2).tolist() for end in (2, 9)]
    scaling = {"kind": "longrope", "short": factors[0], "long": factors[1], "length": 16}
    got, magnitude = angles(scaling | {"magnitude": 1.25}, 16, 40)
    assert_turned(got, PLAIN / factors[0], 16)
    assert_turned(got[18:], PLAIN / factors[1], 40)
    np.testing.assert_allclose(magnitude, 1.25, rtol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_scales_low_frequencies_and_the_magnitude_of_short_texts_too(truncate):
    fields = rope_fields(POSITIONS | {"rope_scaling": YARN | {"truncate": truncate}})
    got, magnitude = angles(fields["rope_scaling"], 10)
    ends = [WIDTH * math.log(32 / (math.pi * turns)) / (2 * math.log(THETA)) for turns in (8, 1)]
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), ends[1]
    ramp = np.clip((np.arange(WIDTH // 2) - low) / (high - low), 0, 1)
    assert_turned(got, PLAIN * (1 - ramp) + PLAIN / 4 * ramp, 10)
    np.testing.assert_allclose(magnitude, 0.1 * math.log(4) + 1, rtol=1e-6)


def test_llama3_scales_long_waves():
    fields = rope_fields(POSITIONS | {"rope_scaling": LLAMA3})
    got, magnitude = angles(fields["rope_scaling"], 40)
    waves = 2 * np.pi / PLAIN
    blend = np.clip((64 / waves - 1) / 3, 0, 1)
    assert (waves < 16).any()
    assert (waves > 64).any()
    assert_turned(got, (1 - blend) * PLAIN / 8 + blend * PLAIN, 40)
    np.testing.assert_allclose(magnitude, 1, atol=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        LLAMA3,
        {"rope_type": "longrope"} | FACTORS,
    ],
)
def test_configs_of_transformers_4_and_5_say_the_same(scaling):
    new = POSITIONS | {"rope_parameters": (scaling or {}) | {"rope_theta": 300.0}}
    old = POSITIONS | {"rope_theta": 300, "rope_scaling": scaling}
    assert rope_fields(new) == rope_fields(old)
    if scaling is not None:  # as before transformers 4.43
        kind = {key: value for key, value in scaling.items() if key != "rope_type"}
        older = old | {"rope_scaling": kind | {"type": scaling["rope_type"]}}
        assert rope_fields(older) == rope_fields(old)
    assert rope_fields(old)["rope_theta"] == 300.0


def test_rope_scaling_wins_over_rope_parameters():
    both = POSITIONS | {
        "rope_theta": 500.0,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    }
    assert rope_fields(both) == {
        "rope_theta": 500.0,
        "rope_scaling": {"kind": "linear", "factor": 3.0},
    }


def test_what_configs_leave_out_is_as_in_transformers():
    assert rope_fields({}, 1e6) == {"rope_theta": 1e6, "rope_scaling": None}

    def scaling(said: dict[str, Any], **above: int) -> dict[str, Any]:
        return rope_fields(POSITIONS | above | {"rope_scaling": said})["rope_scaling"]

    bare = {"rope_type": "yarn", "factor": 2.0}
    assert scaling(bare).items() >= {"length": 64, "beta_fast": 32.0, "beta_slow": 1.0}.items()
    assert scaling(YARN, **{ORIGINAL: 16})["length"] == 16  # the top level wins
    assert scaling(YARN | {"factor": None, ORIGINAL: 16})["factor"] == 4.0
    assert scaling(YARN | {"mscale": 1.0, "mscale_all_dim": 1.0})["magnitude"] == 1.0
    assert scaling(YARN | {"attention_factor": 1.5})["magnitude"] == 1.5
    long = {"rope_type": "longrope", ORIGINAL: 16} | FACTORS
    assert scaling(long)["magnitude"] == math.sqrt(1 + math.log(4) / math.log(16))


def test_dynamic_and_yarn_reach_beyond_the_positions_that_they_extend():
    for scaling, limit in (
        (None, 64),
        ({"rope_type": "linear", "factor": 2.0}, 64),
        ({"rope_type": "dynamic", "factor": 2.0}, 128),
        (YARN, 256),
        (YARN | {ORIGINAL: 8}, 64),
        (LLAMA3, 64),
    ):
        hf = POSITIONS | {"rope_scaling": scaling}
        assert scaled_positions(hf, rope_fields(hf)["rope_scaling"]) == limit


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"rope_type": "ntk", "factor": 8.0}, UnsupportedModel, "rope_type 'ntk'"),
        ({"rope_type": "linear", "factor": 2, "x": 1}, UnsupportedModel, "with x are not"),
        ({"mrope_section": [1, 2]}, UnsupportedModel, "mrope_section"),
        ({"factor": 2.0}, UnsupportedModel, "with factor are not supported"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor 0.5"),
        ({"rope_type": "linear"}, CheckpointError, "factor is None, wanted a number"),
        ({"rope_type": "dynamic", "factor": -1}, CheckpointError, "factor is -1"),
        (LLAMA3 | {"low_freq_factor": None}, CheckpointError, "low_freq_factor is None"),
        ({"rope_type": "longrope"}, CheckpointError, "short_factor is None, wanted a list of 8 n"),
        ({"rope_theta": 0}, CheckpointError, "rope_theta is 0, wanted a number over 0"),
        ({"rope_theta": "1e6"}, CheckpointError, "rope_theta is '1e6'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(parameters, error, message):
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(error, match=message):
            rope_fields(POSITIONS | {key: parameters})
