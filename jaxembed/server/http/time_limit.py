"""A time limit that costs nothing for a coroutine that need not wait."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def in_time(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """Await a coroutine. The time begins when it first waits; if it need not wait, no timer is set.
    Raises TimeoutError after `seconds`."""
    try:
        waits_for = call.send(None)
    except StopIteration as end:
        return end.value
    async with asyncio.timeout(seconds):
        return await _Begun(call, waits_for)


class _Begun(Generator[Any, Any, T]):
    """The rest of a coroutine that waits for the future `waits_for`."""

    def __init__(self, call: Coroutine[Any, Any, T], waits_for: Any):
        self._call, self._waits_for = call, waits_for

    def __await__(self) -> "Generator[Any, Any, T]":
        return self

    def send(self, value: Any) -> Any:
        waits_for, self._waits_for = self._waits_for, self
        return self._call.send(value) if waits_for is self else waits_for

    def throw(self, *error: Any) -> Any:
        self._waits_for = self
        return self._call.throw(*error)

    def close(self) -> None:
        self._call.close()
