"""Copies the outputs of a batch from a device to the host, without what nobody needs.

A device with its own memory copies slowly, and in most batches few slots are in use. So the
program of a bucket gathers the slots in use and returns them in parts, and the host copies only
the parts that hold some. Of a sparse output, the program gathers the nonzero values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.work import SparseRows, to_sparse_rows
from jaxembed.engine.bucket import Bucket
from jaxembed.models.tokens import PackedTokens

# The number of nonzero values that a device gathers, for each token of a bucket. If a batch has
# more, the result is still right, but the larger dense output is copied.
VALUES_A_TOKEN = 8
# The smallest part of a bucket's slots is this share of its rows. A full batch uses at least one
# slot of each row, so it copies at most this share more than it uses.
SMALLEST_PART = 1 / 8


def is_remote(platform: str) -> bool:
    """Return whether the outputs of a platform's devices must be copied to the host: those of a CPU
    are in the host's memory."""
    return platform != "cpu"


class Gathered(NamedTuple):
    """An output on a device that is mostly zero, and its nonzero values.

    A mesh of `shards` devices divides every array along its first axis into equal shards. At most
    `room` nonzero values of each shard are gathered.
    """

    dense: Float[Array, "rows slots width"]
    places: Int[Array, " shards*room"]  # ascending indices into a shard of `dense`, flattened
    values: Float[Array, " shards*room"]
    counts: Int[Array, " shards"]  # number of nonzero values of a shard; may be more than `room`


def gather_parts(
    flat: Float[Array, "slots width"], order: Int[Array, " places"], sizes: Sequence[int]
) -> list[Float[Array, "_ width"]]:
    """Return `flat[order]` in parts of these sizes, as XLA computes it."""
    return [flat[part] for part in jnp.split(order, np.cumsum(sizes)[:-1].tolist())]


def gather(
    computed: Mapping[OutputName, Array],
    order: Int[Array, " places"],
    tokens: int,
    by: Callable[..., list[Array]] = gather_parts,
) -> dict[OutputName, Any]:
    """Gather on the device what the host may need of the outputs of one shard.

    `order` is the shard's part of `UsedSlots.order`, and `tokens` the number of tokens of the
    shard's rows. Of a sparse output the result is a Gathered, of another output per slot a list of
    the parts, and an output per token is left as it is. `by` is `gather_parts`, or a kernel that
    returns the same.
    """
    gathered: dict[OutputName, Any] = {}
    for name, output in computed.items():
        if OUTPUTS[name].sparse:
            gathered[name] = gather_nonzero(output, tokens)
        elif OUTPUTS[name].per == "slot":
            rows, slots, width = output.shape
            flat = output.reshape(-1, width)
            gathered[name] = by(flat, order, part_sizes(rows, slots))
        else:
            gathered[name] = output
    return gathered


def gather_nonzero(dense: Float[Array, "rows slots width"], tokens: int) -> Gathered:
    """Gather the nonzero values of one shard, whose rows hold `tokens` tokens, on the device."""
    flat = dense.reshape(-1)
    room = min(VALUES_A_TOKEN * tokens, flat.size)
    (places,) = jnp.nonzero(flat, size=room, fill_value=0)
    return Gathered(dense, places, flat[places], jnp.count_nonzero(flat).reshape(1))


@cache
def part_sizes(rows: int, slots: int) -> tuple[int, ...]:
    """Return the number of slots in each part that a device with so many rows returns.

    A part has half of what the parts before it leave. So every number of slots is a sum of some
    sizes, but for less than the smallest one.
    """
    left, smallest = rows * slots, max(int(SMALLEST_PART * rows), 1)
    sizes = []
    while left > smallest:
        sizes.append(-(-left // 2))
        left -= sizes[-1]
    return (*sizes, left)


@dataclass(frozen=True)
class UsedSlots:
    """The slots of a batch that are in use, and the places in the parts where a device puts them.

    A mesh of `shards` devices divides the rows of the batch into equal shards; all shards use the
    same parts. `order` has for each place of a shard, part after part, the slot to put there, as an
    index into the slots of the shard; places without a slot have 0.
    """

    bucket: Bucket
    slots: tuple[np.ndarray, ...]  # of each shard: the indices of the slots in use
    parts: tuple[int, ...]  # the parts that hold some, ascending
    order: np.ndarray  # int32 [shards * places]

    @classmethod
    def of(cls, bucket: Bucket, planes: np.ndarray, shards: int) -> "UsedSlots":
        """Find the slots in use in a packed batch, int32 `[planes, rows, length]`: those whose
        range of tokens ends after 0."""
        bounds = planes[PackedTokens.PLANES - 1]
        in_use = (bounds[:, bucket.slots : 2 * bucket.slots] > 0).reshape(shards, -1)
        slots = tuple(np.flatnonzero(shard) for shard in in_use)
        sizes = part_sizes(bucket.rows // shards, bucket.slots)
        order = np.zeros(in_use.shape, np.int32)
        left, place, taken = max(map(len, slots)), 0, 0
        parts = []
        for k, size in enumerate(sizes):
            if left > in_use.shape[1] - place - size:  # the parts after this one are too few
                for shard, indices in enumerate(slots):
                    chosen = indices[taken : taken + size]
                    order[shard, place : place + len(chosen)] = chosen
                parts.append(k)
                taken, left = taken + size, left - size
            place += size
        return cls(bucket, slots, tuple(parts), order.reshape(-1))

    def fetch(self, output: Sequence[Array]) -> np.ndarray:
        """Copy the parts in use of an output to the host.

        `output` has all parts, each `[shards * size, width]`. Returns the output as float32
        `[rows, slots, width]`, with zeros in the slots that are not in use.
        """
        shards, width = len(self.slots), output[0].shape[1]
        parts = [np.asarray(output[k]).reshape(shards, -1, width) for k in self.parts]
        fetched = np.zeros((shards, len(self.order) // shards, width), np.float32)
        for k, indices in enumerate(self.slots):
            taken = 0
            for part in parts:
                chosen = indices[taken : taken + part.shape[1]]
                fetched[k, chosen] = part[k, : len(chosen)]
                taken += len(chosen)
        return fetched.reshape(self.bucket.rows, self.bucket.slots, width)


def fetch(output: Any, name: OutputName, used: UsedSlots | None) -> Any:
    """Copy an output to the host.

    Returns SparseRows `[rows * slots, width]` of a sparse output, and otherwise float32
    `[rows, slots, width]` or, for an output per token, `[rows, length, width]`. `used` is None for
    an output that is in the host's memory already; else `output` is as `gather` returns it.
    """
    if OUTPUTS[name].sparse:
        return fetch_rows(output)
    if OUTPUTS[name].per == "slot" and used is not None:
        return used.fetch(output)
    return np.asarray(output)


def start_copies(outputs: Mapping[OutputName, Any], used: UsedSlots) -> None:
    """Start to copy to the host what `fetch` will need of these outputs, without waiting."""
    for name, output in outputs.items():
        if OUTPUTS[name].sparse:  # whether the dense output is needed is not known yet
            needed = output[1:]
        else:
            needed = [output[k] for k in used.parts] if OUTPUTS[name].per == "slot" else [output]
        for array in needed:
            array.copy_to_host_async()


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
