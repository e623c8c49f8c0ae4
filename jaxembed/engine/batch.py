"""A bucket for what waits, and its layout: `choose`, `place` and `pack`, three pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.ticket import Entry
from jaxembed.models.tokens import PackedTokens

EXPECTED_FILL = 0.97  # of a bucket with enough waiting; 0.94 to 1.00 on real length mixes
BRIEF_MS = 25.0  # a batch that a lone query may have to wait for need be no shorter
BRIEF_LOSS = 0.25  # of the best rate, at most, to be brief; less, for the estimate fills no gaps


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


def choose(waiting: Sequence[Entry], cost: Mapping[Bucket, float], brief: bool = False) -> Bucket:
    """The bucket to run next for the entries that wait, the first of which must be in the batch.

    `cost` gives the measured milliseconds of every bucket that may be used. Among those that hold
    the first entry, and there must be one, the one with the fewest milliseconds per useful token
    is chosen; if the batch shall be `brief`, the briefest of those that are nearly as good.
    """
    lengths = np.array([entry.length for entry in waiting])
    candidates = [bucket for bucket in cost if bucket.length >= lengths[0]]
    rates = {bucket: cost[bucket] / _useful(lengths, bucket) for bucket in candidates}
    best = min(candidates, key=rates.__getitem__)
    if not brief:
        return best
    near = [b for b in candidates if (1 - BRIEF_LOSS) * rates[b] <= rates[best]]
    return min(near, key=lambda b: (max(cost[b], BRIEF_MS), rates[b]))


def _useful(lengths: np.ndarray, bucket: Bucket) -> float:
    """About how many tokens of the oldest entries a bucket would carry."""
    if len(lengths) == 1:  # a lone query: 5 us of numpy for each bucket would be felt
        return float(lengths[0])
    fitting = lengths[lengths <= bucket.length]
    held = np.cumsum(fitting[: bucket.rows * bucket.slots])
    room = max(int(EXPECTED_FILL * bucket.tokens), int(fitting[0]))
    return float(held[np.searchsorted(held, room, side="right") - 1])


def place(bucket: Bucket, *groups: Sequence[Entry], most: int | None = None) -> Batch:
    """Put as many entries as fit on the bucket: one group after the other, and of each the longest
    first into the fullest row that still holds it (best fit decreasing). `most` limits the number
    of sequences."""
    shelf = Shelf(bucket)
    placed, rows, slots, starts = [], [], [], []
    for group in groups:
        for entry in sorted(_first(group, bucket), key=lambda entry: -entry.length):
            if len(placed) == most:
                break
            spot = shelf.put(entry.length)
            if spot is not None:
                placed.append(entry)
                rows.append(spot[0])
                slots.append(spot[1])
                starts.append(spot[2])
    return Batch(bucket, placed, np.array(rows), np.array(slots), np.array(starts))


def _first(group: Sequence[Entry], bucket: Bucket) -> list[Entry]:
    """The first entries that fit on the bucket: those that fill it, and a quarter more to fill gaps
    with."""
    lengths = np.array([entry.length for entry in group])
    held = np.cumsum(np.where(lengths <= bucket.length, lengths, 0))
    enough = int(np.searchsorted(held, 1.25 * bucket.tokens)) + 1
    return [entry for entry in group[:enough] if entry.length <= bucket.length]


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
