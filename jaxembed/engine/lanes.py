"""What waits for a batch, and what is next: two lanes, and fair turns between the requests of each.

Pure data: it starts no threads and asks no clock. Whoever shares it holds a lock.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxembed.engine.batch import Batch, choose_bucket, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.ticket import Entry, Key, Ticket
from jaxembed.inputs import Priority

# A request is interactive by itself where somebody may wait for it: few inputs, and so few tokens
# that they take a small share of the longest a batch lasts.
INTERACTIVE_INPUTS = 8
INTERACTIVE_SHARE = 1 / 8  # of the tokens of the largest bucket

# Of the device's time while both lanes have work. Bulk leads at least every fourth batch of equal
# cost, so it never starves; interactive work below its own share never waits for more than a batch.
SHARES: dict[Priority, float] = {"interactive": 3 / 4, "bulk": 1 / 4}

INTERLEAVED = 512  # tokens of a request before the next one's turn: some dozen short texts
LOOKED_AT = 4  # largest buckets' worth of tokens: enough to choose what goes well together
MOST_LOOKED_AT = 4096  # entries; bounds the work of a choice, however deep the queue is
ABOUT_S = 5.0  # after an interactive request the next one is expected for so long


@dataclass(eq=False, repr=False)
class Flow:
    """What waits of one request.

    `entries` are in reverse, the next one last; `parked` are too long for every bucket compiled so
    far. `inputs` and `tokens` count what waits as often as it was asked for.
    """

    ticket: Ticket
    lane: "Lane"
    number: int
    start: float  # on the lane's clock of tokens: where its next entry begins
    entries: list[Entry]
    parked: list[Entry]
    inputs: int
    tokens: int
    looked_at: int = 0  # entries, from the next one on, while a batch is chosen
    has_gaps: bool = False  # some of those were taken through another request

    def close_gaps(self) -> None:
        """Keep what was looked at and not taken."""
        at = -self.looked_at
        self.entries[at:] = [entry for entry in self.entries[at:] if not entry.taken]
        self.has_gaps = False


@dataclass(eq=False, repr=False)
class Lane:
    """The requests of one priority, in the order of start-time fair queueing (Goyal, Vin and Cheng,
    1996) by tokens.

    A new request begins at `clock`, where the last one served has come to, and so behind every one
    that waits, but no more than `INTERLEAVED` tokens of each: a small one passes a huge one, and
    none is ever passed for good.
    """

    share: float
    end: float = 0.0  # milliseconds on the clock of both lanes, that it has had already
    clock: float = 0.0  # tokens
    inputs: int = 0
    tokens: int = 0
    order: list[tuple[float, int, Flow]] = field(default_factory=list)  # sorted; who has entries
    _looked_at: int = 0  # flows, from the first on, while a batch is chosen

    def look(self, enough: int) -> dict[Entry, None]:
        """The entries that are next, of so many tokens or MOST_LOOKED_AT at most, as an ordered
        set. The work is in proportion to that and not to what waits."""
        window: dict[Entry, None] = {}
        order, later = self.order, []
        held, at = 0, 0
        while held < enough and len(window) < MOST_LOOKED_AT:
            if at < len(order) and not (later and later[0] < order[at]):
                tag, number, flow = order[at]
                at += 1
            elif later:
                tag, number, flow = heapq.heappop(later)
            else:
                break
            ahead = order[at][0] if at < len(order) else math.inf
            until = INTERLEAVED + (min(ahead, later[0][0]) if later else ahead)
            entries, looked_at = flow.entries, flow.looked_at
            most = looked_at + MOST_LOOKED_AT - len(window)
            while looked_at < min(len(entries), most) and tag <= until and held < enough:
                looked_at += 1
                entry = entries[-looked_at]
                if entry.taken:
                    flow.has_gaps = True
                    continue
                window[entry] = None
                held += entry.length
                tag += entry.length
            flow.looked_at = looked_at
            if looked_at < len(entries):
                heapq.heappush(later, (tag, number, flow))
        self._looked_at = at
        return window

    def settle(self, had: Mapping[Flow, int]) -> None:
        """A batch was chosen: move the flows that had so many tokens of it."""
        passed = []
        for item in self.order[: self._looked_at]:
            flow = item[2]
            if flow.has_gaps or flow in had:
                flow.close_gaps()
            if flow not in had and flow.entries:
                passed.append(item)
        looked_at = self.order[: self._looked_at]
        self.order[: self._looked_at] = passed
        for flow, tokens in had.items():
            if flow.lane is self:
                if not flow.looked_at:  # its entry was taken through another request
                    self.remove(flow)
                flow.start += tokens
                self.clock = max(self.clock, flow.start)
                if flow.inputs:
                    self.insert(flow)
        for _, _, flow in looked_at:
            flow.looked_at = 0
        self._looked_at = 0

    def insert(self, flow: Flow) -> None:
        if flow.entries:
            insort(self.order, (flow.start, flow.number, flow))

    def remove(self, flow: Flow) -> None:
        if flow.entries:
            del self.order[bisect_left(self.order, (flow.start, flow.number))]


class Lanes:
    """All that waits, whose it is, and what of it runs next.

    Sequences that are the same wait once, in the turn of each request that asked for them: taken in
    the first of these turns, whatever becomes of the others.
    """

    def __init__(self, largest: int):
        """`largest` is the tokens of the largest bucket."""
        self._lanes: dict[Priority, Lane] = {name: Lane(SHARES[name]) for name in SHARES}
        self._interactive, self._bulk = self._lanes["interactive"], self._lanes["bulk"]
        self._most_interactive = max(INTERACTIVE_SHARE * largest, 1)
        self._flows: dict[Ticket, Flow] = {}  # oldest first
        self._waiting: dict[Key, Entry] = {}
        self._longest = 0  # row of a compiled bucket
        self._number = 0
        self._clock = 0.0  # milliseconds
        self._interactive_at = -math.inf

    @property
    def inputs(self) -> int:
        """That wait; what is the same counts as often as it was asked for."""
        return sum(lane.inputs for lane in self._lanes.values())

    @property
    def tokens(self) -> int:
        return sum(lane.tokens for lane in self._lanes.values())

    @property
    def runnable(self) -> bool:
        """Whether something waits that a compiled bucket holds."""
        return any(lane.order for lane in self._lanes.values())

    @property
    def is_asked(self) -> bool:
        """Whether some of that is interactive."""
        return bool(self._interactive.order)

    def is_bulk_alone(self, now: float) -> bool:
        """Whether something waits, and nothing interactive has come of late."""
        return self.runnable and not self.is_asked and now - self._interactive_at > ABOUT_S

    @property
    def needed_length(self) -> int | None:
        """The least row of the oldest sequence that fits no compiled bucket."""
        return next((f.parked[0].least_row for f in self._flows.values() if f.parked), None)

    def inputs_of(self, priority: Priority) -> int:
        return self._lanes[priority].inputs

    def tokens_of(self, priority: Priority) -> int:
        return self._lanes[priority].tokens

    def oldest_of(self, priority: Priority) -> float | None:
        """When the oldest request of a lane that still waits was queued, by time.monotonic()."""
        lane = self._lanes[priority]
        if not lane.inputs:
            return None
        return next((f.ticket.queued_at for f in self._flows.values() if f.lane is lane), None)

    def add(self, ticket: Ticket, priority: Priority | None = None) -> None:
        """Queue a ticket's entries and let the ticket forget them: they point back."""
        inputs, tokens = len(ticket.work), ticket.work.tokens
        lane = self._lanes[priority or self._priority(inputs, tokens)]
        if lane is self._interactive:
            self._interactive_at = ticket.queued_at
        entries = [self._joined(ticket, entry) for entry in ticket.entries]
        ticket.entries = []
        ready = [entry for entry in entries if entry.least_row <= self._longest]
        parked = [entry for entry in entries if entry.least_row > self._longest]
        self._number += 1
        flow = Flow(ticket, lane, self._number, lane.clock, ready[::-1], parked, inputs, tokens)
        self._flows[ticket] = flow
        lane.inputs += inputs
        lane.tokens += tokens
        lane.insert(flow)

    def cancel(self, ticket: Ticket) -> None:
        """Forget what waits of a ticket; what others asked for as well stays."""
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
        """Buckets with rows of this length are compiled."""
        self._longest = longest
        for flow in self._flows.values():
            ready = [entry for entry in flow.parked if entry.least_row <= longest]
            if ready:
                flow.lane.remove(flow)
                if not flow.entries:  # rest earns no credit
                    flow.start = max(flow.start, flow.lane.clock)
                flow.parked = [entry for entry in flow.parked if entry.least_row > longest]
                flow.entries[:0] = ready[::-1]
                flow.lane.insert(flow)

    def clear(self) -> Iterable[Entry]:
        """Forget all that waits, and return it."""
        waiting = self._waiting.values()
        self._flows, self._waiting = {}, {}
        for lane in self._lanes.values():
            lane.inputs = lane.tokens = lane._looked_at = 0
            lane.order = []
        return waiting

    def take(
        self, cost: Mapping[Bucket, float], now: float, most: int | None = None
    ) -> Batch | None:
        """The batch to run next, of at most so many sequences; None if nothing waits that a bucket
        holds. `cost` gives the measured milliseconds of every bucket that may be used.

        The lane that has had less of its share leads: its entries decide on the bucket, and the
        first of them is in the batch. What room is left the other lane fills; interactive entries
        come first wherever they fit.
        """
        while self.runnable:
            lead = min((lane for lane in self._lanes.values() if lane.order), key=self._begin)
            enough = LOOKED_AT * max(bucket.tokens for bucket in cost)
            if window := list(lead.look(enough))[:most]:
                batch = self._compose(lead, window, cost, now, most)
                self._clock = self._begin(lead)
                lead.end = self._clock + cost[batch.bucket] / lead.share
                self._remove(batch)
                return batch
            lead.settle({})  # all of it was taken through other requests
        return None

    def _compose(
        self,
        lead: Lane,
        window: list[Entry],
        cost: Mapping[Bucket, float],
        now: float,
        most: int | None,
    ) -> Batch:
        brief = lead is self._bulk and now - self._interactive_at < ABOUT_S
        bucket = choose_bucket(window, cost, brief)
        other = self._bulk if lead is self._interactive else self._interactive
        chosen = set(window)
        beside = [e for e in other.look(LOOKED_AT * bucket.tokens) if e not in chosen]
        first, rest = window[:1], window[1:]
        groups = (first, rest, beside) if lead is self._interactive else (first, beside, rest)
        return place(bucket, *groups, most=most)

    def _remove(self, batch: Batch) -> None:
        had: dict[Flow, int] = {}
        for entry in batch.entries:
            entry.taken = True
            for ticket, index in entry.claims.items():
                flow, count = self._flows[ticket], len(index)
                flow.inputs -= count
                flow.tokens -= count * entry.length
                flow.lane.inputs -= count
                flow.lane.tokens -= count * entry.length
                had[flow] = had.get(flow, 0) + entry.length
        for lane in self._lanes.values():
            lane.settle(had)
        for flow in had:
            if not flow.inputs:
                del self._flows[flow.ticket]
        for entry in batch.entries:  # at the end: `clear` still finds them if anything fails here
            del self._waiting[entry.key]

    def _joined(self, ticket: Ticket, entry: Entry) -> Entry:
        """The entry, or the one that waits already for the same answer."""
        twin = self._waiting.setdefault(entry.key, entry)
        if twin is not entry:
            twin.claims[ticket] = entry.claims[ticket]
        return twin

    def _priority(self, inputs: int, tokens: int) -> Priority:
        small = inputs <= INTERACTIVE_INPUTS and tokens <= self._most_interactive
        return "interactive" if small else "bulk"

    def _begin(self, lane: Lane) -> float:
        """Where the lane's next batch begins on the clock; rest earns no credit."""
        return max(self._clock, lane.end)
