"""Runs one request: tokenizer threads, the engine, the answer. In a thread that may block, and
on an event loop that may not."""

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from jaxembed.data.inputs import Priority, Text
from jaxembed.data.spec import ModelSpec
from jaxembed.data.work import Work, empty_result, join_results, join_work, work_of
from jaxembed.engine.client import EngineClient, ServedEngine
from jaxembed.engine.host import HostEngine
from jaxembed.engine.ticket import Ticket
from jaxembed.errors import BackendError, InvalidInput
from jaxembed.observability.metrics import ANSWER_STAGES, Telemetry
from jaxembed.observability.tracing import TicketTrace, Trace, current_trace
from jaxembed.preprocessing.images.processor import Processor
from jaxembed.preprocessing.late import join_chunked
from jaxembed.preprocessing.text import Row, TextProcessor, Tokenized, characters
from jaxembed.preprocessing.tokenizer import SHORT_CHARACTERS, chunks
from jaxembed.preprocessing.windows import join_windows
from jaxembed.runtime.requests import Answer, Request, Run, mean

Part = TypeVar("Part")  # what a job makes of some items of a request
Job = Callable[[Row | None, Sequence], Part]  # of what the chunks share, and a chunk
OnSize = Callable[[int, int], object]  # with the numbers of sequences and tokens

# Jobs of one asynchronous request that are submitted at a time, for each thread. Jobs of other
# requests can run between them.
JOBS_A_THREAD = 2


class RequestRunner(ABC):
    """Runs the requests of one model and counts what is answered, until it is closed.

    A small request is one job. A large one is many, a chunk of its items each, so that it shares
    the threads with others; `Request.share` is a job before them. When a request is dropped, its
    jobs that have begun are finished and the others are dropped too.
    """

    def __init__(self, processor: Processor, telemetry: Telemetry, spec: ModelSpec):
        self._processor = processor
        self._telemetry = telemetry
        self._inputs = telemetry.inputs["embed" if spec.task == "embed" else "predict"]
        self._stages = [telemetry.stage.labels(name) for name in ANSWER_STAGES]
        self._spec = spec
        self._closed = False

    def run(self, request: Request[Answer]) -> Answer:
        """Block until the answer is there. Raises the errors of InvalidInput and BackendError."""
        if not request.items:
            return self._nothing(request)
        run = self._run(request)
        self._count(run)
        return request.finish(self._spec, run)

    async def run_async(
        self, request: Request[Answer], on_size: OnSize = lambda sequences, tokens: None
    ) -> Answer:
        """`run` without blocking the event loop. `on_size` is called with the numbers of sequences
        and tokens before the engine computes them; from any thread, and again when there are more.

        If the task is cancelled, what is still queued of the request is dropped.
        """
        if not request.items:
            return self._nothing(request)
        run = await self._run_async(request, on_size)
        self._count(run)
        return request.finish(self._spec, run)

    @abstractmethod
    def _run(self, request: Request) -> Run:
        """Compute a request, and block until that is done."""

    @abstractmethod
    async def _run_async(self, request: Request, on_size: OnSize) -> Run:
        """Compute a request without blocking the event loop."""

    def off_loop(self, call: Callable, *arguments) -> asyncio.Future:
        """Make the call in a tokenizer thread; to be awaited. Raises BackendError when closed."""
        return asyncio.wrap_future(self._in_thread(call, *arguments))

    def close(self) -> None:
        """Take no further request."""
        self._closed = True
        self._processor.executor.shutdown(wait=False)

    def _parts(self, request: Request, job: Job[Part]) -> list[Part]:
        """What the jobs of a request make, in order. Blocks until they are done."""
        if _is_brief(request.items) and not self._closed:
            return self._whole(request, job)
        if _is_one_job(request.items):
            return self._in_thread(self._whole, request, job).result()
        shared = self._in_thread(request.share, self._processor).result()
        parts: list[Future] = []
        try:
            for first, chunk in _chunks(request.items):
                parts.append(self._in_thread(_run_job, job, shared, chunk, first))
            for part in wait(parts, return_when=FIRST_EXCEPTION).done:
                part.result()  # raises what one failed with, while others may wait
            return [part.result() for part in parts]
        except BaseException:
            _cancel(parts)
            raise

    async def _parts_async(self, request: Request, job: Job[Part]) -> list[Part]:
        """`_parts` without blocking the event loop."""
        if _is_brief(request.items) and not self._closed:
            return self._whole(request, job)
        if _is_one_job(request.items):
            return await self.off_loop(self._whole, request, job)
        shared = await self.off_loop(request.share, self._processor)
        turns = asyncio.Semaphore(self._processor.executor.workers * JOBS_A_THREAD)

        async def run(first: int, chunk: Sequence) -> Part:
            async with turns:
                return await self.off_loop(_run_job, job, shared, chunk, first)

        parts = [asyncio.ensure_future(run(*chunk)) for chunk in _chunks(request.items)]
        try:
            return await asyncio.gather(*parts)
        except BaseException:
            _cancel(parts)
            raise

    def _whole(self, request: Request, job: Job[Part]) -> list[Part]:
        """The one job of a small request."""
        return [job(request.share(self._processor), request.items)]

    def _in_thread(self, call: Callable, *arguments) -> Future:
        try:
            return self._processor.executor.submit(call, *arguments)
        except RuntimeError as error:  # it was shut down
            raise BackendError("this Embedder is closed") from error

    def _nothing(self, request: Request[Answer]) -> Answer:
        """The answer to a request without items."""
        nothing = work_of([], request.outputs)
        values = empty_result(nothing, self._spec.widths)
        return request.finish(self._spec, Run(values, Tokenized(nothing, 0), 0.0, [], []))

    def _count(self, run: Run) -> None:
        tokenized = run.tokenized
        count = len(tokenized.work)
        if tokenized.truncated:
            self._telemetry.truncated_inputs.inc(tokenized.truncated)
        self._telemetry.input_length.observe_many(tokenized.work.lengths.tolist())
        self._inputs.observe_many(run.tokenization_s / count, run.queue_s, run.inference_s)
        tokenized_stage, queue_stage, inference_stage = self._stages
        tokenized_stage.observe(run.tokenization_s)
        queue_stage.observe(mean(run.queue_s))
        inference_stage.observe(mean(run.inference_s))


class QueueRunner(RequestRunner):
    """Tokenizes a request in its jobs, and queues it as a whole with an engine."""

    def __init__(
        self,
        processor: Processor,
        engine: EngineClient,
        telemetry: Telemetry,
        spec: ModelSpec,
    ):
        super().__init__(processor, telemetry, spec)
        self._engine = engine

    def _run(self, request: Request) -> Run:
        started_at = time.monotonic()
        parts = self._parts(request, partial(request.prepare, self._processor))
        tokenized = _join(parts, request)
        tokenization_s = time.monotonic() - started_at
        ticket = self._engine.submit(tokenized.work, priority=request.priority)
        try:
            ticket.result()
        except BaseException:
            self._engine.cancel(ticket)
            raise
        return _run_of(ticket, tokenized, tokenization_s)

    async def _run_async(self, request: Request, on_size: OnSize) -> Run:
        started_at = time.monotonic()
        parts = await self._parts_async(request, partial(request.prepare, self._processor))
        tokenized = _join(parts, request)
        tokenized_at = time.monotonic()
        on_size(len(tokenized.work), tokenized.work.tokens)
        trace = current_trace()
        if trace is not None:
            trace.note("tokenize", started_at, tokenized_at)
        ticket = await self._submit(tokenized.work, request.priority, trace)
        return _run_of(ticket, tokenized, tokenized_at - started_at)

    async def _submit(self, work: Work, priority: Priority | None, trace: Trace | None) -> Ticket:
        """Submit the work and wait for its ticket; the engine wakes the event loop once."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_wake, done)

        noted = None if trace is None else TicketTrace(trace)
        ticket = self._engine.submit(work, wake, priority, noted)
        try:
            await done
        except asyncio.CancelledError:
            self._engine.cancel(ticket)
            raise
        finally:
            if noted is not None:
                noted.finish()
        ticket.result(timeout_s=0.0)
        return ticket


class HostRunner(RequestRunner):
    """Tokenizes and computes a request in its jobs, so that each thread computes what it has just
    tokenized, while others tokenize."""

    def __init__(
        self, processor: TextProcessor, engine: HostEngine, telemetry: Telemetry, spec: ModelSpec
    ):
        super().__init__(processor, telemetry, spec)
        self._engine = engine

    def _run(self, request: Request) -> Run:
        job = partial(self._compute, request, None, None)
        return _join_runs(self._parts(request, job), request)

    async def _run_async(self, request: Request, on_size: OnSize) -> Run:
        tally = _Tally(self._processor.estimate(request.inputs(), request.rules), on_size)
        job = partial(self._compute, request, tally, current_trace())
        return _join_runs(await self._parts_async(request, job), request)

    def _compute(
        self,
        request: Request,
        tally: "_Tally | None",
        trace: Trace | None,
        shared: Row | None,
        chunk: Sequence,
    ) -> Run:
        started_at = time.monotonic()
        tokenized = _join([request.prepare(self._processor, shared, chunk)], request)
        work = tokenized.work
        if tally is not None:
            tally.add(len(work), work.tokens)
        tokenized_at = time.monotonic()
        values = self._engine.compute(work)
        computed_at, count = time.monotonic(), len(work)
        if trace is not None:
            trace.note("tokenize", started_at, tokenized_at)
            trace.note("device", tokenized_at, computed_at)
        waited, ran = [0.0] * count, [computed_at - tokenized_at] * count
        return Run(values, tokenized, tokenized_at - started_at, waited, ran)


class _Tally:
    """Adds up the sizes of the jobs of a request, and tells when they are more than estimated."""

    def __init__(self, estimate: tuple[int, int], on_size: OnSize):
        self._told, self._on_size = estimate, on_size
        self._sequences = self._tokens = 0
        self._lock = threading.Lock()

    def add(self, sequences: int, tokens: int) -> None:
        """Add the size of a job. Raises what `on_size` does."""
        with self._lock:
            self._sequences += sequences
            self._tokens += tokens
            told = max(self._sequences, self._told[0]), max(self._tokens, self._told[1])
            if told != self._told:
                self._told = told
                self._on_size(*told)


def runner_of(
    engine: ServedEngine,
    processor: Processor,
    telemetry: Telemetry,
    spec: ModelSpec,
) -> RequestRunner:
    """The runner for the requests to an engine."""
    if isinstance(engine, HostEngine):
        assert isinstance(processor, TextProcessor)
        return HostRunner(processor, engine, telemetry, spec)
    assert isinstance(engine, EngineClient)
    return QueueRunner(processor, engine, telemetry, spec)


def _is_one_job(items: Sequence) -> bool:
    return len(items) == 1 or len(list(islice(_chunks(items), 2))) == 1


def _chunks(items: Sequence) -> Iterator[tuple[int, list]]:
    """For each chunk: the index of its first item, and its items."""
    first = 0
    for chunk in chunks(items, characters):
        yield first, chunk
        first += len(chunk)


def _is_brief(items: Sequence) -> bool:
    """Whether to tokenize in the calling thread: another costs 200 us, a short query 15 us."""
    return len(items) == 1 and isinstance(items[0], Text) and len(items[0].text) <= SHORT_CHARACTERS


def _run_job(job: Job[Part], shared: Row | None, chunk: Sequence, first: int) -> Part:
    """Run the job of the items from number `first` on; an error names its item by that number."""
    try:
        return job(shared, chunk)
    except InvalidInput as error:
        raise error.at(first + (error.index or 0)) from error


def _wake(future: asyncio.Future) -> None:
    if not future.done():  # it may be cancelled
        future.set_result(None)


def _cancel(parts: Iterable[Future | asyncio.Future]) -> None:
    for part in parts:
        part.cancel()


def _join(parts: Sequence[Tokenized], request: Request) -> Tokenized:
    work = join_work([part.work for part in parts], request.outputs, request.adapter)
    if len(parts) == 1:
        (part,) = parts
        if work is part.work:
            return part
        return Tokenized(work, part.truncated, part.windows, part.chunked)
    truncated = sum([part.truncated for part in parts])
    windows = join_windows([part.windows for part in parts])
    return Tokenized(work, truncated, windows, join_chunked([part.chunked for part in parts]))


def _run_of(ticket: Ticket, tokenized: Tokenized, tokenization_s: float) -> Run:
    """What a request that was queued came to."""
    times = ticket.queue_s.tolist(), ticket.inference_s.tolist()
    return Run(ticket.values, tokenized, tokenization_s, *times, ticket.withdrawn)


def _join_runs(parts: Sequence[Run], request: Request) -> Run:
    """The results of all jobs of a request, in order."""
    if len(parts) == 1:
        return parts[0]
    return Run(
        join_results([part.values for part in parts]),
        _join([part.tokenized for part in parts], request),
        sum(part.tokenization_s for part in parts),
        list(chain.from_iterable(part.queue_s for part in parts)),
        list(chain.from_iterable(part.inference_s for part in parts)),
    )
