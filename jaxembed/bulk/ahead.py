"""Computes several chunks at a time, in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

CALLS_AHEAD = 3  # one runs on the device, one is tokenized, one is ready

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


def ahead(
    compute: Callable[[_Given], _Result], chunks: Iterable[_Given], calls: int = CALLS_AHEAD
) -> Iterator[_Result]:
    """What `compute` gives for each chunk, in order; so many are computed at a time.

    Raises what `compute` and `chunks` raise.
    """
    at_work: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(calls, thread_name_prefix="bulk") as pool:
        try:
            for chunk in chunks:
                at_work.append(pool.submit(compute, chunk))
                if len(at_work) == calls:
                    yield at_work.popleft().result()
            while at_work:
                yield at_work.popleft().result()
        finally:
            for future in at_work:
                future.cancel()


def divided(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Lists of so many texts each, the last one of what is left."""
    while some := list(islice(texts, size)):
        yield some
