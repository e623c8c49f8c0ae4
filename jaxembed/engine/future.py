"""Defines the future of a request, its queued sequences, and the answers of a batch.

A queued sequence may belong to several futures; `Answers` writes the answer into all of these. A
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
from jaxembed.engine.bucket import min_row
from jaxembed.errors import Cancelled, NotFinite
from jaxembed.observability.tracing import FutureTrace

logger = logging.getLogger(__name__)

# The key of a sequence of at most this many tokens holds the tokens instead of a digest, because to
# copy them takes a tenth of the time of a digest.
MAX_KEY_TOKENS = 32

Index = slice | np.ndarray  # selects sequences of a request
Key = tuple[bytes, int, int, int, int]  # equal for sequences that have the same answer
# outputs by name: an array for an output per slot, a list of arrays for an output per token
Values = Mapping[OutputName, Any]


class WorkFuture:
    """The future of one request. It is complete when every sequence is answered or has failed.

    `result` waits until the future is complete. Engine threads write the answers into `values`,
    which has the outputs by name. `queue_s` and `inference_s` are the seconds for which each
    sequence waited and was computed.
    """

    def __init__(
        self,
        work: Work,
        widths: Mapping[OutputName, int],
        wake: Callable[[], object] | None = None,
        trace: FutureTrace | None = None,
    ):
        """Make the sequences to queue, and the empty answer, of a request.

        `widths` are the numbers of columns of the model's outputs. `wake` is called once, from the
        thread that completes the future; a cancelled future does not call it. `trace` belongs to a
        traced request.
        """
        ids, types, bounds = work.planes["ids"], work.planes.get("types"), work.bounds
        pixels = work.planes.get("pixels")
        spans = bounds.tolist()
        count = len(work.lengths)
        augmentation_tokens = (
            repeat(0, count)
            if work.augmentation_tokens is None
            else work.augmentation_tokens.tolist()
        )
        sizes = zip(work.lengths.tolist(), work.slots.tolist(), augmentation_tokens, strict=True)
        self.work = work
        self.trace = trace
        self.values = empty_result(work, widths)
        self.queue_s = np.zeros(count)
        self.inference_s = np.zeros(count)
        self.queued_at = time.monotonic()
        # numbers of inputs and tokens of `sequences`; equal inputs count as often as they occur
        self.inputs, self.tokens = count, work.tokens
        self.cached_inputs = 0  # number of inputs that `withdraw` removed
        self.interactive = False  # whether it was queued with the priority "interactive"
        self.cancelled = False
        self._failures: dict[int, Exception] = {}
        self._resolved = np.zeros(count, bool)  # whether a sequence is answered or has failed
        self._open = count  # number of sequences that are not resolved
        self._wake = wake
        self._is_complete = False
        # held until the future is complete; to make an Event takes longer
        self._waits = threading.Lock()
        self._waits.acquire()
        self._lock = threading.Lock()
        # equal sequences become one queued sequence, with the indices of all of them
        sequence_of: dict[Key, QueuedSequence] = {}
        token = slot = 0
        for index, (length, slots, augmented) in enumerate(sizes):
            end = token + length
            is_whole = slots == 1 and spans[slot] == [0, length]  # pools all tokens
            sequence = QueuedSequence(
                self,
                index,
                ids[token:end],
                None if types is None else types[token:end],
                None if is_whole else bounds[slot : slot + slots],
                augmented,
                None if pixels is None else pixels[token:end],
            )
            token, slot = end, slot + slots
            first_equal = sequence_of.setdefault(sequence.key, sequence)
            if first_equal is not sequence:
                first_equal.futures[self].append(index)
        self.sequences = list(sequence_of.values())

    def withdraw(self, sequences: "Iterable[QueuedSequence]") -> None:
        """Remove some sequences before the future is queued. The caller must answer these."""
        removed = set(sequences)
        if removed:
            self.sequences = [sequence for sequence in self.sequences if sequence not in removed]
            for sequence in removed:
                inputs = len(sequence.futures[self])
                self.inputs -= inputs
                self.cached_inputs += inputs
                self.tokens -= inputs * sequence.length

    def answer(self, index: Index, values: Values) -> None:
        """Write the answers of the sequences that `index` selects, which are all different.

        `values` has one value for each output, by name. The value of an output per slot is an array
        `[slots of these sequences, width]`, that of a sparse output is SparseRows, and that of an
        output per token is a list with the array of each sequence.
        """
        slot_indices = index  # indices of these sequences' slots among all slots of the request
        if self.work.has_spans:
            slots = self.work.slots
            slot_indices = concatenated_ranges((np.cumsum(slots) - slots)[index], slots[index])
        for name, result in self.values.items():
            if isinstance(result, Ragged):
                chosen = np.arange(len(self._resolved))[index]
                for i, rows in zip(chosen.tolist(), values[name], strict=True):
                    result[i][:] = rows
            else:
                result[slot_indices] = values[name]
        self._resolve(index)

    def fail(self, index: list[int], error: Exception) -> None:
        """Fail the sequences at the indices `index`, except those that have an answer already."""
        with self._lock:
            self._failures.update((i, error) for i in index if not self._resolved[i])
        self._resolve(np.array(index))

    def cancel(self) -> bool:
        """Mark the future as cancelled by its client. Returns False if it was already complete."""
        with self._lock:
            if self._is_complete:
                return False
            self.cancelled = self._is_complete = True
            self._waits.release()
            return True

    def _resolve(self, index: Index) -> None:
        """Mark the sequences that `index` selects as answered or failed; after the last one, call
        `wake`."""
        with self._lock:
            was_resolved = self._resolved[index]
            new_count = len(was_resolved) - int(np.count_nonzero(was_resolved))
            self._resolved[index] = True
            self._open -= new_count
            completes = new_count > 0 and self._open == 0 and not self.cancelled
            if completes:
                self._is_complete = True
                self._waits.release()
        if completes and self._wake is not None:
            try:
                self._wake()
            except Exception:  # other futures of the batch still need their answers
                logger.exception("the callback of an answered request failed")

    def result(self, timeout_s: float | None = None) -> WorkResult:
        """Wait for the answer, and return it: an array, SparseRows or Ragged by name of the output.

        Raises the error of the first input that failed, Cancelled if the request was cancelled, or
        TimeoutError after `timeout_s` seconds.
        """
        if not self._is_complete:
            if not self._waits.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0.0)):
                raise TimeoutError(f"no answer within {timeout_s} s")
            self._waits.release()  # for other threads that wait
        if self.cancelled:
            raise Cancelled("the request was cancelled")
        if self._failures:
            raise self._failures[min(self._failures)]
        return self.values


class QueuedSequence:
    """A sequence that waits for a place in a batch.

    `futures` maps each future that needs the sequence to the sequence's indices in its request.
    `taken` is set when the sequence is in a batch; then no other future may be added. `ids` and
    `types` are int32 `[length]`, views of `work.planes`; `types` is None if all types are zero.
    `spans` is int32 `[slots, 2]`, or None if all tokens are pooled together. `adapter` is the index
    of the adapter of these tokens. The last `augmentation_tokens` tokens are augmentation tokens of
    a query. `pixels` is int32 `[length, words]`, or None for text. `min_row` is the length of the
    shortest row that holds the sequence.
    """

    __slots__ = (
        "adapter",
        "augmentation_tokens",
        "futures",
        "ids",
        "key",
        "length",
        "min_row",
        "pixels",
        "slots",
        "spans",
        "taken",
        "types",
    )

    def __init__(
        self,
        future: WorkFuture,
        index: int,
        ids: np.ndarray,
        types: np.ndarray | None,
        spans: np.ndarray | None,
        augmentation_tokens: int = 0,
        pixels: np.ndarray | None = None,
    ):
        self.futures: dict[WorkFuture, list[int]] = {future: [index]}
        self.ids = ids
        self.types = types
        self.spans = spans
        self.length = length = len(ids)
        self.slots = slots = 1 if spans is None else len(spans)
        self.min_row = length if slots == 1 else min_row(length, slots)
        self.adapter = adapter = future.work.adapter
        self.augmentation_tokens = augmentation_tokens
        self.pixels = pixels
        self.taken = False
        # The key of a short sequence holds its tokens. Other keys have a digest, so that the tokens
        # are not in memory twice. The digest is cryptographic, so no client can make two different
        # sequences with the same key. The key has the number of spans because types and spans are
        # digested one after the other: without it, different types and spans could give the same
        # bytes.
        planes = [plane for plane in (types, spans, pixels) if plane is not None]
        if length <= MAX_KEY_TOKENS and not planes:
            content = ids.tobytes()
        else:
            digest = blake2b(ids.data, digest_size=16)
            for plane in planes:
                digest.update(plane.tobytes())
            content = digest.digest()
        self.key: Key = content, length, 0 if spans is None else slots, adapter, augmentation_tokens

    @property
    def outputs(self) -> set[OutputName]:
        """The names of all outputs that the futures of the sequence need."""
        return set().union(*(future.work.outputs for future in self.futures))


@dataclass(frozen=True)
class Answers:
    """The result of a run for some sequences: `values`, or an `error` for all of the sequences.

    `values` has one value for each output, by name. The value of an output per slot is an array
    `[slots of all sequences, width]`, that of a sparse output is SparseRows, and that of an output
    per token is a list with the array of each sequence. The arrays are views of the output of the
    whole batch: copy what is kept.
    """

    sequences: Sequence[QueuedSequence]
    values: Values = field(default_factory=dict)
    error: Exception | None = None

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The index of each sequence's first slot among all slots, and each sequence's number of
        slots: two int arrays `[sequences]`. None if each sequence has one slot."""
        if all(sequence.slots == 1 for sequence in self.sequences):
            return None
        counts = np.array([sequence.slots for sequence in self.sequences])
        return np.cumsum(counts) - counts, counts

    def values_of(self, chosen: Sequence[int], outputs: Iterable[OutputName]) -> Values:
        """Return the values of these outputs for the sequences at positions `chosen`, in order."""
        slots: Any = selected(chosen)
        if self.slots is not None:
            first_slots, counts = self.slots
            slots = concatenated_ranges(first_slots[chosen], counts[chosen])
        named: dict[OutputName, Any] = {name: self.values[name] for name in outputs}
        return {
            name: values[slots] if OUTPUTS[name].per == "slot" else [values[k] for k in chosen]
            for name, values in named.items()
        }

    def resolve(self, started_at: float, seconds: float) -> None:
        """Write the answers, or the error, into the futures of all sequences.

        `started_at` is the time.monotonic() at which the batch started, and `seconds` its duration.
        """
        # future -> positions in `self.sequences`, indices in the request
        by_future: dict[WorkFuture, tuple[list[int], list[int]]] = {}
        for k, sequence in enumerate(self.sequences):
            for future, index in sequence.futures.items():
                chosen, indices = by_future.setdefault(future, ([], []))
                chosen += [k] * len(index)
                indices += index
        for future, (chosen, indices) in by_future.items():
            where = selected(indices)
            future.queue_s[where] = started_at - future.queued_at
            future.inference_s[where] = seconds
            if self.error is None:
                future.answer(where, self.values_of(chosen, future.work.outputs))
            # a NotFinite error comes with a single sequence, so the message names its input
            elif isinstance(self.error, NotFinite):
                future.fail(indices, NotFinite(f"input {min(indices)}: {self.error}"))
            else:
                future.fail(indices, self.error)


def selected(indices: Sequence[int]) -> Index:
    """Return what selects these indices of an array: of a single one a slice, which numpy takes
    faster."""
    return slice(indices[0], indices[0] + 1) if len(indices) == 1 else np.array(indices)


def fail_sequences(sequences: Iterable[QueuedSequence], error: Exception) -> None:
    """Fail each sequence with `error` in every future that needs the sequence."""
    for sequence in sequences:
        for future, index in sequence.futures.items():
            future.fail(index, error)


def concatenated_ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the integers `first[k]`, ..., `first[k] + counts[k] - 1` for each k, concatenated."""
    offsets = np.cumsum(counts) - counts
    return np.repeat(first - offsets, counts) + np.arange(int(counts.sum()))
