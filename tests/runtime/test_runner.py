"""Jobs of a request in tokenizer threads: small ones, dropped where nobody wants them any more."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import WAIT_S

from jaxembed.data.inputs import Text
from jaxembed.data.work import Encoding, work_from_encodings
from jaxembed.errors import InputTooLong
from jaxembed.preprocessing.job_threads import JobThreads
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions, Tokenized
from jaxembed.preprocessing.tokenizer import JOB_CHARACTERS
from jaxembed.runtime.requests import Request
from jaxembed.runtime.runner import JOBS_A_THREAD, QueueRunner

LONG = Text("x" * JOB_CHARACTERS)  # a job by itself
OUTPUTS = frozenset({"dense"})
RULES = TokenizationOptions("", truncate=True, side="right")


class Plain(Request):
    """A request whose tokenizing a worker does, and whose answer are the tokens."""

    def prepare(self, processor, shared, chunk):
        return processor.worker.tokenize(chunk)

    def finish(self, spec, run):
        return run.tokenized


class WorkersProcessor(TextProcessor):
    """Has the threads of a worker, and nothing else."""

    def __init__(self, worker: "OneWorker"):
        self.worker = worker
        self.executor = worker.executor


class OneWorker:
    """A runner with one tokenizer thread, in which `tokenize` says what is done."""

    def __init__(self, embedder):
        self.executor = JobThreads(1, "tokenize")
        processor = WorkersProcessor(self)
        self.runner = QueueRunner(
            processor, embedder.model.main.engine, embedder.model.telemetry, embedder.spec
        )
        self.begun: list[int] = []  # inputs of each job
        self.entered, self.gate = threading.Event(), threading.Event()

    def request(self, items: Sequence[Text]) -> Request:
        return Plain(items, RULES, OUTPUTS, None)

    def tokenize(self, chunk: Sequence[Text]) -> Tokenized:
        self.begun.append(len(chunk))
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return Tokenized(work_from_encodings([Encoding(np.full(2, 5, np.int32)) for _ in chunk]), 0)

    def finish(self) -> list[int]:
        """The jobs that were begun, when there is nothing left to do."""
        self.gate.set()
        self.executor.shutdown()
        return self.begun


def answer(worker: OneWorker, way: str, request: Request):
    run = getattr(worker.runner, way)
    return asyncio.run(run(request)) if way == "run_async" else run(request)


@pytest.fixture(name="worker")
def _worker(embedder):
    worker = OneWorker(embedder)
    yield worker
    worker.finish()


@pytest.mark.parametrize("way", ["run", "run_async"])
def test_inputs_of_many_characters_are_several_jobs(worker, way):
    short = Text("x" * (JOB_CHARACTERS // 4))
    worker.gate.set()
    assert len(answer(worker, way, worker.request([LONG, short, short, LONG])).work.encodings) == 4
    assert worker.finish() == [1, 2, 1]


def test_of_a_cancelled_request_only_the_job_that_has_begun_is_finished(worker):
    async def scenario() -> None:
        task = asyncio.create_task(worker.runner.run_async(worker.request([LONG] * 9)))
        assert await asyncio.to_thread(worker.entered.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert worker.finish() == [1]


@pytest.mark.parametrize("count", [1, 9])
def test_a_request_that_is_cancelled_before_its_turn_does_nothing(worker, count):
    async def scenario() -> None:
        worker.executor.submit(worker.gate.wait, WAIT_S)
        task = asyncio.create_task(worker.runner.run_async(worker.request([LONG] * count)))
        await asyncio.sleep(0)  # its first job is queued
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert worker.finish() == []


@pytest.mark.parametrize("way", ["run", "run_async"])
def test_a_job_that_fails_takes_along_those_that_have_not_begun(monkeypatch, worker, way):
    def fail_first(chunk: Sequence[Text]) -> Tokenized:
        if not worker.begun:
            worker.begun.append(len(chunk))
            raise InputTooLong(8, 9)
        return worker.tokenize(chunk)

    monkeypatch.setattr(Plain, "prepare", lambda self, processor, shared, chunk: fail_first(chunk))
    with pytest.raises(InputTooLong):
        answer(worker, way, worker.request([LONG] * 9))
    assert len(worker.finish()) <= 2  # the second may have begun by then


def test_jobs_of_others_come_between_those_of_a_large_request(worker):
    async def scenario() -> None:
        large = asyncio.create_task(worker.runner.run_async(worker.request([LONG] * 9)))
        assert await asyncio.to_thread(worker.entered.wait, WAIT_S)
        other = asyncio.create_task(worker.runner.run_async(worker.request([Text("x")] * 2)))
        await asyncio.sleep(0)  # its job is queued
        worker.gate.set()
        await asyncio.gather(large, other)

    asyncio.run(scenario())
    assert worker.begun.index(2) <= JOBS_A_THREAD
