"""choose, place and pack: pure functions of what waits."""

from collections import Counter

import numpy as np
import pytest
from fakes import future_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxembed.data.work import Encoding
from jaxembed.engine.batch import (
    BRIEF_LOSS,
    HOST_MS,
    Batch,
    RowAllocator,
    _useful,
    aligned,
    choose_bucket,
    pack,
    place,
)
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import QueuedSequence


def entries_of(lengths, *, types=False, unpooled=0) -> list[QueuedSequence]:
    """One sequence for each length; token ids name the sequence and the place in it."""
    encodings = [
        Encoding(
            np.arange(1, n + 1, dtype=np.int32) + 1000 * (k + 1),
            np.full(n, k % 2, np.int32) if types else None,
            ((min(unpooled, int(n) - 1), int(n)),),
        )
        for k, n in enumerate(lengths)
    ]
    return future_of(encodings).sequences


def costs(*buckets: tuple[int, int]) -> dict[Bucket, float]:
    """Milliseconds in proportion to the tokens."""
    return {Bucket(*bucket): float(bucket[0] * bucket[1]) for bucket in buckets}


def take(
    waiting, cost: dict[Bucket, float], max_sequences: int | None = None, alignment: int = 1
) -> Batch:
    waiting = waiting[:max_sequences]
    bucket = choose_bucket(waiting, cost, alignment=alignment)
    return place(bucket, waiting[:1], waiting[1:], alignment=alignment)


def check_placement(batch: Batch, alignment: int = 1) -> None:
    """Whole sequences, inside their rows, in different places and slots."""
    assert not (batch.starts % alignment).any()
    used = np.zeros((batch.bucket.rows, batch.bucket.length), int)
    slots = set()
    for sequence, row, slot, start in zip(
        batch.sequences, batch.rows, batch.slots, batch.starts, strict=True
    ):
        assert 0 <= slot < batch.bucket.slots
        assert start + sequence.length <= batch.bucket.length
        used[row, start : start + sequence.length] += 1
        slots.add((int(row), int(slot)))
    assert used.max() <= 1
    assert used.sum() == batch.useful_tokens
    assert len(slots) == len(batch.sequences)


queues = st.lists(st.integers(1, 64), min_size=1, max_size=80)
grids = st.lists(st.tuples(st.integers(1, 6), st.sampled_from([8, 16, 32, 33])), max_size=4).map(
    lambda buckets: [*buckets, (1, 64)]
)


@given(queues, grids, st.one_of(st.none(), st.integers(1, 20)), st.sampled_from([1, 8, 16]))
@settings(max_examples=60, deadline=None)
def test_a_batch_holds_the_oldest_and_what_it_holds_is_placed_once(
    lengths, grid, max_sequences, alignment
):
    waiting = entries_of(lengths)
    batch = take(waiting, costs(*grid), max_sequences, alignment)
    assert waiting[0] in batch.sequences
    assert batch.bucket in {Bucket(*bucket) for bucket in grid}
    assert len(set(batch.sequences)) == len(batch.sequences)
    assert set(batch.sequences) <= set(waiting)
    assert max_sequences is None or set(batch.sequences) <= set(waiting[:max_sequences])
    check_placement(batch, alignment)


@pytest.mark.parametrize("brief", [False, True])
def test_passing_buckets_over_early_changes_no_choice(brief):
    """Against looking at every bucket."""
    random = np.random.default_rng(0)
    cost = {Bucket(r, n): r * n * random.uniform(0.5, 2) for r in (1, 3, 8) for n in (8, 16, 33)}
    for _ in range(50):
        waiting = entries_of(random.integers(1, 17, random.integers(1, 60)))
        lengths = np.array([sequence.length for sequence in waiting])
        holding = [b for b in cost if b.length >= lengths[0]]
        rates = {b: (cost[b] + HOST_MS) / _useful(lengths, b, 1) for b in holding}
        chosen = choose_bucket(waiting, cost, brief)
        if brief:
            assert (1 - BRIEF_LOSS) * rates[chosen] <= min(rates.values())
        else:
            assert rates[chosen] == min(rates.values())


def test_rows_that_hold_one_sequence_each_are_seen_to_be_half_empty():
    cost = {Bucket(8, 16): 100.0, Bucket(2, 64): 120.0}
    assert choose_bucket(entries_of([16] * 40), cost) == Bucket(8, 16)
    assert choose_bucket(entries_of([9] * 40), cost) == Bucket(2, 64)


@pytest.mark.parametrize("shape", [(32, 16), (16, 32), (8, 64), (4, 128)])
@pytest.mark.parametrize("spread", [(5, 14), (9, 16), (3, 60)])
@pytest.mark.parametrize("alignment", [1, 16])
def test_what_a_bucket_is_thought_to_hold_is_about_what_it_gets(shape, spread, alignment):
    bucket = Bucket(*shape)
    random = np.random.default_rng(0)
    for _ in range(5):
        lengths = random.integers(*spread, 400)
        lengths[0] = spread[0]
        waiting = entries_of(lengths)
        batch = place(bucket, waiting[:1], waiting[1:], alignment=alignment)
        holds = sum(aligned(sequence.length, alignment) for sequence in batch.sequences)
        thought = _useful(aligned(lengths, alignment), bucket, alignment)
        assert thought == pytest.approx(holds, rel=0.18)


def test_a_row_takes_no_more_sequences_than_it_has_slots():
    batch = place(Bucket(2, 16), entries_of([1] * 100))
    assert len(batch.sequences) == 8
    assert sorted(Counter(batch.rows.tolist()).items()) == [(0, 4), (1, 4)]
    assert _useful(np.full(200, 2), Bucket(4, 32), 1) == 4 * 8 * 2
    assert place(Bucket(2, 16), entries_of([10, 10, 6, 6])).useful_tokens == 32  # gaps are filled


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=40),
    st.tuples(st.integers(1, 4), st.integers(20, 40)),
    st.booleans(),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_pack_lays_out_each_sequence_in_its_place_and_nothing_else(lengths, shape, types, unpooled):
    batch = place(Bucket(*shape), entries_of(lengths, types=types, unpooled=unpooled))
    planes = pack(batch)
    assert planes.dtype == np.int32
    assert planes.flags.c_contiguous
    *of_tokens, bounds = planes
    for sequence, row, segment, slot, start in zip(
        batch.sequences, batch.rows, batch.segments, batch.slots, batch.starts, strict=True
    ):
        at = row, slice(start, start + sequence.length)
        kinds = 0 if sequence.types is None else sequence.types
        wanted = sequence.ids, np.arange(sequence.length), segment, kinds
        for plane, values in zip(of_tokens, wanted, strict=True):
            np.testing.assert_array_equal(plane[at], values)
            plane[at] = 0
        ends = row, [slot, batch.bucket.slots + slot]
        pooled = [min(unpooled, sequence.length - 1), sequence.length]
        assert (bounds[ends] - start).tolist() == pooled
        bounds[ends] = 0
    assert not planes.any()


@pytest.mark.parametrize("length", [1, 7, 16])
def test_a_lone_text_is_placed_and_packed_as_one_of_several(length, monkeypatch):
    bucket, waiting = Bucket(2, 16), entries_of([length])
    lone = place(bucket, waiting, [])
    rows = (lone.rows, lone.segments, lone.slots, lone.starts)
    assert [int(places[0]) for places in rows] == list(RowAllocator(bucket).put(length))
    packed = pack(lone, 6)
    monkeypatch.setattr(Batch, "is_plain", False)
    assert np.array_equal(packed, pack(lone, 6))
