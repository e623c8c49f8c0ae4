"""Defines the future of a request, its queued sequences, and the answers of a batch.

A queued sequence may belong to several futures; `Answers` writes its answer into all of them. A
sequence has a slot for each vector that is pooled from it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import repeat
from typing import Any

import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.work import Ragged, Work, WorkResult, empty_result
from jaxembed.engine.bucket import least_row
from jaxembed.errors import Cancelled, NotFinite
from jaxembed.observability.tracing import TicketTrace

logger = logging.getLogger(__name__)

# The key of a sequence of at most this many tokens holds the tokens instead of a digest. That takes
# a tenth of the time.
MOST_KEY_TOKENS = 32

Index = Sequence[int] | np.ndarray  # indices of sequences in a request
Key = tuple[bytes, int, int, int, int]  # equal for sequences that have the same answer
Values = Mapping[OutputName, Any]  # an array for outputs per slot, a list of arrays for others


class Ticket:
    """The future of one request. It is complete when every sequence is answered or has failed.

    `result` waits for that. Engine threads write the answers into `values`, outputs by name.
    `queue_s` and `inference_s` are the seconds for which each sequence waited and was computed.
    """

    def __init__(
        self,
        work: Work,
        widths: Mapping[OutputName, int],
        wake: Callable[[], object] | None = None,
        trace: TicketTrace | None = None,
    ):
        """Make the sequences to queue, and the empty answer, of a request.

        `widths` are the numbers of columns of the model's outputs. `wake` is called once, from the
        thread that completes the future; not if it was cancelled before. `trace` belongs to a
        traced request.
        """
        ids, types, bounds = work.planes["ids"], work.planes.get("types"), work.bounds
        pixels = work.planes.get("pixels")
        spans = bounds.tolist()
        count = len(work.lengths)
        fillers = repeat(0, count) if work.fillers is None else work.fillers.tolist()
        columns = zip(work.lengths.tolist(), work.slots.tolist(), fillers, strict=True)
        self.work = work
        self.trace = trace
        self.values = empty_result(work, widths)
        self.queue_s = np.zeros(count)
        self.inference_s = np.zeros(count)
        self.queued_at = time.monotonic()
        self.inputs, self.tokens = count, work.tokens  # of `entries`, duplicates included
        self.withdrawn = 0  # number of inputs that `withdraw` removed
        self.interactive = False  # whether it was queued with the priority "interactive"
        self.cancelled = False
        self._failures: dict[int, Exception] = {}
        self._settled = np.zeros(count, bool)  # whether a sequence is answered or has failed
        self._open = count  # number of sequences that are not
        self._wake = wake
        self._done = threading.Event()
        self._lock = threading.Lock()
        # equal sequences are queued once
        entry_of: dict[Key, Entry] = {}
        start = first = 0
        for index, (length, slots, filling) in enumerate(columns):
            end = start + length
            is_whole = slots == 1 and spans[first] == [0, length]
            entry = Entry(
                self,
                index,
                ids[start:end],
                None if types is None else types[start:end],
                None if is_whole else bounds[first : first + slots],
                filling,
                None if pixels is None else pixels[start:end],
            )
            start, first = end, first + slots
            first_equal = entry_of.setdefault(entry.key, entry)
            if first_equal is not entry:
                first_equal.claims[self].append(index)
        self.entries = list(entry_of.values())

    def withdraw(self, entries: "Iterable[Entry]") -> None:
        """Remove some sequences before the future is queued. The caller must answer them."""
        removed = set(entries)
        if removed:
            self.entries = [entry for entry in self.entries if entry not in removed]
            for entry in removed:
                inputs = len(entry.claims[self])
                self.inputs -= inputs
                self.withdrawn += inputs
                self.tokens -= inputs * entry.length

    def answer(self, index: Index, values: Values) -> None:
        """Write the answers of the sequences at the indices `index`, which are all different.

        `values` has an array `[slots of these sequences, width]` for each output per slot,
        SparseRows for a sparse output, and a list with the array of each sequence for each output
        per token.
        """
        places = index  # indices of the slots of these sequences among all slots of the request
        if self.work.has_spans:
            slots = self.work.slots
            places = flat_ranges((np.cumsum(slots) - slots)[index], slots[index])
        for name, column in self.values.items():
            if isinstance(column, Ragged):
                for i, rows in zip(index, values[name], strict=True):
                    column[i][:] = rows
            else:
                column[places] = values[name]
        self._settle(index)

    def fail(self, index: list[int], error: Exception) -> None:
        """Fail the sequences at the indices `index`, except those that have an answer already."""
        with self._lock:
            self._failures.update((i, error) for i in index if not self._settled[i])
        self._settle(index)

    def cancel(self) -> bool:
        """Mark the future as cancelled by its client. Returns False if it was already complete."""
        with self._lock:
            if self._done.is_set():
                return False
            self.cancelled = True
            self._done.set()
            return True

    def _settle(self, index: Index) -> None:
        """Mark sequences as answered or failed; after the last one, complete and call `wake`."""
        with self._lock:
            was_settled = self._settled[index]
            new_count = len(was_settled) - int(np.count_nonzero(was_settled))
            self._settled[index] = True
            self._open -= new_count
            completes = new_count > 0 and self._open == 0 and not self.cancelled
        if completes:
            self._done.set()
            if self._wake is not None:
                try:
                    self._wake()
                except Exception:  # other futures of the batch still need their answers
                    logger.exception("a waiter could not be woken")

    def result(self, timeout_s: float | None = None) -> WorkResult:
        """Wait for the answer, and return it: an array, SparseRows or a Ragged for each output.

        Raises the error of the first input that failed, Cancelled if the request was cancelled, or
        TimeoutError after `timeout_s` seconds.
        """
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        if self.cancelled:
            raise Cancelled("the request was cancelled")
        if self._failures:
            raise self._failures[min(self._failures)]
        return self.values


class Entry:
    """A sequence that waits for a place in a batch.

    `claims` has the indices of the sequence in the request of each future that needs it. `taken` is
    set when the sequence is in a batch; then no other future may be added. `ids` and `types` are
    int32 `[length]`, views of the columns of the work; `types` is None if all are zero. `spans` is
    int32 `[slots, 2]`, or None if all tokens are pooled together. `adapter` is the number of the
    tokens' adapter. The last `fillers` tokens are augmentation tokens of a query. `pixels` is int32
    `[length, words]`, or None for text. `least_row` is the shortest row length that holds it.
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
        self.least_row = length if slots == 1 else least_row(length, slots)
        self.adapter = adapter = ticket.work.adapter
        self.fillers = fillers
        self.pixels = pixels
        self.taken = False
        # The key of a short sequence holds its tokens. Other keys have a digest, so that the tokens
        # are not in memory twice. The digest is cryptographic, so no client can make two sequences
        # with the same key. The number of spans tells where the types end and the spans begin.
        planes = [plane for plane in (types, spans, pixels) if plane is not None]
        if length <= MOST_KEY_TOKENS and not planes:
            content = ids.tobytes()
        else:
            digest = blake2b(ids.data, digest_size=16)
            for plane in planes:
                digest.update(plane.tobytes())
            content = digest.digest()
        self.key: Key = content, length, 0 if spans is None else slots, adapter, fillers

    @property
    def outputs(self) -> set[OutputName]:
        """The names of all outputs that its futures need."""
        return set().union(*(ticket.work.outputs for ticket in self.claims))


@dataclass(frozen=True)
class Answers:
    """The result of a run for some sequences: `values`, or an `error` for all of the sequences.

    `values` has an array `[slots of all sequences, width]` for each output per slot, SparseRows for
    a sparse output, and a list with the array of each sequence for each output per token. They are
    views of the output of the whole batch: copy what is kept.
    """

    entries: Sequence[Entry]
    values: Values = field(default_factory=dict)
    error: Exception | None = None

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The first slot of each sequence among all slots, and its number of slots.

        Both are int arrays `[sequences]`. None if each sequence has one slot.
        """
        if all(entry.slots == 1 for entry in self.entries):
            return None
        counts = np.array([entry.slots for entry in self.entries])
        return np.cumsum(counts) - counts, counts

    def values_of(self, chosen: Sequence[int], outputs: Iterable[OutputName]) -> Values:
        """Return the values of these outputs for the sequences at indices `chosen`, in order."""
        places: Sequence[int] | np.ndarray = chosen
        if self.slots is not None:
            first, counts = self.slots
            places = flat_ranges(first[chosen], counts[chosen])
        of_all: dict[OutputName, Any] = {name: self.values[name] for name in outputs}
        return {
            name: values[places] if OUTPUTS[name].per == "slot" else [values[k] for k in chosen]
            for name, values in of_all.items()
        }

    def settle(self, started_at: float, seconds: float) -> None:
        """Write the answers, or the error, into the futures of all sequences.

        `started_at` is the time.monotonic() at which the batch started, and `seconds` its duration.
        """
        by_ticket: dict[Ticket, tuple[list[int], list[int]]] = {}
        for k, entry in enumerate(self.entries):
            for ticket, index in entry.claims.items():
                chosen, places = by_ticket.setdefault(ticket, ([], []))
                chosen += [k] * len(index)
                places += index
        for ticket, (chosen, places) in by_ticket.items():
            at = np.array(places)
            ticket.queue_s[at] = started_at - ticket.queued_at
            ticket.inference_s[at] = seconds
            if self.error is None:
                ticket.answer(at, self.values_of(chosen, ticket.work.outputs))
            elif isinstance(self.error, NotFinite):  # the error of a single input: name the input
                ticket.fail(places, NotFinite(f"input {min(places)}: {self.error}"))
            else:
                ticket.fail(places, self.error)


def fail_entries(entries: Iterable[Entry], error: Exception) -> None:
    """Fail the sequences in every future that needs them."""
    for entry in entries:
        for ticket, index in entry.claims.items():
            ticket.fail(index, error)


def flat_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the integers `first[k]`, ..., `first[k] + counts[k] - 1` for each k, concatenated."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(first - offsets, counts) + np.arange(int(counts.sum()))
