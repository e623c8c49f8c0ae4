"""Copies a sparse output from a device to the host, without its zeros.

`gather_nonzero` collects a fixed number of nonzero values on the device. `fetch_rows` copies these
values, or the dense output if it has more nonzero values than were collected.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxembed.data.work import SparseRows, to_sparse_rows

# The number of nonzero values that a device gathers, for each token of a bucket. If a batch has
# more, the result is still right, but the larger dense output is copied.
VALUES_A_TOKEN = 8


class Gathered(NamedTuple):
    """An output on a device that is mostly zero, and its nonzero values.

    A mesh of `shards` devices divides every array along its first axis into equal shards. At most
    `room` nonzero values of each shard are gathered.
    """

    dense: Float[Array, "rows slots width"]
    places: Int[Array, " shards*room"]  # ascending indices into a shard of `dense`, flattened
    values: Float[Array, " shards*room"]
    counts: Int[Array, " shards"]  # number of nonzero values of a shard; may be more than `room`


def gather_nonzero(dense: Float[Array, "rows slots width"], tokens: int) -> Gathered:
    """Gather the nonzero values of one shard, whose rows hold `tokens` tokens, on the device."""
    flat = dense.reshape(-1)
    room = min(VALUES_A_TOKEN * tokens, flat.size)
    (places,) = jnp.nonzero(flat, size=room, fill_value=0)
    return Gathered(dense, places, flat[places], jnp.count_nonzero(flat).reshape(1))


def fetch_rows(output: Any) -> SparseRows:
    """Copy a sparse output to the host. Returns its nonzero values as rows `[rows * slots, width]`.

    `output` is a Gathered, or a dense array `[rows, slots, width]` if the device is a CPU."""
    dense = output.dense if isinstance(output, Gathered) else output
    rows, slots, width = dense.shape
    if isinstance(output, Gathered):
        counts = np.asarray(output.counts)
        room = len(output.places) // len(counts)
        if counts.max() <= room:
            places = np.asarray(output.places).reshape(len(counts), room)
            values = np.asarray(output.values).reshape(len(counts), room)
            used = np.arange(room) < counts[:, None]
            size = dense.size // len(counts)
            # index of each shard's first value in the flattened output
            first = np.arange(len(counts), dtype=np.int64)[:, None] * size
            return SparseRows.from_flat((first + places)[used], values[used], rows * slots, width)
    return to_sparse_rows(np.asarray(dense).reshape(-1, width))
