"""One request, from its inputs to a finished ticket: chunks to tokenizer threads, then the engine.

For a thread that may block, and for an event loop that may not.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from jaxembed.engine.engine import Engine
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError
from jaxembed.inputs import Encoding
from jaxembed.models.output import OutputName
from jaxembed.processors.text import CHUNK, Tokenized
from jaxembed.spec import Task
from jaxembed.tasks import Tokenize
from jaxembed.telemetry import Telemetry


@dataclass(frozen=True)
class Run:
    """A request that is answered."""

    ticket: Ticket
    tokenized: Tokenized
    tokenization_s: float  # all of the inputs

    @cached_property
    def figures(self) -> dict:
        """The fields that Embeddings and Scores have in common."""
        return {
            "num_tokens": np.array([encoding.length for encoding in self.tokenized.encodings]),
            "truncated": self.tokenized.truncated,
            "tokenization_s": self.tokenization_s,
            "queue_s": float(self.ticket.queue_s.mean()),
            "inference_s": float(self.ticket.inference_s.mean()),
        }


class Runner:
    """Runs the requests of one model and counts what is answered, until it is `closed`.

    `tokenize` is called with chunks of the items, in several threads at once.
    """

    def __init__(self, executor: Executor, engine: Engine, telemetry: Telemetry, task: Task):
        self._executor = executor
        self._engine = engine
        self._telemetry = telemetry
        self._task: Task = task
        self.closed = False

    def run(self, items: Sequence, tokenize: Tokenize, outputs: frozenset[OutputName]) -> Run:
        """Wait for the answer."""
        self._check_open()
        started_at = time.monotonic()
        tokenized = _join(self._executor.map(tokenize, _chunks(items)))
        tokenization_s = time.monotonic() - started_at
        ticket = self._engine.submit(tokenized.encodings, outputs)
        try:
            ticket.result()
        except BaseException:
            self._engine.cancel(ticket)
            raise
        return self._answered(Run(ticket, tokenized, tokenization_s))

    async def run_async(
        self,
        items: Sequence,
        tokenize: Tokenize,
        outputs: frozenset[OutputName],
        on_tokens: Callable[[int], object],
    ) -> Run:
        """`run` without blocking the loop; `on_tokens` is told how many tokens there are.

        Cancelling the task takes along what is queued of the request.
        """
        self._check_open()
        started_at = time.monotonic()
        parts = [self.off_loop(tokenize, chunk) for chunk in _chunks(items)]
        try:
            tokenized = _join(await asyncio.gather(*parts))
        except BaseException:
            for part in parts:  # the others are for nothing now
                part.cancel()
            raise
        tokenization_s = time.monotonic() - started_at
        on_tokens(sum(encoding.length for encoding in tokenized.encodings))
        ticket = await self._submit(tokenized.encodings, outputs)
        return self._answered(Run(ticket, tokenized, tokenization_s))

    def off_loop(self, call: Callable, *arguments) -> asyncio.Future:
        """The call in a tokenizer thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def _submit(self, encodings: list[Encoding], outputs: frozenset[OutputName]) -> Ticket:
        """Submit and wait; the engine wakes the loop once."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(done.set)

        ticket = self._engine.submit(encodings, outputs, wake)
        try:
            await done.wait()
        except asyncio.CancelledError:
            self._engine.cancel(ticket)
            raise
        return ticket.result(timeout_s=0.0)

    def _check_open(self) -> None:
        if self.closed:
            raise BackendError("this Embedder is closed")

    def _answered(self, run: Run) -> Run:
        """Count it."""
        telemetry, ticket, figures = self._telemetry, run.ticket, run.figures
        count = len(figures["num_tokens"])
        telemetry.truncated_inputs.inc(figures["truncated"])
        telemetry.input_length.observe_many(figures["num_tokens"])
        done, succeeded, *durations = _series(telemetry, self._task)
        done.inc(count)
        succeeded.inc(count)
        tokenization_s = np.full(count, run.tokenization_s / count)
        each = (tokenization_s, ticket.queue_s, ticket.inference_s)
        for duration, seconds in zip(durations, (*each, sum(each)), strict=True):
            duration.observe_many(seconds)
        for stage in ("tokenization", "queue", "inference"):
            telemetry.stage.labels(stage).observe(figures[f"{stage}_s"])
        return run


def _series(telemetry: Telemetry, task: Task) -> tuple:
    """TEI counts inputs of embedding models apart from those of all others."""
    if task == "embed":
        return (
            telemetry.embed_count,
            telemetry.embed_success,
            telemetry.embed_tokenization,
            telemetry.embed_queue,
            telemetry.embed_inference,
            telemetry.embed_duration,
        )
    return (
        telemetry.predict_count,
        telemetry.predict_success,
        telemetry.predict_tokenization,
        telemetry.predict_queue,
        telemetry.predict_inference,
        telemetry.predict_duration,
    )


def _chunks(items: Sequence) -> Iterator[Sequence]:
    return (items[k : k + CHUNK] for k in range(0, len(items), CHUNK))


def _join(parts) -> Tokenized:
    parts = list(parts)
    encodings = list(chain.from_iterable(part.encodings for part in parts))
    return Tokenized(encodings, sum(part.truncated for part in parts))
