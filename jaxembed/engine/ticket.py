"""Holds one request in the engine: its sequences, its answer and the callback of its client."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import Any

import numpy as np

from jaxembed.data.outputs import OutputName
from jaxembed.data.work import Ragged, SparseRows, Work, WorkResult, empty_result
from jaxembed.engine.bucket import least_row
from jaxembed.errors import Cancelled
from jaxembed.observability.tracing import TicketTrace

logger = logging.getLogger(__name__)

# Tokens of a sequence up to which its key holds the tokens instead of a digest: it takes a tenth of
# the time.
MOST_KEY_TOKENS = 32

Index = Sequence[int] | np.ndarray | slice  # of sequences of a request
Key = tuple[bytes, int, int, int, int]  # equal for sequences that have the same answer


class Ticket:
    """The answer to one request. It is complete when every sequence was answered or has failed.

    `result` waits for it. Threads of the engine fill in the `values`: an array for each output of
    the work.
    """

    def __init__(
        self,
        work: Work,
        widths: Mapping[OutputName, int],
        wake: Callable[[], object] | None = None,
        trace: TicketTrace | None = None,
    ):
        """Make the entries and the empty answer of a request.

        `widths` are the numbers of columns of the model's outputs. `wake` is called once, from an
        engine thread, when the ticket is complete; not if it was cancelled before. `trace` is that
        of a request that is traced.
        """
        count = len(work)
        self.work = work
        self.trace = trace
        self.values = empty_result(work, widths)
        self.queue_s = np.zeros(count)
        self.inference_s = np.zeros(count)
        self.queued_at = time.monotonic()
        self.entries = _entries(self)
        self.inputs, self.tokens = count, work.tokens  # of the entries; duplicates count each time
        self.interactive = False  # whether it was queued in that lane
        self.cancelled = False
        self._failures: dict[int, Exception] = {}
        self._settled = np.zeros(count, bool)  # sequences that are answered or failed
        self._open = count  # how many are not
        self._wake = wake
        self._done = threading.Event()
        self._lock = threading.Lock()

    @property
    def error(self) -> Exception | None:
        """The error of the first input in order that failed; None if none did."""
        return self._failures[min(self._failures)] if self._failures else None

    @property
    def withdrawn(self) -> int:
        """The number of inputs that were withdrawn."""
        return len(self.work) - self.inputs

    def withdraw(self, entries: "Iterable[Entry]") -> None:
        """Take out some of the entries before the ticket is queued. They must still be answered."""
        taken = set(entries)
        if taken:
            self.entries = [entry for entry in self.entries if entry not in taken]
            for entry in taken:
                inputs = len(entry.claims[self])
                self.inputs -= inputs
                self.tokens -= inputs * entry.length

    def answer(self, index: Index, values: Mapping[OutputName, Any]) -> None:
        """Write the answers of the sequences at `index`, which are all different.

        `values` has an array `[slots of these sequences, width]` for each output per slot,
        SparseRows of a sparse one, and a list with the array of each sequence for each output per
        token.
        """
        for name, column in self.values.items():
            if isinstance(column, SparseRows):
                column.put(self._numbers(self._slots_of(index)), values[name])
            elif isinstance(column, Ragged):
                for i, rows in zip(self._numbers(index), values[name], strict=True):
                    column[i][:] = rows
            else:
                column[self._slots_of(index)] = values[name]
        self._settle(index)

    def _numbers(self, index: Index) -> Sequence[int] | np.ndarray:
        return range(*index.indices(len(self.work))) if isinstance(index, slice) else index

    def _slots_of(self, index: Index) -> Index:
        """The numbers of the slots of these sequences among all slots of the request."""
        slots = self.work.slots
        if not self.work.has_spans:
            return index
        return flat_ranges((np.cumsum(slots) - slots)[index], slots[index])

    def fail(self, index: list[int], error: Exception) -> None:
        """Fail the sequences at `index` that have no answer yet. The others still run."""
        with self._lock:
            self._failures.update((i, error) for i in index if not self._settled[i])
        self._settle(index)

    def cancel(self) -> bool:
        """Mark the ticket as abandoned by its client. Returns False if it was already complete."""
        with self._lock:
            if self._done.is_set():
                return False
            self.cancelled = True
            self._done.set()
            return True

    def _settle(self, index: Index) -> None:
        """Note that these sequences are answered or failed; the last ones complete the ticket."""
        with self._lock:
            before = self._settled[index]
            newly = len(before) - int(np.count_nonzero(before))
            self._settled[index] = True
            self._open -= newly
            last = newly > 0 and self._open == 0 and not self.cancelled
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
        """Wait for the answer and return it: an array or a Ragged for each output.

        Raises the error of the first input that failed, Cancelled, or TimeoutError after
        `timeout_s` seconds.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        if self.cancelled:
            raise Cancelled("the request was cancelled")
        if self.error is not None:
            raise self.error
        return self.values


class Entry:
    """One sequence that waits for a place in a batch.

    `claims` has the index of the sequence in each ticket that asked for it, several times if it
    occurs several times. `taken` is set when the entry is in a batch: then no ticket may join.
    `ids` and `types` are int32 `[length]`, views of the columns of the work; `types` is None if all
    are zero. `spans` is int32 `[slots, 2]`, or None if all tokens are pooled together. `adapter` is
    the number of the adapter that the tokens take, and the last `fillers` tokens fill up a query.
    `pixels` is int32 `[length, words]`, or None for text.
    """

    __slots__ = (
        "adapter",
        "claims",
        "fillers",
        "ids",
        "key",
        "least_row",
        "length",
        "pixels",
        "slots",
        "spans",
        "taken",
        "types",
    )

    def __init__(
        self,
        ticket: Ticket,
        index: int,
        ids: np.ndarray,
        types: np.ndarray | None,
        spans: np.ndarray | None,
        fillers: int = 0,
        pixels: np.ndarray | None = None,
    ):
        self.claims: dict[Ticket, list[int]] = {ticket: [index]}
        self.ids = ids
        self.types = types
        self.spans = spans
        self.length = length = len(ids)
        self.slots = slots = 1 if spans is None else len(spans)
        self.least_row = least_row(length, slots)
        self.adapter = adapter = ticket.work.adapter
        self.fillers = fillers
        self.pixels = pixels
        self.key = _key(ids, types, spans, adapter, fillers, pixels)
        self.taken = False

    @property
    def outputs(self) -> set[OutputName]:
        """All outputs that the tickets asked for."""
        return set().union(*(ticket.work.outputs for ticket in self.claims))


def flat_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The integers from `first[k]` to `first[k] + counts[k] - 1` for each k, concatenated."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()))


def _entries(ticket: Ticket) -> list[Entry]:
    """Make an entry for each different sequence of a ticket."""
    work = ticket.work
    ids, types, bounds = work.planes["ids"], work.planes.get("types"), work.bounds
    pixels = work.planes.get("pixels")
    entry_of: dict[Key, Entry] = {}
    start = first = 0
    spans = bounds.tolist()
    fillers = repeat(0, len(work)) if work.fillers is None else work.fillers.tolist()
    columns = zip(work.lengths.tolist(), work.slots.tolist(), fillers, strict=True)
    for index, (length, slots, filling) in enumerate(columns):
        end = start + length
        is_whole = slots == 1 and spans[first] == [0, length]
        entry = Entry(
            ticket,
            index,
            ids[start:end],
            None if types is None else types[start:end],
            None if is_whole else bounds[first : first + slots],
            filling,
            None if pixels is None else pixels[start:end],
        )
        start, first = end, first + slots
        twin = entry_of.setdefault(entry.key, entry)
        if twin is not entry:
            twin.claims[ticket].append(index)
    return list(entry_of.values())


def _key(
    ids: np.ndarray,
    types: np.ndarray | None,
    spans: np.ndarray | None,
    adapter: int,
    fillers: int,
    pixels: np.ndarray | None = None,
) -> Key:
    """A key that is equal for sequences with the same tokens, types, spans, adapter, fillers and
    pixels.

    It holds the tokens of a short sequence. For others it holds a digest, because the tokens would
    be in memory twice; the digest is cryptographic, so no client can make two sequences share one.
    """
    length, slots = len(ids), 0 if spans is None else len(spans)
    if length <= MOST_KEY_TOKENS and types is None and spans is None and pixels is None:
        return ids.tobytes(), length, slots, adapter, fillers
    digest = blake2b(ids.data, digest_size=16)
    if types is not None:
        digest.update(types.data)
    if spans is not None:
        digest.update(spans.tobytes())
    if pixels is not None:  # as a model of images has for every sequence, and no other model
        digest.update(pixels.tobytes())
    # the number of spans tells where the types end and the spans begin
    return digest.digest(), length, slots, adapter, fillers
