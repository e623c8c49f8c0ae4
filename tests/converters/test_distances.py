"""Biases by distance: which bucket each distance has, and the table that a converter makes."""

import numpy as np
import pytest

from converters.families.t5 import bucket, by_distance


def test_buckets_of_distances_are_those_of_transformers():
    """Of its relative_position_bucket."""
    wanted = {-200: 15, -128: 15, -64: 14, -32: 12, -16: 10, -8: 8, -7: 7, -1: 1, 0: 0}
    wanted |= {1: 17, 7: 23, 8: 24, 32: 28, 64: 30, 128: 31, 8000: 31}
    assert bucket(np.array([*wanted]), 32, 128).tolist() == [*wanted.values()]


@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (4, 2), (13, 17), (64, 20), (8, 1000)])
def test_buckets_stay_the_same_from_the_reach_on(buckets, reach):
    far = np.arange(reach, 9000)
    side = buckets // 2
    assert set(bucket(far, buckets, reach)) == {2 * side - 1}
    assert set(bucket(-far, buckets, reach)) == {side - 1}


def test_a_table_has_a_row_for_each_head_and_a_column_for_each_distance():
    table = np.arange(8, dtype=np.float32)[:, None] * [1, 10]  # [buckets, heads]
    made = by_distance(8, 3).apply(table)
    assert made.shape == (2, 7)
    # buckets of 8: 0, 1, and two for longer distances on each side
    np.testing.assert_array_equal(made[0], [3, 2, 1, 0, 5, 6, 7])
    np.testing.assert_array_equal(made[1], 10 * made[0])
