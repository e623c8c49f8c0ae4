"""Runs a batch so that only the sequences at fault fail.

A batch that does not fit in the memory is run in halves, and a sequence whose result is not finite
is run alone.
"""

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.engine.batch import Batch, pack, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Outputs, Runner
from jaxembed.engine.ticket import Entry, flat_ranges
from jaxembed.errors import BackendError, NotFinite
from jaxembed.observability.metrics import Telemetry

logger = logging.getLogger(__name__)

Values = Mapping[OutputName, Any]  # an array for outputs per slot, a list of arrays for others


@dataclass(frozen=True)
class Answers:
    """The result of a run for some entries: `values`, or an `error` for all of them.

    `values` has an array `[slots of all entries, width]` for each output per slot, SparseRows of a
    sparse one, and a list with the array of each entry for each output per token. These are views
    of the output of the whole bucket, so they must be copied to be kept.
    """

    entries: Sequence[Entry]
    values: Values = field(default_factory=dict)
    error: Exception | None = None

    @cached_property
    def slots(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The first slot of each entry among the slots of all, and its number of slots.

        Both are int arrays `[entries]`. None if each entry has one slot.
        """
        if all(entry.slots == 1 for entry in self.entries):
            return None
        counts = np.array([entry.slots for entry in self.entries])
        return np.cumsum(counts) - counts, counts

    def values_of(self, chosen: Sequence[int], outputs: Iterable[OutputName]) -> Values:
        """The values of these outputs for the entries with the numbers `chosen`, in this order."""
        places: Sequence[int] | np.ndarray = chosen
        if self.slots is not None:
            first, counts = self.slots
            places = flat_ranges(first[chosen], counts[chosen])
        return {name: self._chosen(name, chosen, places) for name in outputs}

    def _chosen(self, name: OutputName, entries: Sequence[int], slots: Sequence[int] | np.ndarray):
        values = self.values[name]
        if OUTPUTS[name].sparse:
            return values.rows(slots)
        return values[slots] if OUTPUTS[name].per == "slot" else [values[k] for k in entries]


def reference_to(batch: Batch) -> tuple[str, str]:
    """Make a random reference for the error messages of a batch.

    Returns it and a description of the batch for the log, which contains the reference.
    """
    reference = uuid.uuid4().hex[:12]
    lengths = sorted((entry.length for entry in batch.entries), reverse=True)[:8]
    count = len(batch.entries)
    words = f"batch {batch.bucket} of {count} sequences (reference {reference}, longest {lengths})"
    return reference, words


class Recovery:
    """Runs batches on a runner, again in parts if something fails.

    `buckets` returns the buckets compiled so far. `on_call` is called with the bucket before each
    call of the runner.
    """

    def __init__(
        self,
        runner: Runner,
        buckets: Callable[[], Iterable[Bucket]],
        telemetry: Telemetry,
        on_call: Callable[[Bucket], object] = lambda bucket: None,
    ):
        self._runner = runner
        self._buckets = buckets
        self._telemetry = telemetry
        self._on_call = on_call

    def run(self, batch: Batch) -> list[Answers]:
        """Run a batch. Returns the answers or errors of all its entries, and raises nothing."""
        try:
            return self._run(batch)
        except Exception as error:  # any error goes to the tickets
            return [self._failed(batch, error)]

    def _run(self, batch: Batch) -> list[Answers]:
        """Run a batch, and then each sequence alone whose result is not finite."""
        try:
            answers = self._attempt(batch)
        except Exception as error:
            return self._after_failure(batch, error)
        finite = _finite(answers)
        if finite.all():
            return [answers]
        suspects = [e for e, ok in zip(answers.entries, finite, strict=True) if not ok]
        results = []
        if finite.any():
            chosen = np.flatnonzero(finite).tolist()
            values = answers.values_of(chosen, answers.values)
            results.append(Answers([answers.entries[k] for k in chosen], values))
        for entry in suspects:
            results += self._alone(entry, batch)
        return results

    def _attempt(self, batch: Batch) -> Answers:
        """Run a batch once. Raises what the runner raises."""
        names = _outputs(batch.entries)
        self._on_call(batch.bucket)
        return _gather(
            batch, self._runner.run(batch.bucket, pack(batch, self._runner.planes), names)
        )

    def _after_failure(self, batch: Batch, error: Exception) -> list[Answers]:
        """Run a batch in halves if it did not fit in the memory; otherwise fail it."""
        smaller = self._smaller(batch)
        if "RESOURCE_EXHAUSTED" in str(error) and smaller is not None:
            self._telemetry.split_batches.inc()
            logger.warning(
                "batch %s does not fit the device's memory, running it in halves", batch.bucket
            )
            return [answers for half in smaller for answers in self.run(half)]
        return [self._failed(batch, error)]

    def _failed(self, batch: Batch, error: Exception) -> Answers:
        """Log and count a failed batch. Returns a BackendError with its reference as the answer."""
        reference, words = reference_to(batch)
        logger.error("%s failed", words, exc_info=error)
        self._telemetry.failed_batches.inc()
        failure = BackendError(f"the device failed on this batch (reference {reference})")
        return Answers(batch.entries, error=failure)

    def _smaller(self, batch: Batch) -> list[Batch] | None:
        """Divide a batch into batches on a bucket with at most half its tokens.

        None if there is no such bucket that holds its longest sequence.
        """
        longest = max(entry.least_row for entry in batch.entries)
        half = batch.bucket.tokens // 2
        fitting = [b for b in self._buckets() if b.fits(longest) and b.tokens <= half]
        if not fitting:
            return None
        bucket, left, parts = max(fitting, key=lambda b: b.tokens), list(batch.entries), []
        while left:
            parts.append(place(bucket, left[:1], left[1:]))
            placed = set(parts[-1].entries)
            left = [entry for entry in left if entry not in placed]
        return parts

    def _alone(self, entry: Entry, batch: Batch) -> list[Answers]:
        """Run a sequence alone, and then in float32 if the model is in float16."""
        self._telemetry.not_finite.inc()
        fitting = [b for b in self._buckets() if b.fits(entry.least_row)]
        bucket = min(fitting, key=lambda b: b.tokens, default=batch.bucket)
        alone, twin = place(bucket, [entry]), self._runner.float32_bucket
        try:
            answers = self._attempt(alone)
            if _finite(answers).all():
                return [answers]
            if twin is not None:
                answers = self._in_float32(place(twin, [entry]))
                if _finite(answers).all():
                    return [answers]
        except Exception as error:
            return self._after_failure(alone, error)
        attempts = "alone" if twin is None else "alone and in float32"
        return [Answers([entry], error=NotFinite(f"the result is not finite, run {attempts}"))]

    def _in_float32(self, batch: Batch) -> Answers:
        """Run a batch once with the float32 program. Raises what the runner raises."""
        self._on_call(batch.bucket)
        outputs, planes = _outputs(batch.entries), pack(batch, self._runner.planes)
        return _gather(batch, self._runner.run_in_float32(batch.bucket, planes, outputs))


def _outputs(entries: Iterable[Entry]) -> set[OutputName]:
    """All outputs that the tickets of these entries asked for."""
    return set().union(*(entry.outputs for entry in entries))


def _gather(batch: Batch, output: Outputs) -> Answers:
    """Gather the values of each entry from the outputs of a bucket."""
    values: dict[OutputName, Any] = {}
    for name, array in output.items():
        if OUTPUTS[name].sparse:
            values[name] = array.rows(batch.slot_rows * batch.bucket.slots + batch.all_slots)
        elif OUTPUTS[name].per == "slot":
            values[name] = array[batch.slot_rows, batch.all_slots]
        else:
            places = zip(batch.entries, batch.rows, batch.starts, strict=True)
            values[name] = [array[row, at : at + entry.length] for entry, row, at in places]
    return Answers(batch.entries, values)


def _finite(answers: Answers) -> np.ndarray:
    """Whether all values of each entry are finite, bool `[entries]`."""
    finite = np.ones(len(answers.entries), bool)
    for name, values in answers.values.items():
        if OUTPUTS[name].per == "slot":
            if OUTPUTS[name].sparse:
                of_slots = np.array([np.isfinite(row).all() for row in values.values])
            else:
                of_slots = np.asarray(np.isfinite(values).all(axis=1))
            if answers.slots is not None:
                of_slots = np.logical_and.reduceat(of_slots, answers.slots[0])
            finite &= of_slots
        else:
            finite &= np.array([np.isfinite(rows).all() for rows in values])
    return finite
