"""Threads that prepare inputs, such as tokenizing texts: small inputs never wait for large ones."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxembed.errors import BackendError

_thread = threading.local()  # has `is_for_small`: whether the thread is for small inputs


class _LargeError(Exception):
    """Stops a job in a thread for small inputs, because the job has a large input."""


def is_for_small() -> bool:
    """Return whether the current thread is one of JobThreads for small inputs."""
    return getattr(_thread, "is_for_small", False)


def restart_if_small() -> None:
    """Move the current job, which has found a large input, to a thread for large inputs. In a
    thread for small inputs this raises an exception, on which JobThreads runs the job again in a
    thread for large inputs. In any other thread this does nothing."""
    if is_for_small():
        raise _LargeError


class JobThreads(Executor):
    """An executor with `workers` threads for small inputs, and as many for large ones.

    Every job starts in a thread for small inputs. A job that finds a large input must call
    `restart_if_small`, and is run again from its start in a thread for large inputs.
    """

    def __init__(self, workers: int, name: str):
        self.workers = workers
        self._small = ThreadPoolExecutor(
            workers, name, initializer=partial(setattr, _thread, "is_for_small", True)
        )
        self._large = ThreadPoolExecutor(workers, f"{name}-large")

    def submit(self, call: Callable, /, *arguments: Any, **keywords: Any) -> Future:
        """Run the job `call(*arguments, **keywords)` in a thread, and return a future of its
        result. Raises RuntimeError after `shutdown`."""
        future: Future = Future()
        self._small.submit(self._run, [future, partial(call, *arguments, **keywords)])
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further jobs. With `wait`, return when all jobs are done. Without `wait`, a job
        that still has to move to a thread for large inputs fails with BackendError.
        `cancel_futures` has no effect; callers may cancel futures themselves."""
        self._small.shutdown(wait)
        self._large.shutdown(wait)

    def _run(self, task: list[Any]) -> None:
        """Run the job of `task`, which is the list [future, job], and resolve the future. The job
        is skipped if the future was cancelled."""
        # Empty the task to avoid a cycle of references: the future refers to its error, the error
        # to the frames of this thread, and one of these frames to the task.
        future, job = task
        task.clear()
        try:
            _resolve(future, None if future.cancelled() else job())
        except _LargeError:  # start anew in a thread for large inputs
            try:
                self._large.submit(self._run, [future, job])
            except RuntimeError:  # the threads for large inputs were shut down
                _resolve(future, error=BackendError("this Embedder is closed"))
        except BaseException as error:
            _resolve(future, error=error)
        finally:
            del future, job  # the frames that an error refers to must not refer to the future


def _resolve(future: Future, result: Any = None, *, error: BaseException | None = None) -> None:
    """Resolve a future with a result or an error, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
