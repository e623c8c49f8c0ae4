"""Brings the sparse output of a device to the host: only what is not zero, and all of that."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxembed.data.work import SparseRows, sparse_rows

# Values per token of a bucket that there is room for, where they are gathered on the device. It is
# a guess that costs only time: of a batch with more everything is copied.
VALUES_A_TOKEN = 8


class Gathered(NamedTuple):
    """A mostly zero output of a device, and its values that are not zero, as far as there is room.

    A mesh divides each along its first axis: `shards` are so many neighbouring parts.
    """

    dense: Float[Array, "rows slots width"]
    places: Int[Array, " shards*room"]  # in the flattened part of a shard, in ascending order
    values: Float[Array, " shards*room"]
    counts: Int[Array, " shards"]  # of the values that are not zero


def gathered(dense: Float[Array, "rows slots width"], tokens: int) -> Gathered:
    """Gather the values that are not zero, on the device; `tokens` are those of these rows."""
    flat = dense.reshape(-1)
    room = min(VALUES_A_TOKEN * tokens, flat.size)
    (places,) = jnp.nonzero(flat, size=room, fill_value=0)
    return Gathered(dense, places, flat[places], jnp.count_nonzero(flat).reshape(1))


def fetched(output: Any) -> SparseRows:
    """The rows `[rows * slots, width]` of an output, on the host: of a Gathered, or of a device
    whose memory is the host's."""
    dense = output.dense if isinstance(output, Gathered) else output
    rows, slots, width = dense.shape
    if isinstance(output, Gathered):
        counts = np.asarray(output.counts)
        room = len(output.places) // len(counts)
        if counts.max() <= room:
            places = np.asarray(output.places).reshape(len(counts), room)
            values = np.asarray(output.values).reshape(len(counts), room)
            held = np.arange(room) < counts[:, None]
            size = dense.size // len(counts)
            first = np.arange(len(counts), dtype=np.int64)[:, None] * size
            return SparseRows.of_places((first + places)[held], values[held], rows * slots, width)
    return sparse_rows(np.asarray(dense).reshape(-1, width))
