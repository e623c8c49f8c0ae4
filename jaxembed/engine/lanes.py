"""Queues requests in two lanes, with fair turns in each, and composes the next batch of them.

It starts no threads and reads no clock. Threads that share it must hold a lock.
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

# A request without a priority is interactive if it is small: it has at most so many inputs, and at
# most this share of the tokens of the largest bucket, so that it takes a small part of a batch.
INTERACTIVE_INPUTS = 8
INTERACTIVE_SHARE = 1 / 8

# The share of the device time for each lane while both have work. Bulk leads at least every fourth
# batch of equal cost, so it never starves. Interactive work that has had less than its share waits
# for one batch at most.
SHARES: dict[Priority, float] = {"interactive": 3 / 4, "bulk": 1 / 4}

INTERLEAVED = 512  # tokens of a request before the turn of the next one: some dozen short texts
# The entries that are considered for a batch, in tokens, as multiple of the largest bucket's. They
# are enough to find sequences that fill rows well.
WINDOW_BUCKETS = 4
MOST_WINDOW_ENTRIES = (
    4096  # entries that are considered at most, which bounds the time in a long queue
)
EXPECTED_S = 5.0  # seconds after an interactive request in which the next one is expected


@dataclass(eq=False, repr=False)
class Flow:
    """The waiting entries of one request.

    `entries` are in reverse order, so that the next one is last. `parked` are the entries that fit
    on no bucket compiled so far. `inputs` and `tokens` count duplicates as often as they occur.
    """

    ticket: Ticket
    lane: "Lane"
    number: int
    start: float  # on the lane's clock, in tokens: where the next entry begins
    entries: list[Entry]
    parked: list[Entry]
    inputs: int
    tokens: int
    window_size: int = 0  # number of entries, from the next one on, that are considered for a batch
    has_gaps: bool = False  # whether some of these were taken in the turn of another request


@dataclass(eq=False, repr=False)
class Lane:
    """The requests of one priority, in the order of start-time fair queueing by tokens.

    The algorithm is by Goyal, Vin and Cheng (1996). A new request begins at `clock`, the position
    of the latest request that was served. So it waits for at most INTERLEAVED tokens of each
    request before it: a small request passes a huge one, and none waits forever.
    """

    share: float
    end: float = 0.0  # milliseconds on the clock of both lanes up to which it has had its time
    clock: float = 0.0  # in tokens
    inputs: int = 0
    tokens: int = 0
    order: list[tuple[float, int, Flow]] = field(default_factory=list)  # flows with entries, sorted
    _window_size: int = 0  # number of flows, from the first on, that are considered for a batch

    def look(self, enough: int) -> dict[Entry, None]:
        """The next entries in order, with `enough` tokens together or MOST_WINDOW_ENTRIES of them.

        They are the keys of the dict. The time depends on their number, not on the queue's length.
        Afterwards `settle` must be called.
        """
        window: dict[Entry, None] = {}
        order, later = self.order, []
        tokens, at = 0, 0
        while tokens < enough and len(window) < MOST_WINDOW_ENTRIES:
            if at < len(order) and not (later and later[0] < order[at]):
                tag, number, flow = order[at]
                at += 1
            elif later:
                tag, number, flow = heapq.heappop(later)
            else:
                break
            ahead = order[at][0] if at < len(order) else math.inf
            until = INTERLEAVED + (min(ahead, later[0][0]) if later else ahead)
            entries, count = flow.entries, flow.window_size
            most = count + MOST_WINDOW_ENTRIES - len(window)
            while count < min(len(entries), most) and tag <= until and tokens < enough:
                count += 1
                entry = entries[-count]
                if entry.taken:
                    flow.has_gaps = True
                    continue
                window[entry] = None
                tokens += entry.length
                tag += entry.length
            flow.window_size = count
            if count < len(entries):
                heapq.heappush(later, (tag, number, flow))
        self._window_size = at
        return window

    def settle(self, served: Mapping[Flow, int]) -> None:
        """Move the flows that were served by a batch to their new places in the order.

        `served` has the tokens that each flow of both lanes has in the batch.
        """
        window = self.order[: self._window_size]
        unserved = []
        for item in window:
            flow = item[2]
            if flow.has_gaps or flow in served:  # entries of its window were taken
                at = -flow.window_size
                flow.entries[at:] = [entry for entry in flow.entries[at:] if not entry.taken]
                flow.has_gaps = False
            if flow not in served and flow.entries:
                unserved.append(item)
        self.order[: self._window_size] = unserved
        for flow, tokens in served.items():
            if flow.lane is self:
                if not flow.window_size:  # its entry was taken in the turn of another request
                    self.remove(flow)
                flow.start += tokens
                self.clock = max(self.clock, flow.start)
                if flow.inputs:
                    self.insert(flow)
        for _, _, flow in window:
            flow.window_size = 0
        self._window_size = 0

    def insert(self, flow: Flow) -> None:
        """Put a flow into the order, by its start; nothing happens if it has no entries."""
        if flow.entries:
            insort(self.order, (flow.start, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        """Take a flow out of the order; nothing happens if it has no entries."""
        if flow.entries:
            del self.order[bisect_left(self.order, (flow.start, flow.number))]


class Lanes:
    """The queue of an engine: the waiting sequences of all requests in two lanes.

    A sequence that several requests asked for waits once, in the turns of all of them. It is taken
    in the first of these turns.
    """

    def __init__(self, largest: int):
        """Make an empty queue; `largest` is the number of tokens of the largest bucket."""
        self.lanes: dict[Priority, Lane] = {name: Lane(SHARES[name]) for name in SHARES}
        self._interactive, self._bulk = self.lanes["interactive"], self.lanes["bulk"]
        self._most_interactive = max(INTERACTIVE_SHARE * largest, 1)
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
        """Whether an entry waits that fits on a compiled bucket."""
        return any(lane.order for lane in self.lanes.values())

    @property
    def has_interactive(self) -> bool:
        """Whether an interactive entry waits that fits on a compiled bucket."""
        return bool(self._interactive.order)

    def is_bulk_alone(self, now: float) -> bool:
        """Whether only bulk work waits, and the last interactive request is a while ago.

        `now` is time.monotonic().
        """
        return (
            self.runnable and not self.has_interactive and now - self._interactive_at > EXPECTED_S
        )

    @property
    def needed_length(self) -> int | None:
        """The `least_row` of the oldest entry that fits on no compiled bucket; None if all fit."""
        return next((f.parked[0].least_row for f in self._flows.values() if f.parked), None)

    def oldest_s(self, lane: Lane, now: float) -> float:
        """The seconds up to `now` for which the oldest request of a lane has waited; 0 without one.

        `now` is time.monotonic().
        """
        flows = self._flows.values() if lane.inputs else ()
        return next((now - f.ticket.queued_at for f in flows if f.lane is lane), 0.0)

    def add(self, ticket: Ticket, priority: Priority | None = None) -> None:
        """Queue the entries of a ticket. Without a priority the size of its work decides the lane.

        The ticket's own list of them is emptied, because entries and ticket refer to each other.
        """
        if priority is None:
            work = ticket.work
            is_small = (
                len(work.lengths) <= INTERACTIVE_INPUTS
                and len(work.planes["ids"]) <= self._most_interactive
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
            twin = self._waiting.setdefault(entry.key, entry)
            if twin is not entry:  # what waits already is joined
                twin.claims[ticket] = entry.claims[ticket]
            entries.append(twin)
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
        """Remove a ticket. Its waiting entries are removed unless another ticket asked for them."""
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
        """Set the longest row of the compiled buckets, and queue parked entries that fit now."""
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
        """Remove all waiting entries and return them."""
        waiting = self._waiting.values()
        self._flows, self._waiting = {}, {}
        for lane in self.lanes.values():
            lane.inputs = lane.tokens = lane._window_size = 0
            lane.order = []
        return waiting

    def take(
        self, cost: Mapping[Bucket, float], now: float, most: int | None = None
    ) -> Batch | None:
        """Take the next batch out of the queue; None if no waiting entry fits on a compiled bucket.

        The lane that has had less of its share of device time leads: its entries decide the bucket,
        and its first entry is in the batch. The entries of the other lane fill the room that is
        left. Apart from the first entry, interactive ones are placed before bulk ones.

        `cost` has the milliseconds of every usable bucket, `now` is time.monotonic(), and `most` is
        the largest number of sequences in the batch; None means no limit.
        """
        while leads := [lane for lane in self.lanes.values() if lane.order]:
            # where its next batch begins: it earns no credit for time in which it had no work
            begins = [max(self._clock, lane.end) for lane in leads]
            begin = min(begins)
            lead = leads[begins.index(begin)]
            enough = WINDOW_BUCKETS * max(bucket.tokens for bucket in cost)
            window = list(lead.look(enough))[:most]
            if not window:  # all its entries were taken in other requests' turns
                lead.settle({})
                continue
            other = self._bulk if lead is self._interactive else self._interactive
            # short runs, if bulk leads while an interactive request may come soon
            brief = lead is self._bulk and now - self._interactive_at < EXPECTED_S
            bucket = choose_bucket(window, cost, brief)
            leading = set(window)
            looked = other.look(WINDOW_BUCKETS * bucket.tokens) if other.order else ()
            fillers = [entry for entry in looked if entry not in leading]
            first, rest = window[:1], window[1:]
            groups = (rest, fillers) if lead is self._interactive else (fillers, rest)
            batch = place(bucket, first, *groups, most=most)
            self._clock = begin
            lead.end = begin + cost[bucket] / lead.share
            # out of the flows of every ticket that asked for its entries
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
            # last, so that `clear` still finds them after an error here
            for entry in batch.entries:
                del self._waiting[entry.key]
            return batch
        return None
