"""Choose what runs next and lay it out on a bucket: `take` and `pack`, two pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.ticket import Entry
from jaxembed.models.tokens import PackedTokens

EXPECTED_FILL = 0.97  # of a bucket with enough waiting; 0.94 to 1.00 on real length mixes
MOST_LOOKED_AT = 4096  # entries; keeps a choice under a millisecond however deep the queue is


@dataclass(frozen=True)
class Batch:
    """Sequences placed on a bucket: entry k is segment `slots[k] + 1` of row `rows[k]` and starts
    at token `starts[k]` of it."""

    bucket: Bucket
    entries: list[Entry]
    rows: np.ndarray
    slots: np.ndarray
    starts: np.ndarray

    @property
    def useful_tokens(self) -> int:
        return sum(entry.length for entry in self.entries)

    @property
    def fill(self) -> float:
        return self.useful_tokens / self.bucket.tokens


def take(waiting: Sequence[Entry], cost: Mapping[Bucket, float], most: int | None = None) -> Batch:
    """The batch to run next, out of the entries that wait, oldest first.

    `cost` gives the measured milliseconds of every bucket that may be used. Among those that hold
    the oldest entry, the one with the fewest milliseconds per useful token is chosen, and the
    oldest entry is always in it, so none starves. Some bucket must hold it. `most` limits the
    number of sequences.
    """
    waiting = waiting[: min(MOST_LOOKED_AT, most or MOST_LOOKED_AT)]
    lengths = np.array([entry.length for entry in waiting])
    candidates = [bucket for bucket in cost if bucket.length >= lengths[0]]
    bucket = min(candidates, key=lambda b: cost[b] / _useful(lengths, b))
    return place(waiting, bucket)


def _useful(lengths: np.ndarray, bucket: Bucket) -> float:
    """About how many tokens of the oldest entries a bucket would carry."""
    fitting = lengths[lengths <= bucket.length]
    held = np.cumsum(fitting[: bucket.rows * bucket.slots])
    room = max(int(EXPECTED_FILL * bucket.tokens), int(fitting[0]))
    return float(held[np.searchsorted(held, room, side="right") - 1])


def place(waiting: Sequence[Entry], bucket: Bucket) -> Batch:
    """Put as many entries as fit on the bucket: the oldest first, then longest first into the
    fullest row that still holds it (best fit decreasing)."""
    shelf = Shelf(bucket)
    chosen = [entry for entry in _oldest(waiting, bucket) if entry.length <= bucket.length]
    order = [chosen[0], *sorted(chosen[1:], key=lambda entry: -entry.length)]
    placed, rows, slots, starts = [], [], [], []
    for entry in order:
        spot = shelf.put(entry.length)
        if spot is not None:
            placed.append(entry)
            rows.append(spot[0])
            slots.append(spot[1])
            starts.append(spot[2])
    return Batch(bucket, placed, np.array(rows), np.array(slots), np.array(starts))


def _oldest(waiting: Sequence[Entry], bucket: Bucket) -> Sequence[Entry]:
    """The entries that fill the bucket, and a quarter more to fill gaps with."""
    lengths = np.array([entry.length for entry in waiting])
    held = np.cumsum(np.where(lengths <= bucket.length, lengths, 0))
    return waiting[: int(np.searchsorted(held, 1.25 * bucket.tokens)) + 1]


class Shelf:
    """The free room of a bucket's rows, found in constant time by the bits of one integer."""

    def __init__(self, bucket: Bucket):
        self._free: dict[int, list[int]] = {bucket.length: list(range(bucket.rows))[::-1]}
        self._rooms = 1 << bucket.length  # bit n is set where some row has n tokens free
        self._used = [0] * bucket.rows
        self._length = bucket.length
        self._slots = bucket.slots

    def put(self, length: int) -> tuple[int, int, int] | None:
        """The row, slot and start for a sequence, in the fullest row that holds it."""
        rooms = self._rooms >> length
        if not rooms:
            return None
        room = length + (rooms & -rooms).bit_length() - 1
        row = self._remove(room)
        slot, start = self._used[row], self._length - room
        self._used[row] += 1
        if self._used[row] < self._slots and room > length:
            self._free.setdefault(room - length, []).append(row)
            self._rooms |= 1 << (room - length)
        return row, slot, start

    def _remove(self, room: int) -> int:
        rows = self._free[room]
        row = rows.pop()
        if not rows:
            self._rooms ^= 1 << room
        return row


def pack(batch: Batch) -> np.ndarray:
    """The batch as int32 `[planes, rows, length]`, in the order of PackedTokens' fields."""
    bucket = batch.bucket
    planes = np.zeros((PackedTokens.FIELDS, bucket.tokens), np.int32)
    lengths = np.array([entry.length for entry in batch.entries])
    total = int(lengths.sum())
    before = np.repeat(np.cumsum(lengths) - lengths, lengths)
    positions = np.arange(total) - before
    segments = np.repeat(batch.slots + 1, lengths)
    target = np.repeat(batch.rows * bucket.length + batch.starts, lengths) + positions
    unpooled = np.repeat([entry.encoding.unpooled for entry in batch.entries], lengths)
    ids, positions_of, segments_of, types, pooled = planes
    ids[target] = np.concatenate([entry.encoding.ids for entry in batch.entries])
    positions_of[target] = positions
    segments_of[target] = segments
    pooled[target] = np.where(positions >= unpooled, segments, 0)
    for entry, row, start in zip(batch.entries, batch.rows, batch.starts, strict=True):
        if entry.encoding.types is not None:
            offset = row * bucket.length + start
            types[offset : offset + entry.length] = entry.encoding.types
    return planes.reshape(PackedTokens.FIELDS, bucket.rows, bucket.length)
