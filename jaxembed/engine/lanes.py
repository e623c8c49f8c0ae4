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
from jaxembed.engine.batch import Batch, choose_bucket, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.ticket import Entry, Key, Ticket

# A request without a priority is interactive if it has at most INTERACTIVE_INPUTS inputs, and at
# most INTERACTIVE_SHARE of the tokens of the largest bucket. So it takes a small part of a batch.
INTERACTIVE_INPUTS = 8
INTERACTIVE_SHARE = 1 / 8

# The share of the device time for each queue while both have work. Bulk leads at least every fourth
# batch of equal cost, so it never starves. Interactive work that has had less than its share waits
# for one batch at most.
SHARES: dict[Priority, float] = {"interactive": 3 / 4, "bulk": 1 / 4}

INTERLEAVED = 512  # tokens of a request before those of the next one: some dozen short texts
# Sequences are considered for a batch up to this multiple of the largest bucket's tokens. That is
# enough to find sequences that fill rows well.
WINDOW_BUCKETS = 4
MOST_WINDOW_ENTRIES = (
    4096  # largest number of considered sequences, which bounds the time in a long queue
)
EXPECTED_S = 5.0  # seconds after an interactive request during which another one is expected


@dataclass(eq=False, repr=False)
class Flow:
    """The waiting sequences of one request.

    `entries` are in reverse order, so that the next sequence is last. `parked` are the sequences
    that fit in no bucket compiled so far. `inputs` and `tokens` count duplicates as often as they
    occur.
    """

    ticket: Ticket
    lane: "Lane"
    number: int
    start: float  # virtual time of the queue, in tokens, at which the next sequence begins
    entries: list[Entry]
    parked: list[Entry]
    inputs: int
    tokens: int
    window_size: int = 0  # number of next sequences that are considered for a batch
    has_gaps: bool = False  # whether some of these were taken with another request


@dataclass(eq=False, repr=False)
class Lane:
    """The queue of the requests of one priority, by start-time fair queueing over tokens.

    The algorithm is by Goyal, Vin and Cheng (1996). `clock` is the virtual time of the latest
    request that was served, and a new request begins there. So it waits for at most INTERLEAVED
    tokens of each earlier request: a small request passes a huge one, and no request starves.
    """

    share: float  # of the device time
    end: float = 0.0  # virtual time of both queues, in milliseconds, at which its last batch ends
    clock: float = 0.0  # in tokens
    inputs: int = 0
    tokens: int = 0
    order: list[tuple[float, int, Flow]] = field(default_factory=list)  # flows with entries, sorted
    _window_size: int = 0  # number of flows, from the first on, that are considered for a batch

    def look(self, enough: int) -> dict[Entry, None]:
        """Return the next sequences in fair order, as the keys of a dict, without taking them.

        It stops at `enough` tokens or MOST_WINDOW_ENTRIES sequences, however long the queue is.
        `settle` must be called afterwards.
        """
        window: dict[Entry, None] = {}
        order, later = self.order, []  # `later` is a heap of flows with sequences left
        tokens, position = 0, 0
        while tokens < enough and len(window) < MOST_WINDOW_ENTRIES:
            if position < len(order) and not (later and later[0] < order[position]):
                begin, number, flow = order[position]
                position += 1
            elif later:
                begin, number, flow = heapq.heappop(later)
            else:
                break
            next_begin = order[position][0] if position < len(order) else math.inf
            until = INTERLEAVED + (min(next_begin, later[0][0]) if later else next_begin)
            entries, count = flow.entries, flow.window_size
            max_count = count + MOST_WINDOW_ENTRIES - len(window)
            while count < min(len(entries), max_count) and begin <= until and tokens < enough:
                count += 1
                entry = entries[-count]
                if entry.taken:
                    flow.has_gaps = True
                    continue
                window[entry] = None
                tokens += entry.length
                begin += entry.length
            flow.window_size = count
            if count < len(entries):
                heapq.heappush(later, (begin, number, flow))
        self._window_size = position
        return window

    def settle(self, served: Mapping[Flow, int]) -> None:
        """Move the flows that a batch serves to their new places in the order.

        `served` is the number of tokens in the batch by flow, for the flows of both queues.
        """
        window = self.order[: self._window_size]
        unserved = []
        for item in window:
            flow = item[2]
            if flow.has_gaps or flow in served:  # sequences of its window were taken
                first = -flow.window_size
                flow.entries[first:] = [entry for entry in flow.entries[first:] if not entry.taken]
                flow.has_gaps = False
            if flow not in served and flow.entries:
                unserved.append(item)
        self.order[: self._window_size] = unserved
        for flow, tokens in served.items():
            if flow.lane is self:
                if not flow.window_size:  # its sequence was taken with another request
                    self.remove(flow)
                flow.start += tokens
                self.clock = max(self.clock, flow.start)
                if flow.inputs:
                    self.insert(flow)
        for _, _, flow in window:
            flow.window_size = 0
        self._window_size = 0

    def insert(self, flow: Flow) -> None:
        """Insert a flow into the order by its start; do nothing if it has no sequences."""
        if flow.entries:
            insort(self.order, (flow.start, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        """Remove a flow from the order; do nothing if it has no sequences."""
        if flow.entries:
            del self.order[bisect_left(self.order, (flow.start, flow.number))]


class Lanes:
    """The queue of an engine: all waiting requests, in a queue for each priority.

    A sequence that several requests need waits once, with a place in each of these requests. It is
    taken when the first of these places is due.
    """

    def __init__(self, largest: int):
        """Make an empty queue; `largest` is the number of tokens of the largest bucket."""
        self.lanes: dict[Priority, Lane] = {name: Lane(SHARES[name]) for name in SHARES}
        self._interactive, self._bulk = self.lanes["interactive"], self.lanes["bulk"]
        self._max_interactive_tokens = max(INTERACTIVE_SHARE * largest, 1)
        self._flows: dict[Ticket, Flow] = {}  # oldest first
        self._waiting: dict[Key, Entry] = {}
        self._longest = 0  # length of the longest row of a compiled bucket
        self._number = 0  # of the latest flow
        self._clock = 0.0  # in milliseconds of device time
        self._interactive_at = -math.inf  # time.monotonic() of the latest interactive request

    @property
    def inputs(self) -> int:
        """The number of waiting inputs; duplicates count as often as they occur."""
        return sum(lane.inputs for lane in self.lanes.values())

    @property
    def tokens(self) -> int:
        """The number of tokens of the waiting inputs."""
        return sum(lane.tokens for lane in self.lanes.values())

    @property
    def runnable(self) -> bool:
        """Whether a sequence waits that fits in a compiled bucket."""
        return any(lane.order for lane in self.lanes.values())

    @property
    def has_interactive(self) -> bool:
        """Whether an interactive sequence waits that fits in a compiled bucket."""
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
        """The row length that the oldest sequence without a compiled bucket needs, or None."""
        return next((f.parked[0].least_row for f in self._flows.values() if f.parked), None)

    def oldest_s(self, lane: Lane, now: float) -> float:
        """Return the seconds that the oldest request of a queue has waited; 0 if none waits.

        `now` is time.monotonic().
        """
        flows = self._flows.values() if lane.inputs else ()
        return next((now - f.ticket.queued_at for f in flows if f.lane is lane), 0.0)

    def add(self, ticket: Ticket, priority: Priority | None = None) -> None:
        """Queue the sequences of a request's future.

        Without a `priority`, the size of the request decides on the priority queue. A sequence that
        waits already will answer this future, too. The future's list of sequences is emptied,
        because sequences and future refer to each other.
        """
        if priority is None:
            work = ticket.work
            is_small = (
                len(work.lengths) <= INTERACTIVE_INPUTS
                and len(work.planes["ids"]) <= self._max_interactive_tokens
            )
            priority = "interactive" if is_small else "bulk"
        lane = self.lanes[priority]
        if ticket.trace is not None:
            ticket.trace.queued_at, ticket.trace.trace.lane = ticket.queued_at, priority
        ticket.interactive = lane is self._interactive
        if ticket.interactive:
            self._interactive_at = ticket.queued_at
        entries = []
        for entry in ticket.entries:
            waiting = self._waiting.setdefault(entry.key, entry)
            if waiting is not entry:  # an equal sequence waits already
                waiting.claims[ticket] = entry.claims[ticket]
            entries.append(waiting)
        ticket.entries = []
        ready = [entry for entry in entries if entry.least_row <= self._longest]
        parked = [entry for entry in entries if entry.least_row > self._longest]
        self._number += 1
        inputs, tokens = ticket.inputs, ticket.tokens
        flow = Flow(ticket, lane, self._number, lane.clock, ready[::-1], parked, inputs, tokens)
        self._flows[ticket] = flow
        lane.inputs += inputs
        lane.tokens += tokens
        lane.insert(flow)

    def cancel(self, ticket: Ticket) -> None:
        """Remove a future from the queue, with its sequences unless another future needs them."""
        flow = self._flows.pop(ticket, None)
        if flow is None:
            return
        flow.lane.remove(flow)
        flow.lane.inputs -= flow.inputs
        flow.lane.tokens -= flow.tokens
        for entry in (*flow.entries, *flow.parked):
            if not entry.taken:
                del entry.claims[ticket]
                if not entry.claims:
                    del self._waiting[entry.key]

    def lengthen(self, longest: int) -> None:
        """Set the longest row of the compiled buckets, and queue parked sequences that fit now."""
        self._longest = longest
        for flow in self._flows.values():
            ready = [entry for entry in flow.parked if entry.least_row <= longest]
            if ready:
                flow.lane.remove(flow)
                if not flow.entries:  # time without work earns no credit
                    flow.start = max(flow.start, flow.lane.clock)
                flow.parked = [entry for entry in flow.parked if entry.least_row > longest]
                flow.entries[:0] = ready[::-1]
                flow.lane.insert(flow)

    def clear(self) -> Iterable[Entry]:
        """Remove all waiting sequences and return them."""
        waiting = self._waiting.values()
        self._flows, self._waiting = {}, {}
        for lane in self.lanes.values():
            lane.inputs = lane.tokens = lane._window_size = 0
            lane.order = []
        return waiting

    def take(
        self, cost: Mapping[Bucket, float], now: float, most: int | None = None
    ) -> Batch | None:
        """Take the next batch out of the queue; None if no waiting sequence fits in a bucket.

        The priority queue that has had less of its share of device time leads: its sequences decide
        the bucket, and its first sequence is in the batch. The sequences of the other queue fill
        the room that is left. After the first sequence, interactive sequences are placed before
        bulk sequences.

        `cost` has the milliseconds of every usable bucket, `now` is time.monotonic(), and `most` is
        the largest number of sequences in the batch; None means no limit.
        """
        while leads := [lane for lane in self.lanes.values() if lane.order]:
            # virtual times at which their next batches begin; time without work earns no credit
            begins = [max(self._clock, lane.end) for lane in leads]
            begin = min(begins)
            lead = leads[begins.index(begin)]
            enough = WINDOW_BUCKETS * max(bucket.tokens for bucket in cost)
            window = list(lead.look(enough))[:most]
            if not window:  # all its sequences were taken with other requests
                lead.settle({})
                continue
            other = self._bulk if lead is self._interactive else self._interactive
            # short runs, if bulk leads while an interactive request may come soon
            brief = lead is self._bulk and now - self._interactive_at < EXPECTED_S
            bucket = choose_bucket(window, cost, brief)
            leading = set(window)
            other_window = other.look(WINDOW_BUCKETS * bucket.tokens) if other.order else ()
            others = [entry for entry in other_window if entry not in leading]
            first, rest = window[:1], window[1:]
            groups = (rest, others) if lead is self._interactive else (others, rest)
            batch = place(bucket, first, *groups, most=most)
            self._clock = begin
            lead.end = begin + cost[bucket] / lead.share
            # subtract the batch from the counts of every request that it answers
            served: dict[Flow, int] = {}
            for entry in batch.entries:
                entry.taken = True
                for ticket, index in entry.claims.items():
                    flow, count = self._flows[ticket], len(index)
                    flow.inputs -= count
                    flow.tokens -= count * entry.length
                    flow.lane.inputs -= count
                    flow.lane.tokens -= count * entry.length
                    served[flow] = served.get(flow, 0) + entry.length
            for lane in self.lanes.values():
                if lane.order:
                    lane.settle(served)
            for flow in served:
                if not flow.inputs:
                    del self._flows[flow.ticket]
            # last, so that `clear` still returns them if the lines above raise an error
            for entry in batch.entries:
                del self._waiting[entry.key]
            return batch
        return None
