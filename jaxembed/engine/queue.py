"""Queues requests in two priority queues, interactive and bulk, and composes the next batch.

The sequences of a request form a flow. Each queue serves its flows fairly, by tokens. Threads that
share a request queue must hold a lock.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxembed.data.inputs import Priority
from jaxembed.data.work import Work
from jaxembed.engine.batch import Batch, choose_bucket, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import Key, QueuedSequence, WorkFuture
from jaxembed.errors import InvalidInput

# A request without a priority is interactive if it has at most INTERACTIVE_INPUTS inputs, and at
# most INTERACTIVE_SHARE of the tokens of the largest bucket, which is a small part of a batch.
INTERACTIVE_INPUTS = 8
INTERACTIVE_SHARE = 1 / 8

# The share of the device time for each queue while both have work. If all batches cost the same,
# bulk leads at least every fourth batch (see `take`), so it never starves. Interactive work that
# has had less than its share waits for one batch at most.
SHARES: dict[Priority, float] = {"interactive": 3 / 4, "bulk": 1 / 4}

INTERLEAVED = 512  # tokens of a request that go before the next request: about a dozen short texts
# Sequences are considered for a batch up to this multiple of the largest bucket's tokens. That is
# enough to find sequences that fill rows well.
WINDOW_BUCKETS = 4
MAX_WINDOW_SEQUENCES = 4096  # most sequences considered for a batch, so that this takes little time
EXPECTED_S = 5.0  # seconds after an interactive request during which another one is expected


@dataclass(eq=False, repr=False)
class Flow:
    """The waiting sequences of one request.

    `sequences` are in reverse order, so that the next sequence is last. `parked` are the sequences
    that fit in no bucket compiled so far. `inputs` and `tokens` count equal inputs as often as they
    occur.
    """

    future: WorkFuture
    queue: "PriorityQueue"
    number: int
    start: float  # virtual time of the queue, in tokens, at which the next sequence begins
    sequences: list[QueuedSequence]
    parked: list[QueuedSequence]
    inputs: int
    tokens: int
    window_size: int = 0  # number of next sequences that are considered for a batch
    has_gaps: bool = False  # whether some of these next sequences were taken with another request


@dataclass(eq=False, repr=False)
class PriorityQueue:
    """The queue of the requests of one priority, by start-time fair queueing over tokens.

    The algorithm is by Goyal, Vin and Cheng (1996). `clock` is the largest virtual time that a
    request has reached by being served, and a new request begins at it. So a new request waits for
    at most INTERLEAVED tokens of each earlier request: a small request passes a huge one, and no
    request starves.
    """

    share: float  # share of the device time while both queues have work
    # the virtual time at which the last batch led by this queue ends, in milliseconds
    end: float = 0.0
    clock: float = 0.0  # virtual time within this queue, in tokens
    inputs: int = 0
    tokens: int = 0
    # flows with sequences, sorted by start and number
    order: list[tuple[float, int, Flow]] = field(default_factory=list)
    window_flows: int = 0  # number of flows, from the first on, that are considered for a batch

    def peek(self, enough: int) -> dict[QueuedSequence, None]:
        """Return the next sequences in fair order, as the keys of a dict, without taking them.

        However long the queue is, this ends with the sequence that completes `enough` tokens or
        MAX_WINDOW_SEQUENCES sequences. The caller must call `requeue` afterwards.
        """
        window: dict[QueuedSequence, None] = {}
        # The earliest flow comes next. It is the next flow of `order`, or one of `resumed`, a heap
        # of the flows that this loop has left and will resume.
        order, resumed = self.order, []
        tokens, position = 0, 0
        while tokens < enough and len(window) < MAX_WINDOW_SEQUENCES:
            if position < len(order) and not (resumed and resumed[0] < order[position]):
                begin, number, flow = order[position]
                position += 1
            elif resumed:
                begin, number, flow = heapq.heappop(resumed)
            else:
                break
            next_begin = order[position][0] if position < len(order) else math.inf
            # go on to the next flow once this flow is INTERLEAVED tokens past the next flow's begin
            until = INTERLEAVED + (min(next_begin, resumed[0][0]) if resumed else next_begin)
            sequences, count = flow.sequences, flow.window_size
            max_size = count + MAX_WINDOW_SEQUENCES - len(window)
            while count < min(len(sequences), max_size) and begin <= until and tokens < enough:
                count += 1
                sequence = sequences[-count]
                if sequence.taken:
                    flow.has_gaps = True
                    continue
                window[sequence] = None
                tokens += sequence.length
                begin += sequence.length
            flow.window_size = count
            if count < len(sequences):
                heapq.heappush(resumed, (begin, number, flow))
        self.window_flows = position
        return window

    def requeue(self, served: Mapping[Flow, int]) -> None:
        """Move the flows that a batch serves to their new places in the order.

        `served` is the number of tokens in the batch by flow, for the flows of both queues.
        """
        window = self.order[: self.window_flows]
        unserved = []
        for item in window:
            flow = item[2]
            if flow.has_gaps or flow in served:  # some of the flow's next sequences were taken
                first = -flow.window_size
                flow.sequences[first:] = [
                    sequence for sequence in flow.sequences[first:] if not sequence.taken
                ]
                flow.has_gaps = False
            if flow not in served and flow.sequences:
                unserved.append(item)
        self.order[: self.window_flows] = unserved
        for flow, tokens in served.items():
            if flow.queue is self:
                if not flow.window_size:  # an equal sequence of another request was in the window
                    self.remove(flow)
                flow.start += tokens
                self.clock = max(self.clock, flow.start)
                if flow.inputs:
                    self.insert(flow)
        for _, _, flow in window:
            flow.window_size = 0
        self.window_flows = 0

    def insert(self, flow: Flow) -> None:
        """Insert a flow into the order by its start; do nothing if it has no sequences."""
        if flow.sequences:
            insort(self.order, (flow.start, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        """Remove a flow from the order; do nothing if it has no sequences."""
        if flow.sequences:
            del self.order[bisect_left(self.order, (flow.start, flow.number))]


class RequestQueue:
    """The queue of an engine: all waiting requests, in a queue for each priority.

    A sequence that several requests need waits once, with a place in the flow of each request. The
    sequence is taken when the first of these places is due.
    """

    def __init__(self, largest: int, alignment: int = 1):
        """Make an empty queue. `largest` is the number of tokens of the largest bucket, and
        `alignment` that of `batch.place`."""
        self.queues: dict[Priority, PriorityQueue] = {
            name: PriorityQueue(SHARES[name]) for name in SHARES
        }
        self._interactive, self._bulk = self.queues["interactive"], self.queues["bulk"]
        self._max_interactive_tokens = max(INTERACTIVE_SHARE * largest, 1)
        self._flows: dict[WorkFuture, Flow] = {}  # oldest first
        self._waiting: dict[Key, QueuedSequence] = {}
        self._alignment = alignment
        self._longest_row = 0  # length of the longest row of a compiled bucket
        self._number = 0  # number of the latest flow; numbers order flows with equal starts
        self._clock = 0.0  # virtual time of both queues, in milliseconds of device time
        self._interactive_at = -math.inf  # time.monotonic() of the latest interactive request

    @property
    def inputs(self) -> int:
        """The number of waiting inputs; equal inputs count as often as they occur."""
        return sum(queue.inputs for queue in self.queues.values())

    @property
    def tokens(self) -> int:
        """The number of tokens of the waiting inputs."""
        return sum(queue.tokens for queue in self.queues.values())

    @property
    def runnable(self) -> bool:
        """Whether there is a waiting sequence that fits in a compiled bucket."""
        return any(queue.order for queue in self.queues.values())

    @property
    def has_interactive(self) -> bool:
        """Whether there is a waiting interactive sequence that fits in a compiled bucket."""
        return bool(self._interactive.order)

    def is_bulk_alone(self, now: float) -> bool:
        """Return whether only bulk work waits, and no interactive request came for EXPECTED_S.

        `now` is time.monotonic().
        """
        return (
            self.runnable and not self.has_interactive and now - self._interactive_at > EXPECTED_S
        )

    @property
    def needed_length(self) -> int | None:
        """The row length for the oldest sequence that fits in no compiled bucket, or None."""
        return next((f.parked[0].min_row for f in self._flows.values() if f.parked), None)

    def oldest_s(self, queue: PriorityQueue, now: float) -> float:
        """Return the seconds that the oldest request of a queue has waited; 0 if none waits.

        `now` is time.monotonic().
        """
        flows = self._flows.values() if queue.inputs else ()
        return next((now - f.future.queued_at for f in flows if f.queue is queue), 0.0)

    def is_small(self, work: Work) -> bool:
        """Return whether a request without a priority is interactive."""
        return len(work) <= INTERACTIVE_INPUTS and work.tokens <= self._max_interactive_tokens

    def add(self, future: WorkFuture, priority: Priority | None = None) -> None:
        """Queue the sequences of a request's future.

        Without a `priority`, the size of the request decides on the priority queue. If an equal
        sequence of another request waits already, its answer also goes to this future. The future's
        list of sequences is emptied, because sequences and future refer to each other. Raises
        InvalidInput for an unknown priority.
        """
        if priority is None:
            priority = "interactive" if self.is_small(future.work) else "bulk"
        elif priority not in self.queues:
            raise InvalidInput(
                f"`priority` must be {' or '.join(self.queues)}. Given: {priority!r}",
                field="priority",
            )
        queue = self.queues[priority]
        if future.trace is not None:
            future.trace.queued_at, future.trace.trace.priority = future.queued_at, priority
        future.interactive = queue is self._interactive
        if future.interactive:
            self._interactive_at = future.queued_at
        sequences = []
        for sequence in future.sequences:
            queued = self._waiting.setdefault(sequence.key, sequence)
            if queued is not sequence:  # an equal sequence waits already
                queued.futures[future] = sequence.futures[future]
            sequences.append(queued)
        future.sequences = []
        # sequences are parked until a bucket that holds them is compiled
        ready = [sequence for sequence in sequences if sequence.min_row <= self._longest_row]
        parked = [sequence for sequence in sequences if sequence.min_row > self._longest_row]
        self._number += 1
        flow = Flow(
            future,
            queue,
            self._number,
            queue.clock,
            ready[::-1],
            parked,
            future.inputs,
            future.tokens,
        )
        self._flows[future] = flow
        queue.inputs += future.inputs
        queue.tokens += future.tokens
        queue.insert(flow)

    def cancel(self, future: WorkFuture) -> None:
        """Remove a future from the queue, with the sequences that no other future needs."""
        flow = self._flows.pop(future, None)
        if flow is None:
            return
        flow.queue.remove(flow)
        flow.queue.inputs -= flow.inputs
        flow.queue.tokens -= flow.tokens
        for sequence in (*flow.sequences, *flow.parked):
            if not sequence.taken:
                del sequence.futures[future]
                if not sequence.futures:
                    del self._waiting[sequence.key]

    def set_longest_row(self, longest: int) -> None:
        """Set the length of the longest row of the compiled buckets, and queue the parked sequences
        that fit in such a row."""
        self._longest_row = longest
        for flow in self._flows.values():
            ready = [sequence for sequence in flow.parked if sequence.min_row <= longest]
            if ready:
                flow.queue.remove(flow)
                if not flow.sequences:  # a flow earns no credit while all its sequences are parked
                    flow.start = max(flow.start, flow.queue.clock)
                flow.parked = [sequence for sequence in flow.parked if sequence.min_row > longest]
                flow.sequences[:0] = ready[::-1]
                flow.queue.insert(flow)

    def clear(self) -> Iterable[QueuedSequence]:
        """Remove all waiting sequences and return them."""
        waiting = self._waiting.values()
        self._flows, self._waiting = {}, {}
        for queue in self.queues.values():
            queue.inputs = queue.tokens = queue.window_flows = 0
            queue.order = []
        return waiting

    def take(
        self,
        cost: Mapping[Bucket, float],
        now: float,
        max_sequences: int | None,
        host_ms: float,
    ) -> Batch | None:
        """Take the next batch out of the queue; None if no waiting sequence fits in a bucket.

        The priority queue that has had less of its share of device time leads: the bucket is chosen
        for its sequences, and its first sequence is in the batch. The sequences of the other queue
        fill the room that is left. After the first sequence, interactive sequences are placed
        before bulk sequences.

        `cost` has the milliseconds of every usable bucket, `now` is time.monotonic(), and `host_ms`
        are the milliseconds of host time for each batch. `max_sequences` is the largest number of
        sequences in the batch; None means no limit.
        """
        while leads := [queue for queue in self.queues.values() if queue.order]:
            # the virtual time at which the next batch of each queue begins; a queue earns no credit
            # while it has no work
            begins = [max(self._clock, queue.end) for queue in leads]
            begin = min(begins)
            lead = leads[begins.index(begin)]
            largest = max(bucket.tokens for bucket in cost)
            window = list(lead.peek(WINDOW_BUCKETS * largest))[:max_sequences]
            if not window:  # all sequences of the queue were taken with other requests
                lead.requeue({})
                continue
            other = self._bulk if lead is self._interactive else self._interactive
            # the run must be brief if bulk leads while an interactive request may come soon
            brief = lead is self._bulk and now - self._interactive_at < EXPECTED_S
            bucket = choose_bucket(window, cost, brief, host_ms, self._alignment)
            leading = set(window)
            other_window = other.peek(WINDOW_BUCKETS * bucket.tokens) if other.order else ()
            others = [sequence for sequence in other_window if sequence not in leading]
            first, rest = window[:1], window[1:]
            groups = (rest, others) if lead is self._interactive else (others, rest)
            batch = place(
                bucket, first, *groups, max_sequences=max_sequences, alignment=self._alignment
            )
            self._clock = begin
            lead.end = begin + cost[bucket] / lead.share
            # subtract the batch from the counts of every request that it answers
            served: dict[Flow, int] = {}
            for sequence in batch.sequences:
                sequence.taken = True
                for future, index in sequence.futures.items():
                    flow, count = self._flows[future], len(index)
                    flow.inputs -= count
                    flow.tokens -= count * sequence.length
                    flow.queue.inputs -= count
                    flow.queue.tokens -= count * sequence.length
                    served[flow] = served.get(flow, 0) + sequence.length
            for queue in self.queues.values():
                if queue.order:
                    queue.requeue(served)
            for flow in served:
                if not flow.inputs:
                    del self._flows[flow.future]
            # these lines are last, so that `clear` returns the sequences if a line above raises
            for sequence in batch.sequences:
                del self._waiting[sequence.key]
            return batch
        return None
