"""One request in the engine: its answer, filled sequence by sequence, and who waits for it."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from jaxembed.engine.bucket import least_row
from jaxembed.errors import Cancelled
from jaxembed.outputs import OutputName
from jaxembed.work import Ragged, Work, WorkResult, empty_result

logger = logging.getLogger(__name__)

KEPT_TWICE = 32  # tokens: to look at them takes a tenth of the time of a digest

Key = tuple[bytes, int, bytes]  # equal for sequences that have the same answer


class Ticket:
    """The answer to one request, complete when every sequence is answered or one has failed.

    `result` has an array for each output of the work. `wake` is called once, from an engine
    thread, when the ticket is complete.
    """

    def __init__(
        self,
        work: Work,
        widths: Mapping[OutputName, int],
        wake: Callable[[], object] | None = None,
    ):
        """`widths` are those of the outputs, in floats."""
        count = len(work)
        self.work = work
        self.values = empty_result(work, widths)
        self.queue_s = np.zeros(count)
        self.inference_s = np.zeros(count)
        self.queued_at = time.monotonic()
        self.entries = _entries(self)
        self.cancelled = False
        self._failures: dict[int, Exception] = {}
        self._open = np.ones(count, bool)  # not settled yet
        self._wake = wake
        self._done = threading.Event()
        self._lock = threading.Lock()

    @property
    def error(self) -> Exception | None:
        """The failure of the first input that has one, in input order."""
        return self._failures[min(self._failures)] if self._failures else None

    def answer(self, index: Sequence[int] | np.ndarray, values: Mapping[OutputName, Any]) -> None:
        """Take the answers of the sequences at `index`, which are all different. Of an output by
        slots `values` has an array `[all slots of these, width]`, of one by tokens an array for
        each sequence."""
        for name, column in self.values.items():
            if isinstance(column, Ragged):
                for i, rows in zip(index, values[name], strict=True):
                    column[i][:] = rows
            else:
                column[self._slots_of(index)] = values[name]
        self._settle(index)

    def _slots_of(self, index: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        slots = self.work.slots
        if not self.work.has_spans:
            return index
        return flat_ranges((np.cumsum(slots) - slots)[index], slots[index])

    def fail(self, index: list[int], error: Exception) -> None:
        """These sequences, if they have no answer yet, will have none. The others still run."""
        with self._lock:
            self._failures.update((i, error) for i in index if self._open[i])
        self._settle(index)

    def cancel(self) -> bool:
        """Nobody waits any more. False if the ticket was complete already."""
        with self._lock:
            if self._done.is_set():
                return False
            self.cancelled = True
            self._done.set()
            return True

    def _settle(self, index: Sequence[int] | np.ndarray) -> None:
        with self._lock:
            were_open = bool(self._open[index].any())
            self._open[index] = False
            last = were_open and not self._open.any() and not self.cancelled
        if last:
            self._done.set()
            self._call_wake()

    def _call_wake(self) -> None:
        if self._wake is not None:
            try:
                self._wake()
            except Exception:  # other tickets of the batch are not settled yet
                logger.exception("a waiter could not be woken")

    def result(self, timeout_s: float | None = None) -> WorkResult:
        """Wait for the answer. Raises its error, Cancelled, or TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        if self.cancelled:
            raise Cancelled("the request was cancelled")
        if self.error is not None:
            raise self.error
        return self.values


class Entry:
    """One sequence that waits for a place in a batch, and whose answer it is: `claims` gives the
    places in each ticket that asked for it. Once it is `taken` nobody may join.

    Its tokens lie in the planes of `work` from `start` on, its bounds from `first_bound` on.
    """

    __slots__ = (
        "claims",
        "first_bound",
        "key",
        "least_row",
        "length",
        "slots",
        "start",
        "taken",
        "work",
    )

    def __init__(
        self, ticket: Ticket, index: int, start: int, length: int, first_bound: int, slots: int
    ):
        self.claims: dict[Ticket, list[int]] = {ticket: [index]}
        self.work = ticket.work
        self.start = start
        self.length = length
        self.first_bound = first_bound
        self.slots = slots
        self.least_row = least_row(length, slots)
        self.key = _key(self)
        self.taken = False

    @property
    def outputs(self) -> set[OutputName]:
        """All outputs that somebody asked for."""
        return set().union(*(ticket.work.outputs for ticket in self.claims))

    @property
    def ids(self) -> np.ndarray:
        """Its token ids, int32 `[length]`."""
        return self.work.planes["ids"][self.start : self.start + self.length]

    @property
    def types(self) -> np.ndarray | None:
        """Its token types, int32 `[length]`; None where all are zero."""
        types = self.work.planes.get("types")
        return None if types is None else types[self.start : self.start + self.length]

    @property
    def bounds(self) -> np.ndarray:
        """Its bounds, int32 `[slots, 2]`."""
        return self.work.bounds[self.first_bound : self.first_bound + self.slots]


def flat_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers `first[k]` to `first[k] + counts[k] - 1` for each k, one after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _entries(ticket: Ticket) -> list[Entry]:
    """An entry for each sequence that is unlike the others."""
    work = ticket.work
    found: dict[Key, Entry] = {}
    start = first_bound = 0
    columns = zip(work.lengths.tolist(), work.slots.tolist(), strict=True)
    for index, (length, slots) in enumerate(columns):
        entry = Entry(ticket, index, start, length, first_bound, slots)
        start, first_bound = start + length, first_bound + slots
        twin = found.setdefault(entry.key, entry)
        if twin is not entry:
            twin.claims[ticket].append(index)
    return list(found.values())


def _key(entry: Entry) -> Key:
    """The tokens of a short sequence. A digest of others, for tokens of all that waits would be
    kept twice; nobody can make two texts share one."""
    ids, types, length = entry.ids, entry.types, entry.length
    if length <= KEPT_TWICE and types is None and entry.slots == 1:
        return ids.tobytes(), length, entry.bounds.tobytes()
    digest = blake2b(ids.data, digest_size=16)
    if types is not None:
        digest.update(types.data)
    if entry.slots == 1:
        return digest.digest(), length, entry.bounds.tobytes()
    digest.update(entry.bounds.tobytes())
    # the count tells where the types end and the bounds begin
    return digest.digest(), length, entry.slots.to_bytes(4, "little")
