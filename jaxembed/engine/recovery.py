"""Runs a batch so that only the sequences that cause an error fail.

A batch that does not fit in the memory of the device is run again in parts. A sequence whose result
is not finite is run again alone.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxembed.data.outputs import OUTPUTS, OutputName
from jaxembed.engine.batch import Batch, pack, place, place_all
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.future import Answers, QueuedSequence
from jaxembed.engine.replica import Runner
from jaxembed.errors import BackendError, NotFinite
from jaxembed.observability.metrics import Telemetry

logger = logging.getLogger(__name__)


def reference_to(batch: Batch) -> tuple[str, str]:
    """Return a random reference to a batch, and a description of the batch for the log.

    The description contains the reference. A client gets only the reference, and finds the
    description in the log by it.
    """
    reference = uuid.uuid4().hex[:12]
    lengths = sorted((sequence.length for sequence in batch.sequences), reverse=True)[:8]
    return reference, (
        f"batch {batch.bucket} (sequences: {len(batch.sequences)}, longest {lengths}, reference "
        f"{reference})"
    )


@dataclass(eq=False)
class Recovery:
    """Runs batches on a runner, and again in parts if something fails."""

    runner: Runner
    buckets: Callable[[], Iterable[Bucket]]  # returns the buckets compiled so far
    telemetry: Telemetry
    # called with the bucket before each run
    on_call: Callable[[Bucket], object] = lambda bucket: None
    run_s: float = 0.0  # seconds of all runs so far

    def run(self, batch: Batch) -> list[Answers]:
        """Run a batch; then run each sequence whose result is not finite once more, alone.

        Returns the answers or errors of all sequences of the batch. Raises no error.
        """
        try:
            try:
                answers = self.attempt(batch)
            except Exception as error:
                return self._after_failure(batch, error)
            finite = is_finite(answers)
            if finite.all():
                return [answers]
            results = []
            if finite.any():
                chosen = np.flatnonzero(finite).tolist()
                values = answers.values_of(chosen, answers.values)
                results.append(Answers([answers.sequences[k] for k in chosen], values))
            for k in np.flatnonzero(~finite).tolist():
                results += self._alone(answers.sequences[k], batch)
            return results
        except Exception as error:  # any error goes to the futures
            return [self._failed(batch, error)]

    def attempt(self, batch: Batch, *, in_float32: bool = False) -> Answers:
        """Run a batch once, and gather the values of each sequence from the outputs.

        With `in_float32`, run the bucket's program in float32. Raises the errors of the runner."""
        outputs = set().union(
            *(future.work.outputs for sequence in batch.sequences for future in sequence.futures)
        )
        self.on_call(batch.bucket)
        planes, started_at = pack(batch, self.runner.planes), time.monotonic()
        try:
            output = self.runner.run(batch.bucket, planes, outputs, in_float32=in_float32)
        finally:
            self.run_s += time.monotonic() - started_at
        rows, slots, _ = batch.slot_places
        values: dict[OutputName, Any] = {}
        for name, array in output.items():
            if OUTPUTS[name].sparse:
                values[name] = array[rows * batch.bucket.slots + slots]
            elif OUTPUTS[name].per == "slot":
                values[name] = array[rows, slots]
            else:
                places = zip(batch.sequences, batch.rows, batch.starts, strict=True)
                values[name] = [
                    array[row, start : start + sequence.length] for sequence, row, start in places
                ]
        return Answers(batch.sequences, values)

    def _after_failure(self, batch: Batch, error: Exception) -> list[Answers]:
        """Run a failed batch again in parts if `error` says that the device memory was full.

        The parts run on the largest bucket that has at most half the tokens of the batch's bucket
        and holds the longest sequence. If there is no such bucket, or after another error, the
        sequences get a BackendError. Returns the answers or errors of all sequences.
        """
        longest = max(sequence.min_row for sequence in batch.sequences)
        half = batch.bucket.tokens // 2
        fitting = [b for b in self.buckets() if longest <= b.length and b.tokens <= half]
        if "RESOURCE_EXHAUSTED" not in str(error) or not fitting:
            return [self._failed(batch, error)]
        self.telemetry.split_batches.inc()
        logger.warning(
            "batch %s does not fit in the device's memory: it runs again in parts", batch.bucket
        )
        largest = max(fitting, key=lambda b: b.tokens)
        parts = place_all(largest, batch.sequences, self.runner.alignment)
        return [answers for part in parts for answers in self.run(part)]

    def _failed(self, batch: Batch, error: Exception) -> Answers:
        """Log and count a failed batch. Returns a BackendError as the error of all sequences."""
        reference, description = reference_to(batch)
        logger.error("%s failed", description, exc_info=error)
        self.telemetry.failed_batches.inc()
        message = f"the device failed on this batch (reference {reference})"
        return Answers(batch.sequences, error=BackendError(message))

    def _alone(self, sequence: QueuedSequence, batch: Batch) -> list[Answers]:
        """Run a sequence of `batch` alone, because its result was not finite.

        If the result is again not finite, run the sequence in float32 if the model is in float16.
        Returns the answer, or NotFinite or a BackendError as the error of the sequence.
        """
        self.telemetry.not_finite.inc()
        fitting = [b for b in self.buckets() if sequence.min_row <= b.length]
        bucket = min(fitting, key=lambda b: b.tokens, default=batch.bucket)
        alone, float32_bucket = place(bucket, [sequence]), self.runner.float32_bucket
        try:
            answers = self.attempt(alone)
            if is_finite(answers).all():
                return [answers]
            if float32_bucket is not None:
                answers = self.attempt(place(float32_bucket, [sequence]), in_float32=True)
                if is_finite(answers).all():
                    return [answers]
        except Exception as error:
            return self._after_failure(alone, error)
        attempts = "alone" if float32_bucket is None else "alone and in float32"
        message = f"the result is not finite, even when run {attempts}"
        return [Answers([sequence], error=NotFinite(message))]


def is_finite(answers: Answers) -> np.ndarray:
    """Return whether all values of each sequence are finite: bool `[sequences]`."""
    finite = np.ones(len(answers.sequences), bool)
    for name, values in answers.values.items():
        if OUTPUTS[name].per == "slot":
            if OUTPUTS[name].sparse:
                slots = np.array([np.isfinite(row).all() for row in values.values])
            elif np.count_nonzero(finite_values := np.isfinite(values)) == values.size:
                continue  # the same result in less time
            else:
                slots = finite_values.all(axis=1)
            if answers.slots is not None:  # all slots must be finite
                slots = np.logical_and.reduceat(slots, answers.slots[0])
            finite &= slots
        else:
            finite &= np.array([np.isfinite(rows).all() for rows in values])
    return finite
