"""One request in the engine: its answer, filled sequence by sequence, and who waits for it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np

from jaxembed.errors import Cancelled
from jaxembed.inputs import Encoding
from jaxembed.models.output import OutputName

logger = logging.getLogger(__name__)

KEPT_TWICE = 32  # tokens: to look at them takes a tenth of the time of a digest

Key = tuple[bytes, int, int]  # equal for sequences that have the same answer


class Ticket:
    """The answer to one request, complete when every sequence is answered or one has failed.

    `dense` is float32 `[n, dim]`, unnormalised; `tokens[i]` is float32 `[length, width]` where the
    outputs ask for it. `wake` is called once, from an engine thread, when the ticket is complete.
    """

    def __init__(
        self,
        encodings: Sequence[Encoding],
        dim: int,
        outputs: frozenset[OutputName] = frozenset({"dense"}),
        wake: Callable[[], object] | None = None,
    ):
        count = len(encodings)
        self.outputs = outputs
        self.dense = np.zeros((count, dim), np.float32)
        self.tokens: list[np.ndarray | None] = [None] * count
        self.queue_s = np.zeros(count)
        self.inference_s = np.zeros(count)
        self.queued_at = time.monotonic()
        self.entries = _entries(self, encodings)
        self.tokens_in = sum(len(encoding.ids) for encoding in encodings)
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

    def answer(
        self,
        index: Sequence[int] | np.ndarray,
        dense: np.ndarray,
        tokens: Sequence[np.ndarray] | None,
    ) -> None:
        """The answers of the sequences at `index`."""
        self.dense[index] = dense
        if tokens is not None and "tokens" in self.outputs:
            for i, hidden in zip(index, tokens, strict=True):
                self.tokens[i] = hidden.copy()  # a view would keep the whole bucket's alive
        self._settle(index)

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

    def result(self, timeout_s: float | None = None) -> "Ticket":
        """Wait for the answer. Raises its error, Cancelled, or TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s} s")
        if self.cancelled:
            raise Cancelled("the request was cancelled")
        if self.error is not None:
            raise self.error
        return self


class Entry:
    """One sequence that waits for a place in a batch, and whose answer it is: `claims` gives the
    places in each ticket that asked for it. Once it is `taken` nobody may join."""

    __slots__ = ("claims", "encoding", "key", "length", "taken")

    def __init__(self, ticket: Ticket, index: int, encoding: Encoding, key: Key):
        self.claims: dict[Ticket, list[int]] = {ticket: [index]}
        self.encoding = encoding
        self.key = key
        self.length = encoding.length
        self.taken = False

    @property
    def outputs(self) -> set[OutputName]:
        """All that somebody asked for."""
        return set().union(*(ticket.outputs for ticket in self.claims))


def _entries(ticket: Ticket, encodings: Sequence[Encoding]) -> list[Entry]:
    """An entry for each sequence that is unlike the others."""
    found: dict[Key, Entry] = {}
    for index, encoding in enumerate(encodings):
        key = _key(encoding)
        if key in found:
            found[key].claims[ticket].append(index)
        else:
            found[key] = Entry(ticket, index, encoding, key)
    return list(found.values())


def _key(encoding: Encoding) -> Key:
    """The tokens of a short one. A digest of others, for tokens of all that waits would be kept
    twice; nobody can make two texts share one."""
    ids, types, length = encoding.ids, encoding.types, encoding.length
    if length <= KEPT_TWICE and types is None:
        return ids.tobytes(), length, encoding.unpooled
    digest = blake2b(ids.data, digest_size=16)
    if types is not None:
        digest.update(types.data)
    return digest.digest(), length, encoding.unpooled
