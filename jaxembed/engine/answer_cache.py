"""Keeps the answers of sequences that may be asked for again, up to a number of bytes."""

import threading
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.work import SparseRows, WorkResult, join_results
from jaxembed.engine.ticket import Answers, Entry, Key, Ticket
from jaxembed.observability.metrics import Telemetry

# Bytes of an answer beside its values and the tokens in its key: tuples, an array and a place in
# the table. Measured with tracemalloc: 370 to 395.
KEPT_BYTES = 400
ROW_BYTES = 320  # of a sparse row beside its numbers: two arrays in two lists. Measured: 315


class AnswerCache:
    """The answers of one engine that were used last.

    A sequence is known by its key, which holds its tokens or a cryptographic digest of them, its
    spans and its adapter. Only outputs per slot are kept: those per token are as large as a hundred
    of them. What a lookup finds is what the engine computed, not normalised and not cut, so it
    serves every form of an answer.

    Interactive work is kept, bulk work is only looked up: a corpus would push out all questions.
    """

    def __init__(self, most_bytes: int, telemetry: Telemetry):
        self._most = most_bytes
        self._hits, self._misses = telemetry.cache_hits, telemetry.cache_misses
        self._kept: OrderedDict[tuple[OutputName, Key], Any] = OrderedDict()  # used last is last
        self._bytes = 0
        self._lock = threading.Lock()
        telemetry.add_to(telemetry.cache_bytes, lambda: self._bytes)

    def take(self, ticket: Ticket) -> Answers | None:
        """Take the entries whose answers are kept out of a ticket, which is not queued yet.

        Returns them with their answers; None if there are none.
        """
        names = ticket.work.outputs
        if any(OUTPUTS[name].per != "slot" for name in names):
            return None
        found: list[Entry] = []
        kept: list[WorkResult] = []
        with self._lock:
            for entry in ticket.entries:
                if all((name, entry.key) in self._kept for name in names):
                    for name in names:
                        self._kept.move_to_end((name, entry.key))
                    found.append(entry)
                    kept.append({name: self._kept[name, entry.key] for name in names})
        ticket.withdraw(found)
        self._hits.inc(ticket.withdrawn)
        self._misses.inc(ticket.inputs)
        return Answers(found, join_results(kept)) if found else None

    def keep(self, answers: Answers) -> None:
        """Keep the answers of those entries that interactive work asked for."""
        if answers.error is not None:
            return
        for number, entry in enumerate(answers.entries):
            if not any(ticket.interactive for ticket in entry.claims):
                continue
            for name, values in answers.values_of([number], entry.outputs).items():
                key = name, entry.key
                if OUTPUTS[name].per != "slot" or (size := _size(key, values)) > self._most:
                    continue
                # in memory of its own, not a view of the batch
                kept = deepcopy(values) if isinstance(values, SparseRows) else np.array(values)
                with self._lock:
                    if key not in self._kept:  # two batches may answer the same sequence
                        self._kept[key] = kept
                        self._bytes += size
                        while self._bytes > self._most:
                            self._bytes -= _size(*self._kept.popitem(last=False))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0


def _size(key: tuple[OutputName, Key], values: Any) -> int:
    """The bytes that an answer takes, about."""
    size = KEPT_BYTES + len(key[1][0])
    if not isinstance(values, SparseRows):
        return size + values.nbytes
    rows = zip(values.indices, values.values, strict=True)
    return size + sum(ROW_BYTES + i.nbytes + v.nbytes for i, v in rows)
