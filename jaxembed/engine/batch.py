"""A bucket for what waits, and its layout: `choose`, `place` and `pack`, three pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.ticket import Entry, flat_ranges
from jaxembed.models.tokens import PackedTokens

EXPECTED_FILL = 0.97  # of a bucket with enough waiting; 0.94 to 1.00 on real length mixes
LOOKAHEAD = 1.25  # times a bucket's tokens are looked at to fill it
HOST_MS = 0.6  # for composing, packing and settling a batch: 0.4 to 0.8 on two cores, two at a time
BRIEF_MS = 25.0  # a batch that a lone query may have to wait for need be no shorter
BRIEF_LOSS = 0.25  # of the best rate, at most, to be brief; less, for the estimate fills no gaps


@dataclass(frozen=True)
class Batch:
    """Sequences placed on a bucket: entry k is segment `segments[k]` of row `rows[k]`, starts at
    token `starts[k]` of it, and has the slots from `slots[k]` on."""

    bucket: Bucket
    entries: list[Entry]
    rows: np.ndarray
    segments: np.ndarray
    slots: np.ndarray
    starts: np.ndarray

    @cached_property
    def slot_counts(self) -> np.ndarray | None:
        """How many slots each entry has; None if each has one."""
        if all(entry.slots == 1 for entry in self.entries):
            return None
        return np.array([entry.slots for entry in self.entries])

    @property
    def slot_rows(self) -> np.ndarray:
        """The row of each slot of each entry, one entry after the other."""
        return self.by_slot(self.rows)

    @property
    def all_slots(self) -> np.ndarray:
        """The number of each of these slots in its row."""
        counts = self.slot_counts
        return self.slots if counts is None else flat_ranges(self.slots, counts)

    def by_slot(self, values: np.ndarray) -> np.ndarray:
        """The value of each entry for each of its slots."""
        return values if self.slot_counts is None else np.repeat(values, self.slot_counts)

    @property
    def useful_tokens(self) -> int:
        return sum(entry.length for entry in self.entries)

    @property
    def fill(self) -> float:
        return self.useful_tokens / self.bucket.tokens


def choose_bucket(
    waiting: Sequence[Entry], cost: Mapping[Bucket, float], brief: bool = False
) -> Bucket:
    """The bucket to run next for the entries that wait, the first of which must be in the batch.

    `cost` gives the measured milliseconds of every bucket that may be used, full of short
    sequences: what long ones cost on top they cost in any bucket. Among those that hold the first
    entry, and there must be one, the one with the fewest milliseconds per useful token
    is chosen, the host's part counted; if the batch shall be `brief`, the briefest of those that
    are nearly as good.
    """
    lengths = np.array([entry.least_row for entry in waiting])
    holding = [bucket for bucket in cost if bucket.fits(waiting[0].least_row)]
    near = 1 - BRIEF_LOSS if brief else 1.0
    rates: dict[Bucket, float] = {}
    best = math.inf
    for bucket in sorted(holding, key=lambda bucket: cost[bucket] / bucket.tokens):
        if near * cost[bucket] / bucket.tokens > best:  # nor is any that follows, were it full
            break
        rates[bucket] = (cost[bucket] + HOST_MS) / _useful(lengths, bucket)
        best = min(best, rates[bucket])
    if not brief:
        return min(rates, key=rates.__getitem__)
    nearly = [bucket for bucket in rates if near * rates[bucket] <= best]
    return min(nearly, key=lambda bucket: (max(cost[bucket], BRIEF_MS), rates[bucket]))


def _useful(lengths: np.ndarray, bucket: Bucket) -> float:
    """About how many tokens of the oldest entries `place` would get onto a bucket.

    No two of more than half a row stand in one. Where these alone outnumber the rows, the longest
    take them, and what is shorter goes beside them as far as there is room: of each row all but
    half a short sequence on average.
    """
    if len(lengths) == 1:  # a lone query: 5 us of numpy for each bucket would be felt
        return float(lengths[0])
    fitting = lengths[bucket.fits(lengths)]
    first = fitting[: min(_enough(fitting, bucket), bucket.rows * bucket.slots)]
    wide = int(np.count_nonzero(2 * first > bucket.length))
    useful = float(first.sum())
    if wide > bucket.rows:
        first = np.sort(first)[::-1]
        tops, short = first[: bucket.rows], first[wide:]
        useful = float(tops.sum())
        if len(short):
            rooms = bucket.length - tops
            held = float(np.sum(rooms[rooms >= short[-1]] - short[-1] / 2))
            useful += min(held, float(short.sum()))
    return min(useful, max(EXPECTED_FILL * bucket.tokens, float(fitting[0])))


def place(bucket: Bucket, *groups: Sequence[Entry], most: int | None = None) -> Batch:
    """Put as many entries as fit on the bucket: one group after the other, and of each the longest
    first into the fullest row that still holds it (best fit decreasing). `most` limits the number
    of sequences."""
    shelf = Shelf(bucket)
    placed, spots = [], []
    for group in groups:
        for entry in sorted(_first(group, bucket), key=lambda entry: -entry.length):
            if len(placed) == most:
                break
            spot = shelf.put(entry.length, entry.slots)
            if spot is not None:
                placed.append(entry)
                spots.append(spot)
    rows, segments, slots, starts = (np.array([spot[k] for spot in spots], int) for k in range(4))
    return Batch(bucket, placed, rows, segments, slots, starts)


def _first(group: Sequence[Entry], bucket: Bucket) -> list[Entry]:
    """The first entries that fit on the bucket: those that fill it, and some to fill gaps with."""
    lengths = np.array([entry.least_row for entry in group])
    enough = _enough(np.where(bucket.fits(lengths), lengths, 0), bucket)
    return [entry for entry in group[:enough] if bucket.fits(entry.least_row)]


def _enough(lengths: np.ndarray, bucket: Bucket) -> int:
    """How many of the lengths fill a bucket, and a quarter more."""
    return int(np.searchsorted(np.cumsum(lengths), LOOKAHEAD * bucket.tokens)) + 1


class Shelf:
    """The free room of a bucket's rows, found in constant time by the bits of one integer."""

    def __init__(self, bucket: Bucket):
        self._free: dict[int, list[int]] = {bucket.length: list(range(bucket.rows))[::-1]}
        self._rooms = 1 << bucket.length  # bit n is set where some row has n tokens free
        self._segments = [0] * bucket.rows
        self._used = [0] * bucket.rows  # slots
        self._length = bucket.length
        self._slots = bucket.slots

    def put(self, length: int, slots: int = 1) -> tuple[int, int, int, int] | None:
        """The row, segment, first slot and start for a sequence, in the fullest row that holds it.
        None if no row does."""
        found = self._find(length, slots)
        if found is None:
            return None
        room, row = found
        slot, start = self._used[row], self._length - room
        self._used[row] += slots
        self._segments[row] += 1
        if self._used[row] < self._slots and room > length:
            self._free.setdefault(room - length, []).append(row)
            self._rooms |= 1 << (room - length)
        return row, self._segments[row], slot, start

    def _find(self, length: int, slots: int) -> tuple[int, int] | None:
        """Take a row with the least room for the sequence; its room and its number."""
        rooms = self._rooms >> length << length
        while rooms:
            room = (rooms & -rooms).bit_length() - 1
            rows = self._free[room]
            for at in range(len(rows) - 1, -1, -1):
                if self._used[rows[at]] + slots <= self._slots:
                    row = rows.pop(at)
                    if not rows:
                        self._rooms ^= 1 << room
                    return room, row
            rooms ^= 1 << room
        return None


def pack(batch: Batch) -> np.ndarray:
    """The batch as int32 `[planes, rows, length]`, in the order of PackedTokens' planes."""
    bucket, entries = batch.bucket, batch.entries
    planes = np.zeros((PackedTokens.PLANES, bucket.tokens), np.int32)
    lengths = np.array([entry.length for entry in entries])
    offsets = batch.rows * bucket.length + batch.starts  # of each sequence in a plane
    target = flat_ranges(offsets, lengths)
    ids, positions, segments, types, bounds = planes
    ids[target] = np.concatenate([entry.ids for entry in entries])
    positions[target] = target - np.repeat(offsets, lengths)
    segments[target] = np.repeat(batch.segments, lengths)
    for entry, offset in zip(entries, offsets.tolist(), strict=True):
        if entry.types is not None:
            types[offset : offset + entry.length] = entry.types
    places = batch.slot_rows * bucket.length + batch.all_slots
    starts, ends = np.concatenate([entry.bounds for entry in entries]).T
    shift = batch.by_slot(batch.starts)
    bounds[places] = starts + shift
    bounds[places + bucket.slots] = ends + shift
    return planes.reshape(PackedTokens.PLANES, bucket.rows, bucket.length)
