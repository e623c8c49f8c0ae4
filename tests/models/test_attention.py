"""Attention within segments, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from representatives import each

from jaxembed.models import attention
from jaxembed.models.attention import (
    EVERYTHING,
    AttentionMask,
    ByNative,
    attend,
    attend_joint,
    by_native,
    by_xla,
    using,
)
from jaxembed.models.layers import BiasByDistance
from jaxembed.models.rope import Rotation

HEADS, WIDTH = 2, 8

SIGHTS = {
    "everything": EVERYTHING,
    "causal": AttentionMask(causal=True),
    "window": AttentionMask(reach=3),
    "causal window": AttentionMask(causal=True, reach=5),
    "window of one": AttentionMask(reach=0),
    "window wider than the row": AttentionMask(reach=100),
}


def reference(
    query,
    key,
    value,
    segments,
    attention_mask: AttentionMask = EVERYTHING,
    bias=None,
    key_segments=None,
) -> np.ndarray:
    """By numpy in float64; zeros in padding and where no key is seen."""
    per_group, at = query.shape[2] // key.shape[2], np.arange(segments.shape[1])
    real = (segments != 0)[..., None, None]
    query, key, value = (
        np.where(real, x, 0).astype(np.float64).swapaxes(1, 2) for x in (query, key, value)
    )
    key, value = (np.repeat(x, per_group, axis=1) for x in (key, value))
    scores = query @ key.swapaxes(2, 3) / np.sqrt(query.shape[3])
    distance = at[:, None] - at
    if attention_mask.cap is not None:
        scores = attention_mask.cap * np.tanh(scores / attention_mask.cap)
    if bias is not None:
        scores = scores + np.asarray(bias)[:, at[-1] - distance]
    keys = segments if key_segments is None else key_segments
    seen = segments[:, None, :, None] == keys[:, None, None, :]
    seen = seen & real.swapaxes(1, 2) & ((distance >= 0) | (not attention_mask.causal))
    if attention_mask.reach is not None:
        seen &= abs(distance) <= attention_mask.reach
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e300))
    total = np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    return (weights @ value / total).swapaxes(1, 2)


def ragged(length: int, *lengths_of_rows: list[int]) -> np.ndarray:
    """Segments of the given lengths from the left of each row, the rest padding."""
    segments = np.zeros((len(lengths_of_rows), length), np.int32)
    for row, lengths in enumerate(lengths_of_rows):
        of_row = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        segments[row, : len(of_row)] = of_row
    return segments


def draw(segments: np.ndarray, per_group: int = 1) -> list[np.ndarray]:
    """Queries of so many heads for each head of keys and values."""
    generator = np.random.default_rng(0)
    heads = [HEADS * per_group, HEADS, HEADS]
    return [generator.standard_normal((*segments.shape, n, WIDTH), np.float32) for n in heads]


@pytest.fixture(name="small_blocks")
def _small_blocks(monkeypatch) -> None:
    """Rows over 16 tokens go block by block, 8 queries at a time."""
    monkeypatch.setattr(attention, "WHOLE_SCORES", 16)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    monkeypatch.setattr(attention, "LOCAL_BLOCK", 8)


SEGMENTS = {
    "whole": ragged(16, [16], [5, 4, 7], [1, 1, 1, 10], [3]),
    "blocks": ragged(32, [32], [9, 8, 15], [1, 30], [2]),
    "a block not full": ragged(29, [29], [9, 20], [1, 7, 8, 9], [2]),
    "one over": ragged(17, [17], [16, 1], [8, 9], [1]),
}
FEW_SEGMENTS = "whole", "a block not full"
FEW_SIGHTS = "everything", "causal window"
NOT_FULL = "a block not full", 3


def assert_attends(segments, operands, attention_mask=EVERYTHING, bias=None, rtol=1e-5, atol=2e-6):
    """Beside padding of NaN, as the reference; rtol: float32, sums of at most 32 terms."""
    poisoned = [np.where(segments[..., None, None] == 0, np.nan, x) for x in operands]
    mixed = attend(
        *(jnp.asarray(x, jnp.float32) for x in poisoned),
        jnp.asarray(segments),
        attention_mask,
        bias,
    )
    wanted, real = reference(*operands, segments, attention_mask, bias), segments != 0
    np.testing.assert_allclose(np.asarray(mixed)[real], wanted[real], rtol=rtol, atol=atol)


def bias_of(heads: int, length: int) -> jax.Array:
    """Of size three, so that a head or a distance taken for another is seen."""
    shape = heads, 2 * length - 1
    return jnp.asarray(3 * np.random.default_rng(1).standard_normal(shape, np.float32))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("attention_mask", each(SIGHTS, *FEW_SIGHTS))
@pytest.mark.parametrize("per_group", each([1, 3], 3))
@pytest.mark.parametrize("name", each(SEGMENTS, *FEW_SEGMENTS))
def test_packed_segments_attend_to_themselves_beside_nan(name, per_group, attention_mask):
    assert_attends(SEGMENTS[name], draw(SEGMENTS[name], per_group), SIGHTS[attention_mask])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "attention_mask",
    each([EVERYTHING, AttentionMask(reach=3), AttentionMask(True, 5)], AttentionMask(reach=3)),
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "per_group"),
    each([("whole", 1), ("whole", 3), ("blocks", 1), NOT_FULL], ("whole", 1), NOT_FULL),
)
def test_a_bias_is_added_by_head_and_distance(name, per_group, attention_mask):
    segments = SEGMENTS[name]
    bias = bias_of(HEADS * per_group, segments.shape[1])
    assert_attends(segments, draw(segments, per_group), attention_mask, bias)


def last_hidden(segments: np.ndarray) -> np.ndarray:
    """The segments of keys, where the last third of each segment is hidden."""
    hidden = segments.copy()
    for row in hidden:
        for segment in set(row.tolist()) - {0}:
            at = np.flatnonzero(row == segment)
            row[at[len(at) - len(at) // 3 :]] = -1
    return hidden


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "attention_mask",
    each([EVERYTHING, AttentionMask(reach=9), AttentionMask(causal=True)], AttentionMask(reach=9)),
    ids=str,
)
@pytest.mark.parametrize("per_group", each([1, 3], 3))
@pytest.mark.parametrize("name", each(SEGMENTS, *FEW_SEGMENTS))
def test_no_query_sees_a_key_that_is_hidden(name, per_group, attention_mask):
    """Also the hidden tokens' own queries, which see the others; those without any stay finite."""
    segments = SEGMENTS[name]
    query, key, value = draw(segments, per_group)
    key_segments = last_hidden(segments)
    operands = map(jnp.asarray, (query, key, value, segments))
    mixed = np.asarray(attend(*operands, attention_mask, key_segments=jnp.asarray(key_segments)))
    wanted = reference(query, key, value, segments, attention_mask, key_segments=key_segments)
    real = wanted.any(axis=(2, 3))
    assert real.sum() > (segments != 0).sum() / 2
    assert np.isfinite(mixed[segments != 0]).all()
    np.testing.assert_allclose(mixed[real], wanted[real], rtol=1e-5, atol=1e-6)


def test_hidden_keys_leave_native_kernels_alone():
    """Which take one array of segments, and would have to be loaded."""
    segments = SEGMENTS["whole"]
    query, key, value = draw(segments)
    joint = jnp.asarray(np.stack([query, key, value], axis=2), jnp.bfloat16)
    operands = joint, jnp.asarray(segments)
    hidden = {"key_segments": jnp.asarray(last_hidden(segments))}
    wanted = attend_joint(*operands, **hidden)
    with using(by_native):
        np.testing.assert_array_equal(attend_joint(*operands, **hidden), wanted)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", FEW_SEGMENTS)
def test_a_soft_cap_bends_scores_before_the_mask(name):
    query, key, value = draw(SEGMENTS[name])
    attention_mask = AttentionMask(causal=True, reach=5, cap=3.0)
    assert_attends(SEGMENTS[name], (8 * query, key, value), attention_mask)  # scores of size eight


@pytest.mark.parametrize("length", [1, 4, 5, 6, 16])
def test_the_ends_of_a_table_serve_all_distances_beyond(length):
    table = np.arange(2 * 9, dtype=np.float32).reshape(2, 9)  # distances up to 4
    layer = BiasByDistance(heads=2, reach=4)
    layer.bias[...] = jnp.asarray(table)
    bias = np.asarray(layer(length))
    distances = np.arange(1 - length, length)
    np.testing.assert_array_equal(bias, table[:, np.clip(distances, -4, 4) + 4])


@pytest.mark.parametrize("length", each([112, 256, 257, 320], 257))
@pytest.mark.parametrize(
    "attention_mask", [EVERYTHING, AttentionMask(reach=64), AttentionMask(causal=True)], ids=str
)
def test_the_shipped_constants_give_the_same_on_both_sides_of_the_limit(length, attention_mask):
    segments = ragged(length, [length - 100, 60])
    operands = draw(segments)
    for bias in (None, bias_of(HEADS, length)):
        assert_attends(segments, operands, attention_mask, bias, rtol=1e-4, atol=1e-5)
        joint = jnp.asarray(np.stack(operands, axis=2))
        mixed = attend_joint(joint, jnp.asarray(segments), attention_mask, bias)
        wanted, real = reference(*operands, segments, attention_mask, bias), segments != 0
        np.testing.assert_allclose(np.asarray(mixed)[real], wanted[real], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("huge", [1e15, 1e30, 3e38])
@pytest.mark.parametrize("name", FEW_SEGMENTS)
def test_huge_neighbours_in_the_row_change_nothing(name, huge):
    """1e15 squared fits float32, the others' scores overflow to infinity."""
    segments = SEGMENTS[name]
    clean = draw(segments)
    others = np.sign(clean[1]) * np.float32(huge)
    first = segments == 1
    poisoned = [np.where(first[..., None, None], x, others) for x in clean]
    mixed = [
        np.asarray(attend(*map(jnp.asarray, three), jnp.asarray(segments)))
        for three in (clean, poisoned)
    ]
    np.testing.assert_allclose(mixed[1][first], mixed[0][first], rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", FEW_SEGMENTS)
def test_bfloat16_operands_are_summed_in_float32(name):
    segments = SEGMENTS[name]
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float32) for x in draw(segments)]
    mixed = attend(*(jnp.asarray(x, jnp.bfloat16) for x in rounded), jnp.asarray(segments))
    assert mixed.dtype == jnp.float32
    real = segments != 0
    wanted = reference(*rounded, segments)
    # bfloat16 has 8 bits: the scaled query and the weights are rounded to them
    np.testing.assert_allclose(np.asarray(mixed)[real], wanted[real], atol=0.03)


@pytest.mark.parametrize("length", [128, 1024])
def test_scores_of_long_rows_never_stand_in_memory_at_once(length):
    """Above the limits a block of queries has its scores at once on any platform, not the row."""
    heads = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((2, length), jnp.int32)
    bias = jax.ShapeDtypeStruct((4, 2 * length - 1), jnp.float32)
    for text in (
        str(jax.make_jaxpr(attend)(heads, heads, heads, segments)),
        str(jax.make_jaxpr(lambda *x: attend(*x[:4], bias=x[4]))(*[heads] * 3, segments, bias)),
    ):
        assert (f"4,{length},{length}" in text) == (length <= attention.WHOLE_SCORES)


@pytest.mark.parametrize(("length", "width"), [(50, 32), (64, 80), (50, 72), (48, 16)])
@pytest.mark.parametrize(
    "attention_mask", [EVERYTHING, AttentionMask(causal=True, reach=5), AttentionMask(cap=3.0)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_padded_native_attention_is_that_of_xla(
    native_kernels, length, width, attention_mask, has_bias
):
    draw = np.random.default_rng(0)
    segments = jnp.asarray([[1] * 20 + [2] * 23 + [0] * (length - 43)])
    query, key, value = (
        jnp.asarray(x, jnp.float32) for x in draw.standard_normal((3, 1, length, 4, width))
    )
    bias = jnp.asarray(draw.standard_normal((4, 2 * length - 1)), jnp.float32) if has_bias else None
    operands = query, key, value, segments, attention_mask, bias
    got = jax.jit(lambda: ByNative(dtype="float32")(*operands))()
    real = np.asarray(segments) != 0
    np.testing.assert_allclose(got[real], by_xla(*operands)[real], atol=2e-6)


@pytest.mark.parametrize("width", [16, 32, 48, 80])
def test_native_float32_attention_rotates_heads_of_any_multiple_of_16(native_kernels, width):
    draw = np.random.default_rng(0)
    segments = jnp.asarray([[1] * 20 + [2] * 23 + [0] * 5])
    joint = draw.standard_normal((1, 48, 3, 4, width), np.float32)
    joint[np.asarray(segments) == 0] = np.nan
    turns = draw.standard_normal((1, 48, width // 2), np.float32)
    operands = (
        jnp.asarray(joint),
        segments,
        EVERYTHING,
        None,
        Rotation(jnp.cos(turns), jnp.sin(turns)),
    )
    with using(ByNative(dtype="float32")):
        call = jax.jit(lambda: attend_joint(*operands))
        assert "jaxembed_joint_attention" in call.lower().as_text()
        got = call()
    real = np.asarray(segments) != 0
    np.testing.assert_allclose(got[real], attend_joint(*operands)[real], atol=2e-6)
