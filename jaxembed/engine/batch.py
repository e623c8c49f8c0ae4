"""Chooses a bucket for waiting sequences, places them in its rows and packs them into arrays.

A bucket is the shape of a batch: rows of equal length in tokens. A row holds several sequences, its
segments. A sequence takes a slot for each vector that is pooled from it: one, or one for each span.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import QueuedSequence, concatenated_ranges
from jaxembed.models.tokens import PackedTokens

# Expected share of useful tokens in a bucket if enough sequences wait. Measured: 0.94 to 1.00 on
# real length mixes.
EXPECTED_FILL = 0.97
LOOKAHEAD = 1.25  # sequences are considered up to this multiple of a bucket's tokens
# Host time of a batch: composing, packing and writing answers. Measured: 0.4 to 0.8 ms on two cores
# with two batches at a time.
HOST_MS = 0.6
BRIEF_MS = 25.0  # runs below this count as equally brief: a lone query may wait for them
# The largest share of the throughput that is given up for a brief batch. The real loss is smaller,
# because the estimate of useful tokens does not count short sequences that fill gaps.
BRIEF_LOSS = 0.25


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

    @cached_property
    def slot_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The places of all slots, in the order of the sequences: three int arrays `[slots]`.

        They are the row of a slot, its number within the row, and the token of the row at which its
        sequence starts."""
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
    waiting: Sequence[QueuedSequence], cost: Mapping[Bucket, float], brief: bool = False
) -> Bucket:
    """Choose the bucket for the next batch of `waiting`, the sequences in the order of the queue.

    Only buckets that hold the first sequence are considered. Of these, returns the bucket with the
    least time per useful token, including host time. With `brief`, returns the bucket with the
    shortest run whose throughput is at most the share BRIEF_LOSS lower.

    `cost` maps each usable bucket to the milliseconds of a run with short sequences. Raises
    ValueError if no bucket holds the first sequence.
    """
    holding = [bucket for bucket in cost if waiting[0].min_row <= bucket.length]
    if len(waiting) == 1:  # every bucket that holds it has the same useful tokens
        return min(holding, key=cost.__getitem__)
    lengths = np.array([sequence.min_row for sequence in waiting])
    discount = 1 - BRIEF_LOSS if brief else 1.0
    token_ms: dict[Bucket, float] = {}  # milliseconds per useful token
    best_ms = math.inf
    for bucket in sorted(holding, key=lambda bucket: cost[bucket] / bucket.tokens):
        # even full, this bucket is too slow, and so are all that follow
        if discount * cost[bucket] / bucket.tokens > best_ms:
            break
        token_ms[bucket] = (cost[bucket] + HOST_MS) / _useful(lengths, bucket)
        best_ms = min(best_ms, token_ms[bucket])
    if not brief:
        return min(token_ms, key=token_ms.__getitem__)
    candidates = [bucket for bucket in token_ms if discount * token_ms[bucket] <= best_ms]
    return min(candidates, key=lambda bucket: (max(cost[bucket], BRIEF_MS), token_ms[bucket]))


def _useful(lengths: np.ndarray, bucket: Bucket) -> float:
    """Estimate the number of useful tokens of a batch on the bucket.

    `lengths` has the row length that each waiting sequence needs, in the order of the queue. Two
    sequences longer than half a row do not fit in one row. If there are more of these than rows,
    the longest get a row each, and short sequences fill the rest of the rows. In each row, half the
    length of a short sequence stays empty on average.
    """
    fitting = lengths[lengths <= bucket.length]
    # as many sequences as `place` considers and as there are slots
    count = int(np.searchsorted(np.cumsum(fitting), LOOKAHEAD * bucket.tokens)) + 1
    considered = fitting[: min(count, bucket.rows * bucket.slots)]
    long_count = int(np.count_nonzero(2 * considered > bucket.length))
    useful = float(considered.sum())
    if long_count > bucket.rows:
        considered = np.sort(considered)[::-1]
        # `short` is in descending order
        longest, short = considered[: bucket.rows], considered[long_count:]
        useful = float(longest.sum())
        if len(short):
            free = bucket.length - longest
            filled = float(np.sum(free[free >= short[-1]] - short[-1] / 2))
            useful += min(filled, float(short.sum()))
    return min(useful, max(EXPECTED_FILL * bucket.tokens, float(fitting[0])))


def place(
    bucket: Bucket, *groups: Sequence[QueuedSequence], max_sequences: int | None = None
) -> Batch:
    """Place as many sequences as fit in the bucket, and return the batch.

    The groups are placed one after the other. Of a group, the first sequences are considered, up to
    LOOKAHEAD times the bucket's tokens. They are placed from the longest to the shortest, each in
    the fullest row that has room for it (best fit decreasing). `max_sequences` is the largest
    number of sequences in the batch; None means no limit.
    """
    allocator = RowAllocator(bucket)
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


class RowAllocator:
    """The free tokens and slots of a bucket's rows.

    The bits of one integer give the fullest row with enough room in constant time.
    """

    def __init__(self, bucket: Bucket):
        # free tokens -> rows with a free slot
        self._free: dict[int, list[int]] = {bucket.length: list(range(bucket.rows))[::-1]}
        self._rooms = 1 << bucket.length  # bit n is set if some row has n free tokens
        self._segments = [0] * bucket.rows
        self._used = [0] * bucket.rows  # slots in use
        self._length = bucket.length
        self._slots = bucket.slots

    def put(self, length: int, slots: int = 1) -> tuple[int, int, int, int] | None:
        """Reserve a place for a sequence in the fullest row that has room for it.

        The sequence has `length` tokens and `slots` slots. Returns its row, its segment (counted
        from 1), its first slot and its first token; None if no row has room.
        """
        fitting = self._rooms >> length << length  # numbers of free tokens from `length` on
        while fitting:
            room = (fitting & -fitting).bit_length() - 1  # the lowest bit: the fullest rows
            rows = self._free[room]
            # every row in the list has a free slot, so the last one will do for a single slot
            for index in (-1,) if slots == 1 else range(len(rows) - 1, -1, -1):
                row = rows[index]
                first_slot = self._used[row]
                if first_slot + slots <= self._slots:
                    del rows[index]
                    if not rows:
                        self._rooms ^= 1 << room
                    self._used[row] += slots
                    self._segments[row] += 1
                    if self._used[row] < self._slots and room > length:
                        self._free.setdefault(room - length, []).append(row)
                        self._rooms |= 1 << (room - length)
                    return row, self._segments[row], first_slot, self._length - room
            fitting ^= 1 << room  # no row with this room has enough slots
        return None


def pack(batch: Batch, count: int = PackedTokens.PLANES) -> np.ndarray:
    """Pack a batch into one int32 array `[count, rows, length]`: its planes, as in PackedTokens.

    `count` is the number of planes. Planes after PackedTokens.PLANES hold adapters or pixels.
    """
    bucket, sequences = batch.bucket, batch.sequences
    planes = np.zeros((count, bucket.tokens), np.int32)
    lengths = np.array([sequence.length for sequence in sequences])
    # places in a flat plane: of the first token of each sequence, and of each token
    offsets = batch.rows * bucket.length + batch.starts
    target = concatenated_ranges(offsets, lengths)
    ids, positions, segments, types, bounds = planes[: PackedTokens.PLANES]
    extra = planes[PackedTokens.PLANES :]
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
            extra[:, offset : offset + sequence.length] = sequence.pixels.T
    if any(sequence.adapter for sequence in sequences):
        extra[:, target] = np.repeat([sequence.adapter for sequence in sequences], lengths)
    slot_rows, slots, slot_starts = batch.slot_places
    slot_target = slot_rows * bucket.length + slots
    if all(sequence.spans is None for sequence in sequences):
        starts, ends = slot_starts, slot_starts + lengths
    else:  # spans are counted from the first token of their sequence
        spans = [np.array([[0, e.length]]) if e.spans is None else e.spans for e in sequences]
        starts, ends = np.concatenate(spans).T + slot_starts
    # in each row, the starts and then the ends of its slots
    bounds[slot_target], bounds[slot_target + bucket.slots] = starts, ends
    return planes.reshape(count, bucket.rows, bucket.length)
