"""Runs the requests of a model: admits them, tokenizes them in threads, lets the engine compute
them, and makes the answers. Requests can run with or without blocking the calling thread."""

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import numpy as np

from jaxembed.data.inputs import Text
from jaxembed.data.spec import IMAGE_ROUTE, ModelSpec
from jaxembed.data.work import (
    Work,
    WorkResult,
    empty_result,
    join_results,
    join_work,
    work_from_encodings,
)
from jaxembed.engine.admission import Admission, Cost, Permit, Reservation
from jaxembed.errors import BackendError, InvalidInput, NoInputs
from jaxembed.observability.metrics import ANSWER_STAGES, Telemetry
from jaxembed.observability.tracing import FutureTrace, Trace, current_trace
from jaxembed.preprocessing.images.processor import Processor
from jaxembed.preprocessing.text import TextProcessor, Tokenized, characters
from jaxembed.preprocessing.tokenizer import SHORT_CHARACTERS, chunks
from jaxembed.preprocessing.windows import join_chunked, join_windows
from jaxembed.runtime.options import Embeddings, RequestStats
from jaxembed.runtime.requests import (
    Answer,
    AnyRequest,
    DividedRequest,
    EncodeRequest,
    Request,
    Run,
    Shared,
    excess_bytes,
)

if TYPE_CHECKING:  # front-end processes import no JAX
    from jaxembed.engine.engine import Engine
    from jaxembed.engine.host import HostEngine

Part = TypeVar("Part")  # the result of a job
Job = Callable[[Shared, Sequence], Part]  # called with the result of `Request.share`, a chunk

# The number of jobs of one asynchronous request that are submitted at a time, for each thread. Jobs
# of other requests run between these jobs.
JOBS_A_THREAD = 2
IMAGES_A_PART = 64  # a blocking request for more images is divided into parts of this size
PARTS_AT_ONCE = 2  # parts that run at a time: one is decoded while another is computed


class RequestRunner(ABC):
    """Runs the requests of one route in the threads of its processor, and counts the answers.

    A small request is one job. A large request has a job for `Request.share`, and then a job for
    each chunk of its items, so that jobs of other requests run between these. When a request is
    dropped, jobs that have begun finish, and the other jobs are dropped.
    """

    def __init__(self, processor: Processor, telemetry: Telemetry, spec: ModelSpec):
        self.processor, self.spec = processor, spec
        self._telemetry = telemetry
        self._inputs = telemetry.inputs["embed" if spec.task == "embed" else "predict"]
        self._stages = [telemetry.stage.labels(name) for name in ANSWER_STAGES]
        self._closed = False

    def run(self, request: Request[Answer]) -> Answer:
        """Run a request, and block until it is answered. Raises InvalidInput, TokenizerError or
        BackendError."""
        if not request.items:
            return self._empty_answer(request)
        return self._answer(request, self._run(request))

    async def run_async(self, request: Request[Answer], permit: Permit | None = None) -> Answer:
        """Run a request without blocking the event loop.

        The cost that `permit` counts is corrected before the engine computes, and again if it
        grows. If the asyncio task is cancelled, queued work is dropped. Raises InvalidInput,
        TokenizerError, BackendError, and the errors of `Permit.correct`.
        """
        if not request.items:
            return self._empty_answer(request)
        return self._answer(request, await self._run_async(request, permit))

    @abstractmethod
    def _run(self, request: Request) -> Run:
        """Tokenize and compute a request, and block until that is done."""

    @abstractmethod
    async def _run_async(self, request: Request, permit: Permit | None) -> Run:
        """Tokenize and compute a request without blocking the event loop."""

    def off_loop(self, call: Callable, *arguments) -> asyncio.Future:
        """Call a function in a tokenizer thread, off the event loop, and return a future of its
        result. Raises BackendError when closed."""
        return asyncio.wrap_future(self._submit(call, *arguments))

    def close(self) -> None:
        """Refuse further requests."""
        self._closed = True
        self.processor.executor.shutdown(wait=False)

    def _run_short(self, request: Request, job: Job[Part]) -> list[Part] | None:
        """Run the only job of a request for one short text in the calling thread, because another
        thread would cost 200 us, and a short query 15 us. Return the job's result in a list, or
        None for any other request."""
        items = request.items
        if len(items) != 1 or not isinstance(items[0], Text) or self._closed:
            return None
        return [job(None, items)] if len(items[0].text) <= SHORT_CHARACTERS else None

    def _run_jobs(self, request: Request, job: Job[Part]) -> list[Part]:
        """Run the jobs of a request in tokenizer threads, and block until they are done. Return
        their results in order. If a job fails, drop the other jobs and raise the job's error."""
        if _is_one_job(request.items):
            return self._submit(self._run_single_job, request, job).result()
        # what all chunks share, such as the tokens of a query
        shared = self._submit(request.share, self.processor).result()
        futures: list[Future] = []
        try:
            for first, chunk in _chunks(request.items):
                futures.append(self._submit(_run_job, job, shared, chunk, first))
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()  # raises the error of a failed job at once
            return [future.result() for future in futures]
        except BaseException:
            _cancel(futures)
            raise

    async def _run_jobs_async(self, request: Request, job: Job[Part]) -> list[Part]:
        """Run the jobs of a request as `_run_jobs` does, without blocking the event loop."""
        if _is_one_job(request.items):
            return await self.off_loop(self._run_single_job, request, job)
        shared = await self.off_loop(request.share, self.processor)
        permits = asyncio.Semaphore(self.processor.executor.workers * JOBS_A_THREAD)

        async def run(first: int, chunk: Sequence) -> Part:
            async with permits:
                return await self.off_loop(_run_job, job, shared, chunk, first)

        tasks = [asyncio.ensure_future(run(*chunk)) for chunk in _chunks(request.items)]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            _cancel(tasks)
            raise

    def _run_single_job(self, request: Request, job: Job[Part]) -> list[Part]:
        """Run the only job of a small request. Return a list with its result."""
        return [job(request.share(self.processor), request.items)]

    def _submit(self, call: Callable, *arguments) -> Future:
        try:
            return self.processor.executor.submit(call, *arguments)
        except RuntimeError as error:  # it was shut down
            raise BackendError("this Embedder is closed") from error

    def _empty_answer(self, request: Request[Answer]) -> Answer:
        """Return the answer to a request without items."""
        nothing = work_from_encodings([], request.outputs)
        values = empty_result(nothing, self.spec.widths)
        return request.finish(self.spec, Run(values, Tokenized(nothing, 0), 0.0, [], []))

    def _answer(self, request: Request[Answer], run: Run) -> Answer:
        """Record the results of a request in the metrics, and make its answer from them."""
        tokenized, telemetry = run.tokenized, self._telemetry
        inputs = len(tokenized.work)
        if tokenized.truncated:
            telemetry.truncated_inputs.inc(tokenized.truncated)
        telemetry.input_length.observe_many(tokenized.work.lengths.tolist())
        self._inputs.observe_many(run.tokenization_s / inputs, run.queue_s, run.inference_s)
        # seconds of tokenization for all inputs together; means over the inputs of the other stages
        stage_seconds = run.tokenization_s, sum(run.queue_s) / inputs, sum(run.inference_s) / inputs
        for stage, seconds in zip(self._stages, stage_seconds, strict=True):
            stage.observe(seconds)
        return request.finish(self.spec, run)


class Computed(NamedTuple):
    """The result of an engine for some work. Times have an element for each sequence."""

    values: WorkResult
    queue_s: list[float]
    inference_s: list[float]
    cached: int  # number of sequences that the cache answered


class TokenizingRunner(RequestRunner):
    """Tokenizes a request in jobs, and then has it computed as a whole."""

    @abstractmethod
    async def _compute_async(
        self, work: Work, request: Request, permit: Permit | None, trace: FutureTrace | None
    ) -> Computed:
        """Have the work of a request computed, without blocking the event loop."""

    async def _run_async(self, request: Request, permit: Permit | None) -> Run:
        started_at = time.monotonic()
        job = partial(request.prepare, self.processor)
        parts = self._run_short(request, job) or await self._run_jobs_async(request, job)
        tokenized = _join_chunks(parts, request)
        work, tokenized_at = tokenized.work, time.monotonic()
        if permit is not None:
            permit.correct(request.cost(self.spec, len(work), work.tokens))
        trace, engine_trace = current_trace(), None
        if trace is not None:
            trace.note("tokenize", started_at, tokenized_at)
            engine_trace = FutureTrace(trace)
        try:
            done = await self._compute_async(work, request, permit, engine_trace)
        finally:
            if engine_trace is not None:
                engine_trace.finish()
        times = tokenized_at - started_at, done.queue_s, done.inference_s
        return Run(done.values, tokenized, *times, cached=done.cached)


class QueueRunner(TokenizingRunner):
    """Runs requests on an Engine, which queues them."""

    def __init__(
        self, processor: Processor, engine: "Engine", telemetry: Telemetry, spec: ModelSpec
    ):
        super().__init__(processor, telemetry, spec)
        self._engine = engine

    def _run(self, request: Request) -> Run:
        """Tokenize a request, queue it with the engine, and block until it is computed."""
        started_at = time.monotonic()
        job = partial(request.prepare, self.processor)
        tokenized = _join_chunks(
            self._run_short(request, job) or self._run_jobs(request, job), request
        )
        tokenization_s = time.monotonic() - started_at
        engine, work, priority = self._engine, tokenized.work, request.priority
        future = engine.compute_here(work, priority) or engine.submit(work, priority=priority)
        try:
            future.result()
        except BaseException:
            engine.cancel(future)
            raise
        times = future.queue_s.tolist(), future.inference_s.tolist()
        return Run(future.values, tokenized, tokenization_s, *times, cached=future.cached_inputs)

    async def _compute_async(
        self, work: Work, request: Request, permit: Permit | None, trace: FutureTrace | None
    ) -> Computed:
        """Queue the work, and wait until the engine calls `wake`."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:  # the engine calls it once
            with contextlib.suppress(RuntimeError):  # if the loop is closed, nobody waits
                loop.call_soon_threadsafe(_wake, done)

        future = self._engine.submit(work, wake, request.priority, trace, loop.call_soon)
        try:
            await done
        except asyncio.CancelledError:
            self._engine.cancel(future)
            raise
        values = future.result(timeout_s=0.0)  # raises its error, if any
        times = future.queue_s.tolist(), future.inference_s.tolist()
        return Computed(values, *times, cached=future.cached_inputs)


class HostRunner(RequestRunner):
    """Runs requests on a HostEngine: each job tokenizes a chunk and then computes it."""

    def __init__(
        self, processor: TextProcessor, engine: "HostEngine", telemetry: Telemetry, spec: ModelSpec
    ):
        super().__init__(processor, telemetry, spec)
        self._engine = engine

    def _run(self, request: Request) -> Run:
        job = partial(self._compute, request, None, None)  # `add` and `trace` are None
        return _join_runs(self._run_short(request, job) or self._run_jobs(request, job), request)

    async def _run_async(self, request: Request, permit: Permit | None) -> Run:
        # Two pairs of numbers of sequences and tokens: those that admission knows, and the sums
        # over the jobs so far.
        told, sums = self.processor.estimate(request.inputs(), request.tokenization), (0, 0)
        lock = threading.Lock()

        def add(work: Work) -> None:
            """Add the size of a job to the sums, and correct the permit if they exceed `told`."""
            nonlocal told, sums
            with lock:
                sums = sums[0] + len(work), sums[1] + work.tokens
                larger = max(sums[0], told[0]), max(sums[1], told[1])
                if larger != told and permit is not None:
                    permit.correct(request.cost(self.spec, *larger))
                told = larger

        job = partial(self._compute, request, add, current_trace())
        parts = self._run_short(request, job) or await self._run_jobs_async(request, job)
        return _join_runs(parts, request)

    def _compute(
        self,
        request: Request,
        add: Callable[[Work], None] | None,
        trace: Trace | None,
        shared: Shared,
        chunk: Sequence,
    ) -> Run:
        """Tokenize a chunk of a request and compute it in this thread.

        `shared` is the result of `request.share`. `add` is called with the work before it is
        computed, to count its tokens. The times are added to `trace`.
        """
        started_at = time.monotonic()
        # joining even a single chunk sets the outputs and the adapter of its work
        tokenized = _join_chunks([request.prepare(self.processor, shared, chunk)], request)
        work = tokenized.work
        if add is not None:
            add(work)
        tokenized_at = time.monotonic()
        values = self._engine.compute(work)
        computed_at, count = time.monotonic(), len(work)
        if trace is not None:
            trace.note("tokenize", started_at, tokenized_at)
            trace.note("device", tokenized_at, computed_at)
        queue_s, inference_s = [0.0] * count, [computed_at - tokenized_at] * count
        return Run(values, tokenized, tokenized_at - started_at, queue_s, inference_s)


class Dispatcher:
    """Runs requests on the routes of one model. A server calls `answer`, which admits requests; the
    library calls `run` and `run_async`, which run them without admission."""

    def __init__(self, runners: Mapping[str, RequestRunner], admission: Admission):
        self._runners, self.admission = runners, admission

    def run(self, request: AnyRequest[Answer]) -> Answer:
        """Run a request without admission, and block until it is answered. Raises InvalidInput,
        TokenizerError or BackendError."""
        if isinstance(request, DividedRequest):
            return self._run_parts(request)
        is_long = request.route == IMAGE_ROUTE and len(request.items) > IMAGES_A_PART
        if is_long and isinstance(request, EncodeRequest):
            # the images of one part are decoded while those of another part are computed
            return self._run_parts(DividedRequest.by_size(request, IMAGES_A_PART))
        return self._runners[request.route].run(request)

    def _run_parts(self, request: DividedRequest[Answer]) -> Answer:
        """Run the parts of a request, PARTS_AT_ONCE at a time, and join their answers. An
        InvalidInput of a part is raised with the index of its input in the whole request."""

        def run(index: int) -> Answer:
            with request.part(index) as part:
                return self.run(part)

        threads = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="parts")
        try:
            return request.joined(list(threads.map(run, range(len(request.parts)))))
        finally:
            threads.shutdown(cancel_futures=True)

    async def run_async(self, request: AnyRequest[Answer]) -> Answer:
        """Run a request without admission and without blocking the event loop. If the asyncio task
        is cancelled, queued work of the request is dropped. Raises the errors of `run`."""
        if isinstance(request, DividedRequest):
            return await self._answer_parts(request, self.run_async)
        return await self._runners[request.route].run_async(request)

    async def admit(
        self, cost: Cost, reservation: Reservation | None, *, is_run: bool = True
    ) -> Permit:
        """Admit a request as `Admission.admit` does."""
        return self.admission.admit(cost, reservation, is_run=is_run)

    async def answer(
        self, request: AnyRequest[Answer], reservation: Reservation | None = None
    ) -> Answer:
        """Admit a request, run it without blocking the event loop, and return its answer.

        `reservation` counts the memory of the HTTP request that this request is a part of; None
        means that it is a whole request. The account of the reservation, if any, is charged for the
        tokens. Raises NoInputs and the errors of `run`. Raises Overloaded, QuotaExceeded,
        RequestTooLarge or ShuttingDown before any work, and Overloaded or RequestTooLarge also
        later, if the request needs more memory than was estimated.
        """
        if isinstance(request, DividedRequest):
            answer_part = partial(self.answer, reservation=reservation)
            return await self._answer_parts(request, answer_part)
        if not request.items:
            raise NoInputs()
        runner = self._runners[request.route]
        estimate = runner.processor.estimate(request.inputs(), request.tokenization)
        cost = request.cost(runner.spec, *estimate)
        with await self.admit(cost, reservation) as permit:
            answer = await runner.run_async(request, permit)
            if isinstance(answer, Embeddings) and "sparse" in answer.values:
                # the answer may have more terms than the cost assumes
                count = excess_bytes(answer)
                await permit.reservation.make_room(count)
                permit.reservation.charge(count)
            if isinstance(answer, RequestStats):
                permit.charge_answer(answer.total_tokens)
            return answer

    async def _answer_parts(
        self,
        request: DividedRequest[Answer],
        answer: Callable[[Request[Answer]], Awaitable[Answer]],
    ) -> Answer:
        """Call `answer` for each part of a request, one after the other, and join the answers. An
        InvalidInput of a part is raised with the index of its input in the whole request."""
        answers: list[Answer] = []
        for index in range(len(request.parts)):
            with request.part(index) as part:
                answers.append(await answer(part))
        return request.joined(answers)


def _is_one_job(items: Sequence) -> bool:
    return len(items) == 1 or len(list(islice(_chunks(items), 2))) == 1


def _chunks(items: Sequence) -> Iterator[tuple[int, list]]:
    """Yield the chunk of each job: the index of its first item, and its items."""
    first = 0
    for chunk in chunks(items, characters):
        yield first, chunk
        first += len(chunk)


def _run_job(job: Job[Part], shared: Shared, chunk: Sequence, first: int) -> Part:
    """Run a job on a chunk, whose first item has the index `first` in the request. An InvalidInput
    of the job is raised with the index of its item in the request."""
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


def _join_chunks(parts: Sequence[Tokenized], request: Request) -> Tokenized:
    """Join the tokenized chunks of a request, in order, as work for its outputs and adapter."""
    work = join_work([part.work for part in parts], request.outputs, request.adapter)
    if len(parts) == 1:
        (part,) = parts
        if work is part.work:
            return part
        return msgspec.structs.replace(part, work=work)
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Tokenized(
        work,
        sum(part.truncated for part in parts),
        join_windows([part.windows for part in parts]),
        join_chunked([part.chunked for part in parts]),
        np.concatenate(offsets) if offsets else None,
    )


def _join_runs(parts: Sequence[Run], request: Request) -> Run:
    """Join the results of all jobs of a request, in order. No input was answered from a cache."""
    if len(parts) == 1:
        return parts[0]
    return Run(
        join_results([part.values for part in parts]),
        _join_chunks([part.tokenized for part in parts], request),
        sum(part.tokenization_s for part in parts),
        list(chain.from_iterable(part.queue_s for part in parts)),
        list(chain.from_iterable(part.inference_s for part in parts)),
    )
