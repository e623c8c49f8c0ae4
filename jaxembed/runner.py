"""One request, from its inputs to its answer: chunks to tokenizer threads, then the engine.

For a thread that may block, and for an event loop that may not.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from itertools import islice

import numpy as np

from jaxembed.engine.engine import Engine
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError, InvalidInput
from jaxembed.inputs import Priority, Text
from jaxembed.outputs import OutputName
from jaxembed.processors.text import Tokenized, characters
from jaxembed.processors.tokenizer import SHORT_CHARACTERS, chunks
from jaxembed.spec import ModelSpec, Task
from jaxembed.tasks import Answer, Request, Run, Tokenize
from jaxembed.telemetry import ANSWER_STAGES, Telemetry
from jaxembed.work import Work, join_work, work_of


class RequestRunner:
    """Runs the requests of one model and counts what is answered, until it is closed.

    What takes one job to tokenize is one; else `begin` is, and then each chunk, so that a huge
    query keeps one tokenizer thread busy and not all of them. Jobs are small: one that has begun is
    finished, those that have not are dropped with the request.
    """

    def __init__(self, executor: Executor, engine: Engine, telemetry: Telemetry, spec: ModelSpec):
        self._executor = executor
        self._engine = engine
        self._telemetry = telemetry
        self._series = _series(telemetry, spec.task)
        self._stages = [(f"{name}_s", telemetry.stage.labels(name)) for name in ANSWER_STAGES]
        self._spec = spec
        self._closed = False

    def run(self, request: Request[Answer]) -> Answer:
        """Wait for the answer. Raises BackendError when closed."""
        if not request.items:
            return self._nothing(request)
        started_at = time.monotonic()
        tokenized = self._tokenize(request)
        tokenization_s = time.monotonic() - started_at
        ticket = self._engine.submit(tokenized.work, priority=request.priority)
        try:
            ticket.result()
        except BaseException:
            self._engine.cancel(ticket)
            raise
        return request.answer(self._count(Run(ticket, tokenized, tokenization_s)))

    async def run_async(
        self,
        request: Request[Answer],
        on_tokens: Callable[[int], object] = lambda tokens: None,
    ) -> Answer:
        """`run` without blocking the loop; `on_tokens` is told how many tokens there are.

        Cancelling the task takes along what is queued of the request.
        """
        if not request.items:
            return self._nothing(request)
        started_at = time.monotonic()
        tokenized = await self._tokenize_async(request)
        tokenization_s = time.monotonic() - started_at
        on_tokens(tokenized.work.tokens)
        ticket = await self._submit(tokenized.work, request.priority)
        return request.answer(self._count(Run(ticket, tokenized, tokenization_s)))

    def off_loop(self, call: Callable, *arguments) -> asyncio.Future:
        """The call in a tokenizer thread, to be awaited. Raises BackendError when closed."""
        return asyncio.wrap_future(self._in_thread(call, *arguments))

    def close(self) -> None:
        """Take no further request."""
        self._closed = True
        self._executor.shutdown(wait=False)

    def _tokenize(self, request: Request) -> Tokenized:
        if _is_brief(request.items) and not self._closed:
            return _tokenize_whole(request)
        if _is_one_job(request.items):
            return self._in_thread(_tokenize_whole, request).result()
        tokenize = self._in_thread(request.begin).result()
        parts: list[Future] = []
        try:
            for first, chunk in _jobs(request.items):
                parts.append(self._in_thread(_tokenize_chunk, tokenize, chunk, first))
            for part in wait(parts, return_when=FIRST_EXCEPTION).done:
                part.result()  # raises what one failed with, while others may wait
            return _join([part.result() for part in parts], request.outputs)
        except BaseException:
            _cancel(parts)
            raise

    async def _tokenize_async(self, request: Request) -> Tokenized:
        if _is_brief(request.items) and not self._closed:
            return _tokenize_whole(request)
        if _is_one_job(request.items):
            return await self.off_loop(_tokenize_whole, request)
        tokenize = await self.off_loop(request.begin)
        parts: list[asyncio.Future] = []
        try:
            for first, chunk in _jobs(request.items):
                parts.append(self.off_loop(_tokenize_chunk, tokenize, chunk, first))
            return _join(await asyncio.gather(*parts), request.outputs)
        except BaseException:
            _cancel(parts)
            raise

    def _in_thread(self, call: Callable, *arguments) -> Future:
        try:
            return self._executor.submit(call, *arguments)
        except RuntimeError as error:  # it was shut down
            raise BackendError("this Embedder is closed") from error

    async def _submit(self, work: Work, priority: Priority | None) -> Ticket:
        """Submit and wait; the engine wakes the loop once."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_finish, done)

        ticket = self._engine.submit(work, wake, priority)
        try:
            await done
        except asyncio.CancelledError:
            self._engine.cancel(ticket)
            raise
        ticket.result(timeout_s=0.0)
        return ticket

    def _nothing(self, request: Request[Answer]) -> Answer:
        """The answer where there are no items."""
        nothing = work_of([], request.outputs)
        ticket = Ticket(nothing, self._spec.widths)
        return request.answer(Run(ticket, Tokenized(nothing, 0), 0.0))

    def _count(self, run: Run) -> Run:
        telemetry, ticket, figures = self._telemetry, run.ticket, run.figures
        count = len(figures["num_tokens"])
        telemetry.truncated_inputs.inc(figures["truncated"])
        telemetry.input_length.observe_many(figures["num_tokens"])
        done, succeeded, *durations = self._series
        done.inc(count)
        succeeded.inc(count)
        tokenization_s = np.full(count, run.tokenization_s / count)
        each = (tokenization_s, ticket.queue_s, ticket.inference_s)
        for duration, seconds in zip(durations, (*each, sum(each)), strict=True):
            duration.observe_many(seconds)
        for name, stage in self._stages:
            stage.observe(figures[name])
        return run


def _series(telemetry: Telemetry, task: Task) -> tuple:
    """The counters and durations of a task: TEI counts embedding models separately."""
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


def _is_one_job(items: Sequence) -> bool:
    return len(items) == 1 or len(list(islice(_jobs(items), 2))) == 1


def _jobs(items: Sequence) -> Iterator[tuple[int, list]]:
    """The items that each job tokenizes, after the index of the first of them."""
    first = 0
    for chunk in chunks(items, characters):
        yield first, chunk
        first += len(chunk)


def _tokenize_chunk(tokenize: Tokenize, chunk: Sequence, first: int) -> Tokenized:
    try:
        return tokenize(chunk)
    except InvalidInput as error:
        error.index = first + (error.index or 0)
        raise


def _is_brief(items: Sequence) -> bool:
    """Whether a thread would cost more than the work: 200 us, and 15 us for a short query."""
    return len(items) == 1 and isinstance(items[0], Text) and len(items[0].text) <= SHORT_CHARACTERS


def _tokenize_whole(request: Request) -> Tokenized:
    return _join([request.begin()(request.items)], request.outputs)


def _finish(future: asyncio.Future) -> None:
    if not future.done():  # it may be cancelled
        future.set_result(None)


def _cancel(parts: Iterable[Future | asyncio.Future]) -> None:
    for part in parts:  # they are for nothing now
        part.cancel()


def _join(parts: Sequence[Tokenized], outputs: frozenset[OutputName]) -> Tokenized:
    work = join_work([part.work for part in parts], outputs)
    return Tokenized(work, sum(part.truncated for part in parts))
