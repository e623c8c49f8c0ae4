"""Runs one request: tokenizer threads, the engine, the answer. In a thread that may block, and
on an event loop that may not."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import islice

from jaxembed.engine.client import EngineClient
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError, InvalidInput
from jaxembed.inputs import Priority, Text
from jaxembed.processors.text import Row, TextProcessor, Tokenized, characters
from jaxembed.processors.tokenizer import SHORT_CHARACTERS, chunks
from jaxembed.request import Answer, Request, Run
from jaxembed.spec import ModelSpec, Task
from jaxembed.telemetry import ANSWER_STAGES, Telemetry
from jaxembed.work import Work, join_work, work_of


class RequestRunner:
    """Runs the requests of one model and counts what is answered, until it is closed.

    A small request is tokenized in one job. For a large one `Request.share` is a job, and then
    `Request.prepare` of each chunk, so that a huge query keeps one tokenizer thread busy and not
    all of them. When a request is dropped, its jobs that have begun are finished and the others are
    dropped too.
    """

    def __init__(
        self,
        processor: TextProcessor,
        engine: EngineClient,
        telemetry: Telemetry,
        spec: ModelSpec,
    ):
        self._processor = processor
        self._engine = engine
        self._telemetry = telemetry
        self._series = _series(telemetry, spec.task)
        self._stages = [(f"{name}_s", telemetry.stage.labels(name)) for name in ANSWER_STAGES]
        self._spec = spec
        self._closed = False

    def run(self, request: Request[Answer]) -> Answer:
        """Block until the answer is there. Raises the errors of InvalidInput and BackendError."""
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
        return request.finish(self._spec, self._count(Run(ticket, tokenized, tokenization_s)))

    async def run_async(
        self,
        request: Request[Answer],
        on_tokens: Callable[[int], object] = lambda tokens: None,
    ) -> Answer:
        """`run` without blocking the event loop. `on_tokens` is called with the number of tokens
        before they are queued.

        If the task is cancelled, what is still queued of the request is dropped.
        """
        if not request.items:
            return self._nothing(request)
        started_at = time.monotonic()
        tokenized = await self._tokenize_async(request)
        tokenization_s = time.monotonic() - started_at
        on_tokens(tokenized.work.tokens)
        ticket = await self._submit(tokenized.work, request.priority)
        return request.finish(self._spec, self._count(Run(ticket, tokenized, tokenization_s)))

    def off_loop(self, call: Callable, *arguments) -> asyncio.Future:
        """Make the call in a tokenizer thread; to be awaited. Raises BackendError when closed."""
        return asyncio.wrap_future(self._in_thread(call, *arguments))

    def close(self) -> None:
        """Take no further request."""
        self._closed = True
        self._processor.executor.shutdown(wait=False)

    def _tokenize(self, request: Request) -> Tokenized:
        if _is_brief(request.items) and not self._closed:
            return self._prepare_whole(request)
        if _is_one_job(request.items):
            return self._in_thread(self._prepare_whole, request).result()
        shared = self._in_thread(request.share, self._processor).result()
        prepare = partial(self._prepare_chunk, request, shared)
        parts: list[Future] = []
        try:
            for first, chunk in _jobs(request.items):
                parts.append(self._in_thread(prepare, chunk, first))
            for part in wait(parts, return_when=FIRST_EXCEPTION).done:
                part.result()  # raises what one failed with, while others may wait
            return _join([part.result() for part in parts], request)
        except BaseException:
            _cancel(parts)
            raise

    async def _tokenize_async(self, request: Request) -> Tokenized:
        if _is_brief(request.items) and not self._closed:
            return self._prepare_whole(request)
        if _is_one_job(request.items):
            return await self.off_loop(self._prepare_whole, request)
        shared = await self.off_loop(request.share, self._processor)
        prepare = partial(self._prepare_chunk, request, shared)
        parts: list[asyncio.Future] = []
        try:
            for first, chunk in _jobs(request.items):
                parts.append(self.off_loop(prepare, chunk, first))
            return _join(await asyncio.gather(*parts), request)
        except BaseException:
            _cancel(parts)
            raise

    def _prepare_whole(self, request: Request) -> Tokenized:
        shared = request.share(self._processor)
        whole = request.prepare(self._processor, shared, request.items)
        return _join([whole], request)

    def _prepare_chunk(
        self, request: Request, shared: Row | None, chunk: Sequence, first: int
    ) -> Tokenized:
        """Tokenize the items from number `first` on; an error names its item by that number."""
        try:
            return request.prepare(self._processor, shared, chunk)
        except InvalidInput as error:
            error.index = first + (error.index or 0)
            raise

    def _in_thread(self, call: Callable, *arguments) -> Future:
        try:
            return self._processor.executor.submit(call, *arguments)
        except RuntimeError as error:  # it was shut down
            raise BackendError("this Embedder is closed") from error

    async def _submit(self, work: Work, priority: Priority | None) -> Ticket:
        """Submit the work and wait for its ticket; the engine wakes the event loop once."""
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
        """The answer to a request without items."""
        nothing = work_of([], request.outputs)
        ticket = Ticket(nothing, self._spec.widths)
        return request.finish(self._spec, Run(ticket, Tokenized(nothing, 0), 0.0))

    def _count(self, run: Run) -> Run:
        telemetry, ticket, figures = self._telemetry, run.ticket, run.figures
        count = len(figures["num_tokens"])
        telemetry.truncated_inputs.inc(figures["truncated"])
        telemetry.input_length.observe_many(figures["num_tokens"].tolist())
        done, succeeded, *durations = self._series
        done.inc(count)
        succeeded.inc(count)
        each = (
            [run.tokenization_s / count] * count,
            ticket.queue_s.tolist(),
            ticket.inference_s.tolist(),
        )
        total = [sum(parts) for parts in zip(*each, strict=True)]
        for duration, seconds in zip(durations, (*each, total), strict=True):
            duration.observe_many(seconds)
        for name, stage in self._stages:
            stage.observe(figures[name])
        return run


def _series(telemetry: Telemetry, task: Task) -> tuple:
    """The metrics of a task: two counters and four durations, as TEI names them."""
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
    """For each job: the index of its first item, and its items."""
    first = 0
    for chunk in chunks(items, characters):
        yield first, chunk
        first += len(chunk)


def _is_brief(items: Sequence) -> bool:
    """Whether to tokenize in the calling thread: another costs 200 us, a short query 15 us."""
    return len(items) == 1 and isinstance(items[0], Text) and len(items[0].text) <= SHORT_CHARACTERS


def _finish(future: asyncio.Future) -> None:
    if not future.done():  # it may be cancelled
        future.set_result(None)


def _cancel(parts: Iterable[Future | asyncio.Future]) -> None:
    for part in parts:
        part.cancel()


def _join(parts: Sequence[Tokenized], request: Request) -> Tokenized:
    work = join_work([part.work for part in parts], request.outputs, request.adapter)
    return Tokenized(work, sum(part.truncated for part in parts))
