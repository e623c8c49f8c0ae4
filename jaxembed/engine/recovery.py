"""Run a batch so that only the guilty fail: halve what does not fit, isolate what is not finite."""

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxembed.engine.batch import Batch, pack, place
from jaxembed.engine.bucket import Bucket
from jaxembed.engine.replica import Runner
from jaxembed.engine.ticket import Entry
from jaxembed.errors import BackendError, NotFinite
from jaxembed.models.output import OutputName
from jaxembed.telemetry import Telemetry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answers:
    """What came of some entries: entry k has `dense[k]` and `tokens[k]`, or all have `error`.

    `tokens` are views of a bucket's output, to be copied before they are kept.
    """

    entries: Sequence[Entry]
    dense: np.ndarray | None = None
    tokens: Sequence[np.ndarray] | None = None
    error: Exception | None = None


def reference_to(batch: Batch) -> tuple[str, str]:
    """A reference for those who wait, and the words by which the log names the batch with it."""
    reference = uuid.uuid4().hex[:12]
    lengths = sorted((entry.length for entry in batch.entries), reverse=True)[:8]
    count = len(batch.entries)
    words = f"batch {batch.bucket} of {count} sequences (reference {reference}, longest {lengths})"
    return reference, words


class Recovery:
    """Runs batches on a runner; `buckets()` are those compiled so far. `on_call` is called before
    each call of the runner."""

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
        """Every entry of the batch, answered or failed. Raises nothing."""
        try:
            return self._run(batch)
        except Exception as error:  # whatever it is goes to those who wait
            return [self._failed(batch, error)]

    def _run(self, batch: Batch) -> list[Answers]:
        try:
            answers = self._attempt(batch)
        except Exception as error:
            return self._after_failure(batch, error)
        finite = _finite(answers)
        if finite.all():
            return [answers]
        suspects = [e for e, good in zip(answers.entries, finite, strict=True) if not good]
        results = [_subset(answers, finite)] if finite.any() else []
        for entry in suspects:
            results += self._alone(entry, batch)
        return results

    def _attempt(self, batch: Batch) -> Answers:
        names = _outputs(batch.entries)
        self._on_call(batch.bucket)
        return _gather(batch, self._runner.run(batch.bucket, pack(batch), names))

    def _after_failure(self, batch: Batch, error: Exception) -> list[Answers]:
        smaller = self._smaller(batch)
        if "RESOURCE_EXHAUSTED" in str(error) and smaller is not None:
            self._telemetry.split_batches.inc()
            logger.warning(
                "batch %s does not fit the device's memory, running it in halves", batch.bucket
            )
            return [answers for half in smaller for answers in self.run(half)]
        return [self._failed(batch, error)]

    def _failed(self, batch: Batch, error: Exception) -> Answers:
        reference, words = reference_to(batch)
        logger.error("%s failed", words, exc_info=error)
        self._telemetry.failed_batches.inc()
        failure = BackendError(f"the device failed on this batch (reference {reference})")
        return Answers(batch.entries, error=failure)

    def _smaller(self, batch: Batch) -> list[Batch] | None:
        """The batch on buckets of half its tokens at most; None where there are none."""
        longest = max(entry.length for entry in batch.entries)
        fitting = [
            b
            for b in self._buckets()
            if b.length >= longest and b.tokens <= batch.bucket.tokens // 2
        ]
        if not fitting:
            return None
        bucket, left, parts = max(fitting, key=lambda b: b.tokens), list(batch.entries), []
        while left:
            parts.append(place(bucket, left[:1], left[1:]))
            placed = set(parts[-1].entries)
            left = [entry for entry in left if entry not in placed]
        return parts

    def _alone(self, entry: Entry, batch: Batch) -> list[Answers]:
        """The sequence by itself, then in float32 where the model is float16."""
        self._telemetry.not_finite.inc()
        fitting = [b for b in self._buckets() if b.length >= entry.length]
        bucket = min(fitting, key=lambda b: b.tokens, default=batch.bucket)
        alone = place(bucket, [entry])
        try:
            answers = self._attempt(alone)
            if _finite(answers).all():
                return [answers]
            self._on_call(bucket)
            wide = self._runner.run_in_float32(pack(alone), _outputs([entry]))
            if wide is not None and _finite(answers := _gather(alone, wide)).all():
                return [answers]
        except Exception as error:
            return self._after_failure(alone, error)
        how = "alone" if wide is None else "alone and in float32"
        return [Answers([entry], error=NotFinite(f"the result is not finite, run {how}"))]


def _outputs(entries: Iterable[Entry]) -> set[OutputName]:
    dense: set[OutputName] = {"dense"}
    return dense.union(*(entry.outputs for entry in entries))


def _gather(batch: Batch, output: dict[OutputName, np.ndarray]) -> Answers:
    """Each entry's own rows out of a bucket's output."""
    dense = output["dense"][batch.rows, batch.slots]
    if "tokens" not in output:
        return Answers(batch.entries, dense)
    spans = zip(batch.entries, batch.rows, batch.starts, strict=True)
    tokens = [output["tokens"][row, at : at + e.length] for e, row, at in spans]
    return Answers(batch.entries, dense, tokens)


def _finite(answers: Answers) -> np.ndarray:
    assert answers.dense is not None
    finite = np.asarray(np.isfinite(answers.dense).all(axis=1))
    if answers.tokens is not None:
        finite &= np.array([np.isfinite(tokens).all() for tokens in answers.tokens])
    return finite


def _subset(answers: Answers, chosen: np.ndarray) -> Answers:
    assert answers.dense is not None
    index = np.flatnonzero(chosen).tolist()
    tokens = None if answers.tokens is None else [answers.tokens[i] for i in index]
    return Answers([answers.entries[i] for i in index], answers.dense[index], tokens)
