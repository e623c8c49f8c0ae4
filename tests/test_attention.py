"""Attention within segments, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxembed.models import attention
from jaxembed.models.attention import attend

HEADS, WIDTH = 2, 8


def reference(query, key, value, segments) -> np.ndarray:
    """One segment, one head, one query at a time, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    mixed = np.zeros_like(query)
    for row in range(len(segments)):
        for segment in set(segments[row].tolist()) - {0}:
            at = np.flatnonzero(segments[row] == segment)
            for head in range(query.shape[2]):
                scores = query[row, at, head] @ key[row, at, head].T / np.sqrt(query.shape[3])
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                mixed[row, at, head] = weights @ value[row, at, head]
    return mixed


def ragged(length: int, *lengths_of_rows: list[int]) -> np.ndarray:
    """Segments of the given lengths from the left of each row, the rest padding."""
    segments = np.zeros((len(lengths_of_rows), length), np.int32)
    for row, lengths in enumerate(lengths_of_rows):
        of_row = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        segments[row, : len(of_row)] = of_row
    return segments


def draw(segments: np.ndarray, seed: int = 0) -> list[np.ndarray]:
    shape = (*segments.shape, HEADS, WIDTH)
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape, np.float32) for _ in range(3)]


@pytest.fixture(name="small_blocks")
def _small_blocks(monkeypatch) -> None:
    """Rows over 16 tokens go block by block, 8 queries at a time."""
    monkeypatch.setattr(attention, "WHOLE_SCORES", 16)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)


SEGMENTS = {
    "whole": ragged(16, [16], [5, 4, 7], [1, 1, 1, 10], [3]),
    "blocks": ragged(32, [32], [9, 8, 15], [1, 30], [2]),
    "a block not full": ragged(29, [29], [9, 20], [1, 7, 8, 9], [2]),
    "one over": ragged(17, [17], [16, 1], [8, 9], [1]),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", SEGMENTS)
def test_packed_segments_attend_to_themselves(name):
    segments = SEGMENTS[name]
    query, key, value = draw(segments)
    mixed = attend(*map(jnp.asarray, (query, key, value, segments)))
    real = segments != 0
    wanted = reference(query, key, value, segments)
    # rtol: float32, sums of at most 32 terms
    np.testing.assert_allclose(np.asarray(mixed)[real], wanted[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [256, 257, 320])
def test_the_shipped_constants_give_the_same_on_both_sides_of_the_limit(length):
    segments = ragged(length, [length - 100, 60])
    query, key, value = draw(segments)
    mixed = attend(*map(jnp.asarray, (query, key, value, segments)))
    real = segments != 0
    wanted = reference(query, key, value, segments)
    np.testing.assert_allclose(np.asarray(mixed)[real], wanted[real], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", SEGMENTS)
def test_nan_in_padding_reaches_no_real_token(name):
    segments = SEGMENTS[name]
    clean = draw(segments)
    poisoned = [np.where(segments[..., None, None] == 0, np.nan, x) for x in clean]
    real = segments != 0
    mixed = [
        np.asarray(attend(*(jnp.asarray(x, jnp.float32) for x in three), jnp.asarray(segments)))
        for three in (clean, poisoned)
    ]
    np.testing.assert_array_equal(mixed[1][real], mixed[0][real])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("huge", [1e15, 1e30, 3e38])
@pytest.mark.parametrize("name", ["whole", "a block not full"])
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
@pytest.mark.parametrize("name", ["whole", "a block not full"])
def test_bfloat16_operands_are_summed_in_float32(name):
    segments = SEGMENTS[name]
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16)).astype(np.float32) for x in draw(segments)]
    mixed = attend(*(jnp.asarray(x, jnp.bfloat16) for x in rounded), jnp.asarray(segments))
    assert mixed.dtype == jnp.float32
    real = segments != 0
    wanted = reference(*rounded, segments)
    # bfloat16 has 8 bits: the scaled query and the weights are rounded to them
    np.testing.assert_allclose(np.asarray(mixed)[real], wanted[real], atol=0.03)


@pytest.mark.parametrize("size", [1, 7, 8, 64])
def test_the_size_of_a_block_of_queries_changes_nothing(size):
    segments = SEGMENTS["a block not full"]
    query, key, value, segments = map(jnp.asarray, (*draw(segments), segments))
    whole = attention._scores_times_values(query, segments, key, value, segments)
    blocks = attention._in_query_blocks(query, key, value, segments, size=size)
    np.testing.assert_allclose(blocks, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [128, 1024])
def test_scores_of_long_rows_never_stand_in_memory_at_once(length):
    """Above the limits a block of queries has its scores at once on any platform, not the row."""
    heads = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    segments = jax.ShapeDtypeStruct((2, length), jnp.int32)
    text = str(jax.make_jaxpr(attend)(heads, heads, heads, segments))
    assert (f"2,4,{length},{length}" in text) == (length <= attention.WHOLE_SCORES)
