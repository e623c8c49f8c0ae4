"""Small texts do not wait for large ones to be tokenized. For images, see test_image_threads."""

import threading

import pytest
from conftest import tiny_spec
from fakes import WAIT_S

from jaxembed.config import TextConfig
from jaxembed.data.inputs import Text
from jaxembed.preprocessing.text import TextProcessor, TokenizationOptions
from jaxembed.preprocessing.tokenizer import SMALL_TEXT

RULES = TokenizationOptions("", truncate=True, side="right")
LARGE = "x" * 4 * SMALL_TEXT  # a single word: what is read first does not tell all tokens


class Gate:
    """A tokenizer that reads large texts only after `open` is set."""

    def __init__(self, file):
        self.file = file
        self.open, self.arrived = threading.Event(), threading.Semaphore(0)

    def __getattr__(self, name: str):
        return getattr(self.file, name)

    def encode_batch(self, texts, **options):
        if max(map(len, texts)) > SMALL_TEXT:
            self.arrived.release()
            assert self.open.wait(WAIT_S)
        return self.file.encode_batch(texts, **options)


@pytest.fixture(name="processor")
def _processor(tiny_checkpoint):
    path = tiny_checkpoint / "tokenizer.json"
    processor = TextProcessor(path, tiny_spec(), 64, TextConfig(), workers=1)
    yield processor
    processor.executor.shutdown(wait=False)


def test_a_small_text_does_not_wait_for_large_ones(processor):
    gate = processor._tokenizer.file = Gate(processor._tokenizer.file)
    processor._tokenizer._of_ascii = None  # all texts come to the gate
    large = [
        processor.executor.submit(processor.encode, [Text("a cat"), Text(LARGE)], RULES)
        for _ in range(3)
    ]
    assert gate.arrived.acquire(timeout=WAIT_S)
    small = processor.executor.submit(processor.encode, [Text("a cat")], RULES).result(WAIT_S)
    assert not any(one.done() for one in large)
    gate.open.set()
    for one in large:
        assert one.result(WAIT_S).work.lengths[0] == small.work.lengths[0]


def test_a_large_text_is_read_in_threads_of_others_as_well(processor):
    """Without threads for small texts there are none to leave."""
    assert processor.encode([Text(LARGE)], RULES).work.lengths.tolist() == [3]
