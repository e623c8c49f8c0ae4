"""The time limit of coroutines that mostly need not wait."""

import asyncio

import pytest

from jaxembed.server.http.time_limit import in_time


async def waiting(future, then=None):
    got = await future
    return got if then is None else await then(got)


async def test_a_coroutine_that_does_not_wait_needs_no_timer(monkeypatch):
    async def answer():
        return 1

    async def fail():
        raise KeyError

    monkeypatch.setattr(asyncio, "timeout", None)
    assert await in_time(answer(), 0.0) == 1
    with pytest.raises(KeyError):
        await in_time(fail(), 0.0)


async def test_a_coroutine_may_wait_several_times():
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    task = asyncio.create_task(in_time(waiting(first, lambda got: waiting(second)), 60.0))
    for future in (first, second):
        await asyncio.sleep(0)
        assert not task.done()
        future.set_result("x")
    assert await task == "x"


async def test_the_error_of_what_it_waits_for_is_raised():
    future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(in_time(waiting(future), 60.0))
    await asyncio.sleep(0)
    future.set_exception(KeyError())
    with pytest.raises(KeyError):
        await task


async def test_it_ends_in_time():
    future = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await in_time(waiting(future), 0.0)
    assert future.cancelled()


async def test_a_cancelled_task_cancels_what_it_waits_for():
    future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(in_time(waiting(future), 60.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()
