"""Who is next: fair turns within a queue, shares between queues, and what is alike runs once."""

from collections import Counter

import numpy as np
import pytest
from fakes import future_of as engine_ticket
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxembed.data.work import Encoding
from jaxembed.engine import queue as queue_module
from jaxembed.engine.batch import HOST_MS
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import QueuedSequence, WorkFuture
from jaxembed.engine.queue import INTERACTIVE_INPUTS, MAX_WINDOW_SEQUENCES, RequestQueue
from jaxembed.errors import InvalidInput

ONE, FULL = Bucket(1, 16), Bucket(64, 16)
COST = {ONE: 2.0, FULL: 40.0}  # milliseconds
LATER = 1e9  # seconds: long after anything interactive


def future_of(count: int, length: int = 10, first: int = 0, **options) -> WorkFuture:
    """A future of sequences that are all different: their ids begin with `first`, `first` + 1."""
    ids = [np.full(length, 7, np.int32) for _ in range(count)]
    for k, one in enumerate(ids):
        one[0] = first + k
    return engine_ticket([Encoding(one) for one in ids], **options)


class Queue(RequestQueue):
    """Lanes whose buckets are compiled; `add` makes the future, of sequences nobody else has."""

    def __init__(self, cost: dict[Bucket, float] = COST):
        super().__init__(max(bucket.tokens for bucket in cost))
        self.cost = cost
        self.set_longest_row(max(bucket.length for bucket in cost))
        self.count = 0

    def submit(self, count: int, length: int = 10, priority=None) -> WorkFuture:
        future = future_of(count, length, self.count)
        self.count += count
        self.add(future, priority)
        return future

    def next(self, now: float = LATER, max_sequences: int | None = None):
        return self.take(self.cost, now, max_sequences, HOST_MS)

    def drain(self) -> list[QueuedSequence]:
        """Everything that runs."""
        sequences = []
        while (batch := self.next()) is not None:
            sequences += batch.sequences
        return sequences


def share_of(sequences: list[QueuedSequence]) -> Counter[WorkFuture]:
    """Answers that each future gets of these."""
    return Counter(t for one in sequences for t, index in one.futures.items() for _ in index)


def test_requests_of_one_lane_progress_together():
    queue = Queue()
    futures = [queue.submit(1000) for _ in range(10)]
    had: Counter[WorkFuture] = Counter()
    for _ in range(40):
        had += share_of(queue.next().sequences)
        left = [had[future] for future in futures]
        assert max(left) - min(left) <= 2 * 1024 / 10  # a batch holds 1024 tokens


def test_a_small_bulk_request_passes_a_huge_one():
    queue = Queue()
    queue.submit(2_000)
    for _ in range(10):
        queue.next()
    small = queue.submit(20)
    assert share_of(queue.next().sequences + queue.next().sequences)[small] == 20


def test_no_request_waits_for_those_that_come_after_it():
    """However many come: each new one begins behind those that wait."""
    queue = Queue()
    for _ in range(30):
        queue.submit(64, priority="bulk")
    patient = queue.submit(1, priority="bulk")
    ran: list[QueuedSequence] = []
    for _ in range(30):  # a batch holds as much as one of them
        for _ in range(4):
            queue.submit(64, priority="bulk")
        ran += queue.next().sequences
    assert share_of(ran)[patient] == 1


def test_what_room_interactive_entries_leave_is_filled_with_bulk():
    queue = Queue({FULL: 40.0})
    bulk, query = queue.submit(500), queue.submit(1, length=12)
    batch = queue.next()
    had = share_of(batch.sequences)
    assert had[query] == 1
    assert had[bulk] == 63  # one in each of the other rows
    assert next(iter(batch.sequences[0].futures)) is query


@pytest.mark.parametrize(
    ("count", "length", "priority", "expected"),
    [
        (1, 16, None, "interactive"),
        (INTERACTIVE_INPUTS, 16, None, "interactive"),
        (INTERACTIVE_INPUTS + 1, 1, None, "bulk"),
        (INTERACTIVE_INPUTS, 17, None, "bulk"),  # over an eighth of the largest bucket
        (100, 10, "interactive", "interactive"),
        (1, 1, "bulk", "bulk"),
    ],
)
def test_a_small_request_is_interactive_unless_it_says_otherwise(count, length, priority, expected):
    queue = Queue({Bucket(64, 16): 40.0, Bucket(1, 32): 3.0})
    queue.submit(count, length, priority)
    other = {"interactive": "bulk", "bulk": "interactive"}[expected]
    assert (queue.queues[expected].inputs, queue.queues[other].inputs) == (count, 0)
    assert (queue.inputs, queue.tokens) == (count, count * length)


def test_under_a_flood_of_queries_bulk_gets_its_quarter_of_the_time_and_they_the_rest():
    queue = Queue()
    bulk, spent = queue.submit(5_000, length=16), Counter()
    for _ in range(80):
        while queue.queues["interactive"].inputs < 100:
            queue.submit(1, length=16)
        batch = queue.next()
        had = share_of(batch.sequences)
        leads = "bulk" if next(iter(batch.sequences[0].futures)) is bulk else "interactive"
        spent[leads] += COST[batch.bucket]
        assert len(had) > 1 or leads == "bulk"
    assert spent["bulk"] / spent.total() == pytest.approx(0.25, abs=0.02)


def test_a_lane_that_rested_gets_no_more_than_its_share_afterwards():
    queue = Queue()
    for _ in range(50):
        queue.submit(1, length=16)
        queue.next()
    bulk = queue.submit(1_000, length=16)
    led = 0
    for _ in range(8):
        while queue.queues["interactive"].inputs < 100:
            queue.submit(1, length=16)
        led += next(iter(queue.next().sequences[0].futures)) is bulk
    assert led == 2


def test_batches_are_brief_while_somebody_asks_and_long_when_nobody_does():
    brief, long = Bucket(32, 16), Bucket(128, 16)
    queue = Queue({ONE: 2.0, brief: 21.0, long: 80.0})
    queue.submit(2_000, length=16)
    assert queue.next(now=LATER).bucket == long
    query = queue.submit(1)
    asked_at = query.queued_at
    assert query in share_of(queue.next(now=asked_at).sequences)
    assert queue.next(now=asked_at + 1).bucket == brief
    assert queue.next(now=asked_at + queue_module.EXPECTED_S + 1).bucket == long


def test_what_is_alike_is_computed_once_for_all_who_wait():
    queue = Queue()
    one, two = future_of(3), future_of(4, first=1)
    queue.add(one)
    queue.add(two)
    assert queue.inputs == 7
    ran = queue.drain()
    assert len(ran) == 5
    assert share_of(ran) == {one: 3, two: 4}
    assert (queue.inputs, queue.tokens, queue.runnable) == (0, 0, False)


def test_what_differs_in_types_or_in_what_is_pooled_is_not_alike():
    ids, zeros, ones = (np.full(4, value, np.int32) for value in (7, 0, 1))
    encodings = [
        Encoding(ids),
        Encoding(ids, ones),
        Encoding(ids, zeros),
        Encoding(ids, spans=((1, len(ids)),)),
        Encoding(ids.copy()),
        Encoding(np.concatenate([ids, ones])),
        Encoding(ids, augmentation_tokens=1),
        # the types of one and the bounds of the other are the same bytes
        Encoding(ids, np.array([0, 1, 0, 2], np.int32), ((0, 4), (1, 3))),
        Encoding(ids, spans=((0, 1), (0, 2), (0, 4), (1, 3))),
    ]
    future = engine_ticket(encodings)
    places = [sequence.futures[future] for sequence in future.sequences]
    assert places == [[0, 2, 4], [1], [3], [5], [6], [7], [8]]


def test_one_who_leaves_takes_nothing_from_those_who_asked_for_the_same():
    queue = Queue()
    one, two = future_of(3), future_of(3)
    queue.add(one)
    queue.add(two)
    queue.cancel(one)
    assert queue.inputs == 3
    ran = queue.drain()
    assert share_of(ran) == {two: 3}
    queue.cancel(two)  # too late: it runs
    assert queue.next() is None
    assert queue.inputs == 0


def test_a_query_that_bulk_asked_for_too_runs_at_once_and_for_both():
    queue = Queue()
    bulk = future_of(1_000)
    queue.add(bulk)
    query = future_of(1, first=999)
    queue.add(query)
    batch = queue.next()
    assert batch.bucket == ONE
    assert share_of(batch.sequences)[query] == 1
    assert 999 in [index for e in batch.sequences for index in e.futures.get(bulk, [])]
    taken = Counter(queue.drain())
    assert set(taken.values()) == {1}
    assert len(taken) == 1_000 - len(batch.sequences)


def test_what_no_bucket_holds_yet_waits_and_holds_nobody_up():
    queue = Queue({ONE: 2.0})
    long, short = future_of(3, length=40), future_of(2)
    queue.add(long)
    queue.add(short)
    assert queue.needed_length == 40
    assert share_of(queue.next().sequences) == {short: 1}
    queue.drain()
    assert not queue.runnable
    assert queue.inputs == 3
    queue.cost = {ONE: 2.0, Bucket(4, 64): 20.0}
    queue.set_longest_row(64)
    assert queue.needed_length is None
    assert share_of(queue.drain()) == {long: 3}


def test_what_waited_for_its_bucket_is_owed_nothing_for_that_time():
    queue = Queue({ONE: 2.0})
    long, flood = future_of(400, length=40), future_of(400, first=1_000)
    queue.add(long, "bulk")
    queue.add(flood, "bulk")
    for _ in range(100):
        queue.next()
    queue.cost = {ONE: 2.0, Bucket(4, 64): 40.0}
    queue.set_longest_row(64)
    small = queue.submit(1, priority="bulk")
    batches = [queue.next() for _ in range(20)]
    assert any(small in share_of(batch.sequences) for batch in batches)


@pytest.mark.parametrize("futures", [1, 10, 5_000])
def test_composing_a_batch_costs_the_same_however_much_waits(futures, monkeypatch):
    """Work is counted by the sequences that are looked at."""
    looks = 0

    class Counted(QueuedSequence):
        @property
        def taken(self):
            nonlocal looks
            looks += 1
            return self._taken

        @taken.setter
        def taken(self, taken):
            self._taken = taken

    monkeypatch.setattr("jaxembed.engine.future.QueuedSequence", Counted)
    queue = Queue()
    for _ in range(futures):
        queue.submit(5_000 // futures)
    for _ in range(10):
        before = looks
        queue.next()
        assert looks - before <= 2 * 4 * FULL.tokens  # seen, and looked at again if it is kept
    assert max(1, 4 * FULL.tokens) <= MAX_WINDOW_SEQUENCES


actions = st.one_of(
    st.tuples(
        st.just("add"),
        st.lists(st.integers(0, 12), min_size=1, max_size=12),  # which texts, many of them alike
        st.sampled_from([None, "interactive", "bulk"]),
    ),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("take"), st.sampled_from([None, 1, 3])),
    st.tuples(st.just("set_longest_row"), st.sampled_from([16, 32, 64])),
)


@given(st.lists(actions, max_size=40))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_nothing_answered_twice_whatever_happens(script):
    texts = [np.full(1 + 5 * k, 100 + k, np.int32) for k in range(13)]
    cost = {Bucket(1, 16): 2.0, Bucket(4, 16): 5.0}
    queue = RequestQueue(64)
    queue.set_longest_row(16)
    futures: list[WorkFuture] = []
    gone: set[WorkFuture] = set()
    answers: Counter[tuple[WorkFuture, int]] = Counter()

    def take(max_sequences) -> bool:
        batch = queue.take(cost, 0.0, max_sequences, HOST_MS)
        if batch is None:
            assert not queue.runnable
            return False
        assert len(batch.sequences) <= (max_sequences or 100)
        for sequence in batch.sequences:
            for future, index in sequence.futures.items():
                assert future not in gone
                for place in index:
                    answers[future, place] += 1
                    assert future.wanted[place] == sequence.ids.tolist()
        return True

    def set_longest_row(longest) -> None:
        cost.update({Bucket(1, n): n / 8 for n in (16, 32, 64) if n <= longest})
        queue.set_longest_row(max(bucket.length for bucket in cost))

    for action, *arguments in script:
        if action == "add":
            chosen, priority = arguments
            futures.append(future := engine_ticket([Encoding(texts[k]) for k in chosen]))
            future.wanted = [texts[k].tolist() for k in chosen]
            queue.add(future, priority)
        elif action == "cancel" and arguments[0] < len(futures):
            queue.cancel(future := futures[arguments[0]])
            gone.add(future)
        elif action == "take":
            take(*arguments)
        elif action == "set_longest_row":
            set_longest_row(*arguments)
    set_longest_row(64)
    while take(None):
        pass
    assert (queue.inputs, queue.tokens) == (0, 0)
    assert not queue._flows
    assert not queue._waiting
    assert set(answers.values()) <= {1}
    left = [future for future in futures if future not in gone]
    assert {(one, place) for one in left for place in range(len(one.wanted))} <= set(answers)


def test_each_lane_knows_what_waits_in_it_and_since_when():
    queue = Queue()
    bulk, interactive = queue.queues["bulk"], queue.queues["interactive"]
    assert queue.oldest_s(bulk, 1.0) == 0
    first, _, query = queue.submit(100), queue.submit(50), queue.submit(1, 5)
    assert (bulk.tokens, interactive.tokens) == (1500, 5)
    later = query.queued_at + 1
    assert queue.oldest_s(bulk, later) == later - first.queued_at
    assert queue.oldest_s(interactive, later) == later - query.queued_at
    queue.cancel(query)
    assert queue.oldest_s(interactive, later) == 0


def test_an_unknown_priority_is_refused():
    with pytest.raises(InvalidInput, match="must be interactive or bulk"):
        Queue().submit(1, priority="urgent")
