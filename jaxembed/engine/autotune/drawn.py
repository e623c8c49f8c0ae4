"""Makes random batches for trials of kernels."""

import numpy as np

from jaxembed.engine.bucket import Bucket


def packed_segments(bucket: Bucket) -> np.ndarray:
    """Draw the segments of a batch, int32 `[rows, length]`; the same for the same bucket.

    The first row is one segment; the others have up to four, and padding at the end.
    """
    draw = np.random.default_rng(0)
    segments = np.zeros((bucket.rows, bucket.length), np.int32)
    segments[0] = 1
    for row in segments[1:]:
        ends = np.sort(draw.integers(1, bucket.length, size=4))
        for slot, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
            row[first:last] = slot
    return segments
