"""Chooses a bucket for waiting entries, places them in its rows and packs them into arrays.

Pure functions: they start no threads, read no clock and change no queue.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.ticket import Entry, flat_ranges
from jaxembed.models.tokens import PackedTokens

# Expected share of useful tokens in a bucket if enough entries wait. Measured: 0.94 to 1.00 on real
# length mixes.
EXPECTED_FILL = 0.97
LOOKAHEAD = 1.25  # tokens of the entries that are considered for a bucket, as multiple of its own
# Host time of a batch: composing, packing and settling. Measured: 0.4 to 0.8 ms on two cores with
# two batches at a time.
HOST_MS = 0.6
BRIEF_MS = 25.0  # shorter runs than this are not preferred: a lone query may wait for so long
# The largest share of the throughput that is given up for a brief batch. The real loss is smaller,
# because the estimate of useful tokens does not count short sequences that fill gaps.
BRIEF_LOSS = 0.25


@dataclass(frozen=True)
class Batch:
    """Entries with their places on a bucket.

    Entry k is in row `rows[k]`, where it is segment `segments[k]` and starts at token `starts[k]`.
    Its slots in this row are numbered from `slots[k]`. All four are int arrays `[entries]`.
    """

    bucket: Bucket
    entries: list[Entry]
    rows: np.ndarray
    segments: np.ndarray
    slots: np.ndarray
    starts: np.ndarray

    @cached_property
    def slot_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each slot, for the slots of all entries in order, the row, the number of the slot
        within it, and the token at which its entry starts: three int arrays `[all slots]`."""
        if all(entry.slots == 1 for entry in self.entries):
            return self.rows, self.slots, self.starts
        counts = np.array([entry.slots for entry in self.entries])
        rows, starts = np.repeat(self.rows, counts), np.repeat(self.starts, counts)
        return rows, flat_ranges(self.slots, counts), starts

    @cached_property
    def useful_tokens(self) -> int:
        """The number of tokens of all entries, without padding."""
        return sum(entry.length for entry in self.entries)


def choose_bucket(
    waiting: Sequence[Entry], cost: Mapping[Bucket, float], brief: bool = False
) -> Bucket:
    """Choose the bucket for the next batch of the `waiting` entries, in their order.

    The first entry must be in the batch, so only buckets that hold it are considered; there must be
    one. Of these it returns the bucket with the fewest milliseconds per useful token, with the host
    time counted. With `brief` it returns the shortest run whose throughput is at most BRIEF_LOSS
    lower.

    `cost` has the milliseconds of every usable bucket, measured with short sequences. Long
    sequences take longer, but by the same amount in any bucket.
    """
    if len(waiting) == 1:  # useful tokens are the same in any bucket that holds it
        least = waiting[0].least_row
        return min((bucket for bucket in cost if least <= bucket.length), key=cost.__getitem__)
    lengths = np.array([entry.least_row for entry in waiting])
    holding = [bucket for bucket in cost if waiting[0].least_row <= bucket.length]
    near = 1 - BRIEF_LOSS if brief else 1.0
    rates: dict[Bucket, float] = {}
    best = math.inf
    for bucket in sorted(holding, key=lambda bucket: cost[bucket] / bucket.tokens):
        # even full, this bucket is too slow, and so are the ones that follow
        if near * cost[bucket] / bucket.tokens > best:
            break
        rates[bucket] = (cost[bucket] + HOST_MS) / _useful(lengths, bucket)
        best = min(best, rates[bucket])
    if not brief:
        return min(rates, key=rates.__getitem__)
    candidates = [bucket for bucket in rates if near * rates[bucket] <= best]
    return min(candidates, key=lambda bucket: (max(cost[bucket], BRIEF_MS), rates[bucket]))


def _useful(lengths: np.ndarray, bucket: Bucket) -> float:
    """Estimate the useful tokens of a batch on the bucket; `lengths` are in the order of the queue.

    Two sequences longer than half a row do not fit in one row. If there are more of these than
    rows, the longest get a row each, and shorter ones fill the rest of the rows. On average half a
    short sequence of each row stays empty.
    """
    fitting = lengths[lengths <= bucket.length]
    # as many as `place` considers, and has slots for
    enough = int(np.searchsorted(np.cumsum(fitting), LOOKAHEAD * bucket.tokens)) + 1
    first = fitting[: min(enough, bucket.rows * bucket.slots)]
    wide = int(np.count_nonzero(2 * first > bucket.length))
    useful = float(first.sum())
    if wide > bucket.rows:
        first = np.sort(first)[::-1]
        longest, short = first[: bucket.rows], first[wide:]
        useful = float(longest.sum())
        if len(short):
            rooms = bucket.length - longest
            filled = float(np.sum(rooms[rooms >= short[-1]] - short[-1] / 2))
            useful += min(filled, float(short.sum()))
    return min(useful, max(EXPECTED_FILL * bucket.tokens, float(fitting[0])))


def place(bucket: Bucket, *groups: Sequence[Entry], most: int | None = None) -> Batch:
    """Place as many entries as fit on the bucket. Returns the batch.

    The groups are placed one after the other. The entries of a group are placed from the longest to
    the shortest, each in the fullest row that still has room for it (best fit decreasing). `most`
    is the largest number of entries; None means no limit.
    """
    shelf = Shelf(bucket)
    placed, spots = [], []
    for group in groups:
        # the first entries that fit, LOOKAHEAD times the bucket's tokens of them
        considered, tokens = [], 0
        for entry in group:
            if entry.least_row <= bucket.length:
                considered.append(entry)
                tokens += entry.least_row
                if tokens >= LOOKAHEAD * bucket.tokens:
                    break
        for entry in sorted(considered, key=attrgetter("length"), reverse=True):
            if len(placed) == most:
                break
            spot = shelf.put(entry.length, entry.slots)
            if spot is not None:
                placed.append(entry)
                spots.append(spot)
    rows, segments, slots, starts = np.array(spots, int).reshape(-1, 4).T
    return Batch(bucket, placed, rows, segments, slots, starts)


class Shelf:
    """The free tokens and slots of a bucket's rows.

    The fullest row with enough room is found in constant time, by the bits of one integer.
    """

    def __init__(self, bucket: Bucket):
        self._free: dict[int, list[int]] = {bucket.length: list(range(bucket.rows))[::-1]}
        self._rooms = 1 << bucket.length  # bit n is set if some row has n free tokens
        self._segments = [0] * bucket.rows
        self._used = [0] * bucket.rows  # slots in use
        self._length = bucket.length
        self._slots = bucket.slots

    def put(self, length: int, slots: int = 1) -> tuple[int, int, int, int] | None:
        """Reserve a place for a sequence in the fullest row that has room for it.

        Returns its row, segment, first slot and first token; None if no row has room.
        """
        rooms = self._rooms >> length << length
        while rooms:
            room = (rooms & -rooms).bit_length() - 1
            rows = self._free[room]
            # every free row has one slot left, so the last one will do for a single slot
            for at in (-1,) if slots == 1 else range(len(rows) - 1, -1, -1):
                row = rows[at]
                slot = self._used[row]
                if slot + slots <= self._slots:
                    del rows[at]
                    if not rows:
                        self._rooms ^= 1 << room
                    self._used[row] += slots
                    self._segments[row] += 1
                    if self._used[row] < self._slots and room > length:
                        self._free.setdefault(room - length, []).append(row)
                        self._rooms |= 1 << (room - length)
                    return row, self._segments[row], slot, self._length - room
            rooms ^= 1 << room
        return None


def pack(batch: Batch, count: int = PackedTokens.PLANES) -> np.ndarray:
    """Lay out a batch as int32 `[count, rows, length]`, in the order of PackedTokens' planes."""
    bucket, entries = batch.bucket, batch.entries
    planes = np.zeros((count, bucket.tokens), np.int32)
    lengths = np.array([entry.length for entry in entries])
    offsets = batch.rows * bucket.length + batch.starts  # of each sequence in a flat plane
    target = flat_ranges(offsets, lengths)
    ids, positions, segments, types, bounds = planes[: PackedTokens.PLANES]
    further = planes[PackedTokens.PLANES :]
    ids[target] = np.concatenate([entry.ids for entry in entries])
    positions[target] = target - np.repeat(offsets, lengths)
    segments[target] = np.repeat(batch.segments, lengths)
    for entry, offset in zip(entries, offsets.tolist(), strict=True):
        if entry.types is not None:
            types[offset : offset + entry.length] = entry.types
        if entry.fillers:  # as PackedTokens.unstack reads them
            end = offset + entry.length
            segments[end - entry.fillers : end] *= -1
        if entry.pixels is not None:
            further[:, offset : offset + entry.length] = entry.pixels.T
    if any(entry.adapter for entry in entries):
        further[:, target] = np.repeat([entry.adapter for entry in entries], lengths)
    slot_rows, slots, slot_starts = batch.slot_places
    places = slot_rows * bucket.length + slots
    if all(entry.spans is None for entry in entries):
        starts, ends = slot_starts, slot_starts + lengths
    else:  # counted from the first token of their sequence
        parts = [np.array([[0, e.length]]) if e.spans is None else e.spans for e in entries]
        starts, ends = np.concatenate(parts).T + slot_starts
    bounds[places], bounds[places + bucket.slots] = starts, ends
    return planes.reshape(count, bucket.rows, bucket.length)
