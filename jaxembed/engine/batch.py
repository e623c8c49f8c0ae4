"""Chooses a bucket for waiting sequences, places them in its rows and packs them into arrays.

A bucket is the shape of a batch: rows of equal length in tokens. A row holds several sequences, its
segments. A sequence takes a slot for each vector that is pooled from it: one, or one for each span.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import QueuedSequence, concatenated_ranges
from jaxembed.models.tokens import PackedTokens

# Expected share of useful tokens in a bucket if enough sequences wait. Measured: 0.94 to 1.00 on
# real length mixes.
EXPECTED_FILL = 0.97
LOOKAHEAD = 1.25  # sequences are considered up to this multiple of a bucket's tokens
# Host time of a batch while it holds the device, until an engine has measured its own: composing,
# packing and dividing the outputs. Measured: 0.4 to 0.8 ms on two cores, two batches at a time.
HOST_MS = 0.6
# Runs of up to this many milliseconds count as equally brief, because a lone query can wait so long
# for the end of one. Of these the one with the highest throughput is chosen.
BRIEF_MS = 25.0
BRIEF_LOSS = 0.25  # largest share of the best bucket's throughput that is given up for brevity
ZERO, ONE = np.zeros(1, int), np.ones(1, int)  # the places that `place` gives to a lone sequence


@dataclass(frozen=True)
class Batch:
    """Sequences with their places in a bucket.

    Sequence k is segment `segments[k]` (from 1) of row `rows[k]`. It starts at token `starts[k]`
    and slot `slots[k]` of the row. All four are int arrays `[sequences]`.
    """

    bucket: Bucket
    sequences: list[QueuedSequence]
    rows: np.ndarray
    segments: np.ndarray
    slots: np.ndarray
    starts: np.ndarray

    @property
    def is_plain(self) -> bool:
        """Whether it is one text that `place` has placed, and whose tokens are pooled together."""
        if self.rows is not ZERO:
            return False
        (lone,) = self.sequences
        parts = (lone.types, lone.spans, lone.pixels)
        is_text = not any(part is not None for part in parts) and not lone.augmentation_tokens
        return is_text and not lone.adapter

    @cached_property
    def slot_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The places of all slots, in the order of the sequences: three int arrays `[slots]`.

        The arrays are the row of each slot, the slot's number within this row, and the token of the
        row at which the slot's sequence starts."""
        if all(sequence.slots == 1 for sequence in self.sequences):
            return self.rows, self.slots, self.starts
        counts = np.array([sequence.slots for sequence in self.sequences])
        rows, starts = np.repeat(self.rows, counts), np.repeat(self.starts, counts)
        return rows, concatenated_ranges(self.slots, counts), starts

    @cached_property
    def useful_tokens(self) -> int:
        """The number of tokens of all sequences, without padding."""
        return sum(sequence.length for sequence in self.sequences)


def choose_bucket(
    waiting: Sequence[QueuedSequence],
    cost: Mapping[Bucket, float],
    brief: bool = False,
    host_ms: float = HOST_MS,
    alignment: int = 1,
) -> Bucket:
    """Choose the bucket for the next batch of `waiting`, the sequences in the order of the queue.

    Only buckets that hold the first sequence are considered. Of these, the best bucket has the
    least time per useful token, host time included. Returns the best bucket or, with `brief`, the
    bucket with the shortest run among those that lose at most the share BRIEF_LOSS of the best
    bucket's throughput.

    `cost` maps each usable bucket to the milliseconds of a run with short sequences, and `host_ms`
    are the milliseconds of host time for each batch. `alignment` is that of `place`; the tokens
    that it leaves free count as useful. Raises ValueError if no bucket holds the first sequence.
    """
    needed = waiting[0].min_row
    if len(waiting) == 1:  # the useful tokens are the same in every bucket
        return min((ms, bucket) for bucket, ms in cost.items() if needed <= bucket.length)[1]
    holding = [bucket for bucket in cost if needed <= bucket.length]
    lengths = aligned(np.array([sequence.min_row for sequence in waiting]), alignment)
    total = int(lengths.sum())
    discount = 1 - BRIEF_LOSS if brief else 1.0
    # the least milliseconds per useful token: if the bucket is full, or holds all that waits
    least_ms = {b: (cost[b] + host_ms) / min(total, b.tokens) for b in holding}
    token_ms: dict[Bucket, float] = {}  # milliseconds per useful token
    best_ms = math.inf
    for bucket in sorted(holding, key=least_ms.__getitem__):
        if discount * least_ms[bucket] > best_ms:  # so it is in all buckets that follow
            break
        token_ms[bucket] = (cost[bucket] + host_ms) / _useful(lengths, bucket, alignment)
        best_ms = min(best_ms, token_ms[bucket])
    if not brief:
        return min(token_ms, key=token_ms.__getitem__)
    candidates = [bucket for bucket in token_ms if discount * token_ms[bucket] <= best_ms]
    return min(candidates, key=lambda bucket: (max(cost[bucket], BRIEF_MS), token_ms[bucket]))


def aligned(length: Any, alignment: int) -> Any:
    """Round lengths up to multiples of `alignment`."""
    return -(-length // alignment) * alignment


def _useful(lengths: np.ndarray, bucket: Bucket, alignment: int) -> float:
    """Estimate the number of useful tokens of a batch on the bucket.

    `lengths` has the row length that each waiting sequence needs, in the order of the queue; they
    are multiples of `alignment`. A long sequence takes more than half a row, so that no row holds
    two of this kind. If there are more long sequences than rows, each row gets one of the longest,
    and the short sequences fill the room that is left: all but half the length of the shortest one
    in each row, on average.
    """
    row = aligned(bucket.length, alignment)
    fitting = lengths[lengths <= row]
    # `place` considers so many sequences; the batch has no more than there are slots
    count = int(np.searchsorted(np.cumsum(fitting), LOOKAHEAD * bucket.tokens)) + 1
    considered = fitting[: min(count, bucket.rows * bucket.slots)]
    long_count = int(np.count_nonzero(2 * considered > row))
    useful = float(considered.sum())
    if long_count > bucket.rows:
        considered = np.sort(considered)[::-1]
        # `short` is in descending order
        longest, short = considered[: bucket.rows], considered[long_count:]
        useful = float(longest.sum())
        if len(short):
            free = row - longest
            filled = float(np.sum(free[free >= short[-1]] - short[-1] / 2))
            useful += min(filled, float(short.sum()))
    return min(useful, max(EXPECTED_FILL * bucket.tokens, float(fitting[0])))


def place(
    bucket: Bucket,
    *groups: Sequence[QueuedSequence],
    max_sequences: int | None = None,
    alignment: int = 1,
) -> Batch:
    """Place as many sequences as fit in the bucket, and return the batch.

    The groups are placed one after the other. The first sequences of each group are considered, up
    to LOOKAHEAD times the bucket's tokens. These sequences are placed from the longest to the
    shortest, each in the fullest row that has room for it (best fit decreasing). `max_sequences` is
    the largest number of sequences in the batch; None means no limit. Sequences start at multiples
    of `alignment` tokens.
    """
    if sum(map(len, groups)) == 1:  # the same place in less time
        (lone,) = (group[0] for group in groups if group)
        if lone.min_row <= bucket.length:
            return Batch(bucket, [lone], ZERO, ONE, ZERO, ZERO)
    allocator = RowAllocator(bucket, alignment)
    placed, positions = [], []
    for group in groups:
        considered, tokens = [], 0
        for sequence in group:
            if sequence.min_row <= bucket.length:
                considered.append(sequence)
                tokens += sequence.min_row
                if tokens >= LOOKAHEAD * bucket.tokens:
                    break
        for sequence in sorted(considered, key=attrgetter("length"), reverse=True):
            if len(placed) == max_sequences:
                break
            position = allocator.put(sequence.length, sequence.slots)
            if position is not None:
                placed.append(sequence)
                positions.append(position)
    rows, segments, slots, starts = np.array(positions, int).reshape(-1, 4).T
    return Batch(bucket, placed, rows, segments, slots, starts)


def place_all(
    bucket: Bucket, sequences: Iterable[QueuedSequence], alignment: int = 1
) -> list[Batch]:
    """Place sequences that each fit in the bucket into as many batches as they need. `alignment` is
    that of `place`."""
    left, batches = list(sequences), []
    while left:
        # in a group of its own, the first sequence always gets a place
        batches.append(place(bucket, left[:1], left[1:], alignment=alignment))
        placed = set(batches[-1].sequences)
        left = [sequence for sequence in left if sequence not in placed]
    return batches


class RowAllocator:
    """The free tokens and slots of a bucket's rows, in which `put` reserves places.

    The bits of one integer say which numbers of free tokens occur, so that the fullest row with
    enough room is found in constant time. Places start at multiples of `alignment` tokens.
    """

    def __init__(self, bucket: Bucket, alignment: int = 1):
        # free tokens -> rows with a free slot
        self._free: dict[int, list[int]] = {bucket.length: list(range(bucket.rows))[::-1]}
        self._rooms = 1 << bucket.length  # bit n is set if some row has n free tokens
        self._segments = [0] * bucket.rows
        self._used = [0] * bucket.rows  # slots in use
        self._length = bucket.length
        self._alignment = alignment
        self._slots = bucket.slots

    def put(self, length: int, slots: int = 1) -> tuple[int, int, int, int] | None:
        """Reserve a place for a sequence in the fullest row that has room for it.

        The sequence has `length` tokens and `slots` slots. Returns the sequence's row, its segment
        in the row (counted from 1), and its first slot and token there; None if no row has room.
        """
        fitting = self._rooms >> length << length  # numbers of free tokens from `length` on
        while fitting:
            room = (fitting & -fitting).bit_length() - 1  # the lowest bit: the fullest rows
            rows = self._free[room]
            # every row in the list has a free slot, so the last row does for a single slot
            for index in (-1,) if slots == 1 else range(len(rows) - 1, -1, -1):
                row = rows[index]
                first_slot = self._used[row]
                if first_slot + slots <= self._slots:
                    del rows[index]
                    if not rows:
                        self._rooms ^= 1 << room
                    self._used[row] += slots
                    self._segments[row] += 1
                    left = room - aligned(length, self._alignment)
                    if self._used[row] < self._slots and left > 0:
                        self._free.setdefault(left, []).append(row)
                        self._rooms |= 1 << left
                    return row, self._segments[row], first_slot, self._length - room
            fitting ^= 1 << room  # no row with this room has enough slots
        return None


def pack(batch: Batch, count: int = PackedTokens.PLANES) -> np.ndarray:
    """Pack a batch into one int32 array `[count, rows, length]`, the planes of PackedTokens.

    `count` is the number of planes. Planes after the first PackedTokens.PLANES planes hold pixels,
    and then the adapter of each token.
    """
    bucket, sequences = batch.bucket, batch.sequences
    planes = np.zeros((count, bucket.tokens), np.int32)
    ids, positions, segments, types, bounds = planes[: PackedTokens.PLANES]
    extra = planes[PackedTokens.PLANES :]
    if batch.is_plain:  # the same planes in less time
        length = sequences[0].length
        ids[:length], positions[:length] = sequences[0].ids, np.arange(length)
        segments[:length], bounds[bucket.slots] = 1, length
        return planes.reshape(count, bucket.rows, bucket.length)
    lengths = np.array([sequence.length for sequence in sequences])
    # indices into a flat plane: of the first token of each sequence, and of every token
    offsets = batch.rows * bucket.length + batch.starts
    target = concatenated_ranges(offsets, lengths)
    ids[target] = np.concatenate([sequence.ids for sequence in sequences])
    positions[target] = target - np.repeat(offsets, lengths)
    segments[target] = np.repeat(batch.segments, lengths)
    for sequence, offset in zip(sequences, offsets.tolist(), strict=True):
        if sequence.types is not None:
            types[offset : offset + sequence.length] = sequence.types
        # PackedTokens.unstack expects negative segments for augmentation tokens
        if sequence.augmentation_tokens:
            end = offset + sequence.length
            segments[end - sequence.augmentation_tokens : end] *= -1
        if sequence.pixels is not None:
            pixels = sequence.pixels.T
            extra[: len(pixels), offset : offset + sequence.length] = pixels
    if any(sequence.adapter for sequence in sequences):
        extra[-1, target] = np.repeat([sequence.adapter for sequence in sequences], lengths)
    slot_rows, slots, slot_starts = batch.slot_places
    slot_target = slot_rows * bucket.length + slots
    if all(sequence.spans is None for sequence in sequences):
        starts, ends = slot_starts, slot_starts + lengths
    else:  # spans are counted from the first token of their sequence
        spans = [np.array([[0, e.length]]) if e.spans is None else e.spans for e in sequences]
        starts, ends = np.concatenate(spans).T + slot_starts
    # each row of `bounds` has the starts of all its slots and then the ends
    bounds[slot_target], bounds[slot_target + bucket.slots] = starts, ends
    return planes.reshape(count, bucket.rows, bucket.length)
