"""The steps of a call of the library: for an event loop, or for the calling thread.

A call is written once, as a coroutine that awaits its steps. Those of Blocking are done when they
are awaited, so that the call needs no event loop: `finish` runs it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jaxembed.runtime.model import LoadedModel
from jaxembed.runtime.requests import Answer, Request

T = TypeVar("T")


class Steps:
    """What a call awaits: steps that are taken in other threads than the event loop's."""

    def __init__(self, model: LoadedModel):
        self.model = model

    async def run(self, request: Request[Answer]) -> Answer:
        """Run a request. Raises the errors of InvalidInput and BackendError."""
        return await self.model.run_async(request)

    async def read(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call that reads files."""
        return await asyncio.to_thread(call, *arguments)

    async def compute(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call that takes a core for a while."""
        return await self.model.runner.off_loop(call, *arguments)


class Blocking(Steps):
    """Steps that are taken in the calling thread."""

    async def run(self, request: Request[Answer]) -> Answer:
        return self.model.run(request)

    async def read(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments)

    compute = read


def finish(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call whose steps are Blocking."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a blocking call has awaited something that was not done")
