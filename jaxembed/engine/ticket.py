"""One request in the engine: its answer, filled sequence by sequence, and who waits for it."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxembed.errors import Cancelled
from jaxembed.inputs import Encoding
from jaxembed.models.output import OutputName


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
        self.entries = [Entry(self, i, encoding) for i, encoding in enumerate(encodings)]
        self.waiting_entries = count  # these two belong to the engine, under its lock
        self.waiting_tokens = sum(entry.length for entry in self.entries)
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
        self, index: list[int], dense: np.ndarray, tokens: Sequence[np.ndarray] | None
    ) -> None:
        """The answers of the sequences at `index`."""
        self.dense[index] = dense
        if tokens is not None and "tokens" in self.outputs:
            for i, hidden in zip(index, tokens, strict=True):
                self.tokens[i] = hidden
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

    def _settle(self, index: list[int]) -> None:
        with self._lock:
            were_open = bool(self._open[index].any())
            self._open[index] = False
            last = were_open and not self._open.any() and not self.cancelled
        if last:
            self._done.set()
            if self._wake is not None:
                self._wake()

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
    """One sequence of a ticket, waiting for a place in a batch."""

    __slots__ = ("encoding", "index", "length", "ticket")

    def __init__(self, ticket: Ticket, index: int, encoding: Encoding):
        self.ticket = ticket
        self.index = index
        self.encoding = encoding
        self.length = encoding.length
