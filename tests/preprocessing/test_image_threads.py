"""The threads that decode images: what waits for what."""

import gc
import threading
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
from conftest import TOWERS, tiny_spec
from dual_sources import picture, png
from fakes import WAIT_S, until

from jaxembed.data.inputs import Image
from jaxembed.errors import BackendError, InvalidImage
from jaxembed.preprocessing.images import processor as images
from jaxembed.preprocessing.images.processor import ImageProcessor
from jaxembed.preprocessing.text import TokenizationOptions

pytest.importorskip("PIL")

SMALL, LARGE = png(picture(1, 20, 20)), png(picture(2, 60, 60))
RULES = TokenizationOptions("", truncate=True, side="right")


class Gate:
    """Decodes an image, a large one only after `open` is set. Counts those that are held."""

    def __init__(self, decode):
        self.open = threading.Event()
        self.arrived = threading.Semaphore(0)
        self.held = self.max_held = 0
        self._lock = threading.Lock()
        self._decode = decode

    def __call__(self, data: bytes):
        if data == LARGE:
            with self._lock:
                self.held += 1
                self.max_held = max(self.max_held, self.held)
            self.arrived.release()
            assert self.open.wait(WAIT_S)
            with self._lock:
                self.held -= 1
        return self._decode(data)


@pytest.fixture(name="gate")
def _gate(monkeypatch):
    gate = Gate(images.decode_image)
    monkeypatch.setattr(images, "decode_image", gate)
    monkeypatch.setattr(images, "SMALL_BYTES", 15_000)
    yield gate
    gate.open.set()


@pytest.fixture(name="make")
def _make(closed):
    def make(workers: int) -> ImageProcessor:
        processor = ImageProcessor(tiny_spec(**TOWERS["pages"]), workers)
        closed.callback(processor.executor.shutdown, wait=False)
        return processor

    return make


def job(processor: ImageProcessor, *files: bytes):
    return processor.executor.submit(processor.encode, [Image(data) for data in files], RULES)


def test_a_small_image_does_not_wait_for_large_ones(gate, make):
    processor = make(2)
    large = [job(processor, SMALL, LARGE) for _ in range(6)]
    assert gate.arrived.acquire(timeout=WAIT_S)
    assert len(job(processor, SMALL).result(WAIT_S).work) == 1
    assert not any(one.done() for one in large)
    gate.open.set()
    wanted = processor.encode([Image(SMALL), Image(LARGE)], RULES).work
    for one in large:
        work = one.result(WAIT_S).work
        np.testing.assert_array_equal(work.lengths, wanted.lengths)
        np.testing.assert_array_equal(work.planes["pixels"], wanted.planes["pixels"])


def test_large_images_share_their_room(gate, make, monkeypatch):
    one = make(1)._facts_of_image(Image(LARGE)).memory_bytes
    assert one > images.SMALL_BYTES > make(1)._facts_of_image(Image(SMALL)).memory_bytes
    monkeypatch.setattr(images, "MAX_BYTES", 2 * one + 1000)
    processor = make(4)
    large = [job(processor, LARGE) for _ in range(4)]
    for _ in range(2):
        assert gate.arrived.acquire(timeout=WAIT_S)
    assert job(processor, SMALL).result(WAIT_S)  # the other threads wait in no gate
    gate.open.set()
    for one in large:
        one.result(WAIT_S)
    assert gate.max_held == 2


def test_the_first_image_at_fault_is_named_whatever_its_size(gate, make):
    gate.open.set()
    with pytest.raises(InvalidImage) as caught:
        job(make(1), SMALL, LARGE, LARGE[:100], SMALL[:50]).result(WAIT_S)
    assert caught.value.index == 2


def test_a_large_image_that_waits_may_be_cancelled(gate, make):
    processor = make(1)
    first, second = job(processor, LARGE), job(processor, LARGE)
    assert gate.arrived.acquire(timeout=WAIT_S)
    assert second.cancel()
    gate.open.set()
    first.result(WAIT_S)
    with pytest.raises(CancelledError):
        second.result(WAIT_S)
    assert len(job(processor, LARGE).result(WAIT_S).work) == 1


@pytest.mark.parametrize("file", [SMALL[:50], LARGE], ids=["small", "large"])
def test_a_job_that_fails_leaves_nothing_in_memory(gate, make, file):
    gate.open.set()
    processor = make(1)

    class Arguments:
        def __init__(self, data: bytes):
            self.inputs = [Image(data)]

    def run(arguments: Arguments) -> None:
        processor.encode(arguments.inputs, RULES)
        raise InvalidImage("it is refused later")

    arguments = Arguments(file)
    seen = weakref.ref(arguments)
    gc.disable()
    try:
        answer = processor.executor.submit(run, arguments)
        del arguments
        assert isinstance(answer.exception(WAIT_S), InvalidImage)
        del answer
        processor.executor.submit(int).result(WAIT_S)  # the thread has let go of the job before
        until(lambda: seen() is None)
    finally:
        gc.enable()


def test_after_its_end_no_job_begins_and_none_is_left_without_an_answer(gate, make):
    processor = make(1)
    held = threading.Event()
    blocking = processor.executor.submit(held.wait, WAIT_S)
    large = job(processor, LARGE)
    processor.executor.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        job(processor, SMALL)
    held.set()
    assert blocking.result(WAIT_S)
    with pytest.raises(BackendError, match="closed"):
        large.result(WAIT_S)
