"""Computes several chunks at the same time in threads, and yields the results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

CALLS_AHEAD = 3  # chunks: one runs on the device, one is tokenized, one is ready to run

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def ahead(
    compute: Callable[[_Given], _Result], chunks: Iterable[_Given], calls: int = CALLS_AHEAD
) -> Iterator[_Result]:
    """Yield `compute(chunk)` for each chunk, in order, with up to `calls` threads.

    Raises the errors of `compute` and of the iterator `chunks`.
    """
    running: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(calls, thread_name_prefix="bulk") as pool:
        try:
            for chunk in chunks:
                running.append(pool.submit(compute, chunk))
                if len(running) == calls:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def in_chunks(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Yield lists of `size` texts each; the last list may be shorter."""
    while chunk := list(islice(texts, size)):
        yield chunk
