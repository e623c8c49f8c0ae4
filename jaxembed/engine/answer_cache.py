"""Caches the answers of recent sequences, and evicts the least recently used answers."""

import threading
from collections import OrderedDict
from copy import deepcopy
from typing import Any

import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.data.work import SparseRows, WorkResult, join_results
from jaxembed.engine.future import Answers, Key, WorkFuture
from jaxembed.observability.metrics import Telemetry

# The bytes of a cached answer in addition to its values and the tokens in its key: tuples, an array
# and an item of the dict. Measured with tracemalloc: 370 to 395.
ANSWER_OVERHEAD_BYTES = 400
ROW_OVERHEAD_BYTES = 320  # overhead of a sparse row: two arrays in two lists. Measured: 315


class AnswerCache:
    """A least-recently-used cache of the answers of one engine, of at most `max_bytes` bytes.

    The key of a sequence is made of its tokens, spans and adapter, with a cryptographic digest if
    it is long. Only outputs per slot are stored: an output per token takes a hundred times the
    memory. Outputs are stored before they are normalised and truncated, so that they serve requests
    with any options.

    Only answers to interactive requests are stored: a corpus would evict all questions.
    """

    def __init__(self, max_bytes: int, telemetry: Telemetry):
        self._max_bytes = max_bytes
        self._hits, self._misses = telemetry.cache_hits, telemetry.cache_misses
        self._answers: OrderedDict[tuple[OutputName, Key], Any] = OrderedDict()  # used last is last
        self._bytes = 0
        self._lock = threading.Lock()
        telemetry.add_to(telemetry.cache_bytes, lambda: self._bytes)

    def take(self, future: WorkFuture) -> Answers | None:
        """Remove the sequences that have a cached answer from a future that is not queued yet.

        Returns these sequences with their answers; None if no sequence has a cached answer. Also
        counts hits and misses.
        """
        names = future.work.outputs
        if any(OUTPUTS[name].per != "slot" for name in names):
            return None
        with self._lock:
            hits = [
                sequence
                for sequence in future.sequences
                if all((name, sequence.key) in self._answers for name in names)
            ]
            results: list[WorkResult] = [
                {name: self._answers[name, sequence.key] for name in names} for sequence in hits
            ]
            for sequence in hits:
                for name in names:
                    self._answers.move_to_end((name, sequence.key))
        future.withdraw(hits)
        self._hits.inc(future.cached_inputs)
        self._misses.inc(future.inputs)
        return Answers(hits, join_results(results)) if hits else None

    def keep(self, answers: Answers) -> None:
        """Store the answers to interactive requests; evict old answers if the cache is full.

        Errors, and answers larger than the whole cache, are not stored.
        """
        if answers.error is not None:
            return
        for position, sequence in enumerate(answers.sequences):
            if not any(future.interactive for future in sequence.futures):
                continue
            for name, values in answers.values_of([position], sequence.outputs).items():
                key = name, sequence.key
                if OUTPUTS[name].per != "slot" or (size := _size(key, values)) > self._max_bytes:
                    continue
                # a copy, because a view would keep the output of the whole batch in memory
                copied = deepcopy(values) if isinstance(values, SparseRows) else np.array(values)
                with self._lock:
                    if key not in self._answers:  # two batches may answer the same sequence
                        self._answers[key] = copied
                        self._bytes += size
                        while self._bytes > self._max_bytes:
                            self._bytes -= _size(*self._answers.popitem(last=False))

    def clear(self) -> None:
        """Remove all answers."""
        with self._lock:
            self._answers.clear()
            self._bytes = 0


def _size(key: tuple[OutputName, Key], values: Any) -> int:
    """Estimate the bytes of memory that an answer takes in the cache, with its key."""
    size = ANSWER_OVERHEAD_BYTES + len(key[1][0])
    if not isinstance(values, SparseRows):
        return size + values.nbytes
    rows = zip(values.indices, values.values, strict=True)
    return size + sum(ROW_OVERHEAD_BYTES + i.nbytes + v.nbytes for i, v in rows)
